"""Makes the small policy once: corpus → tokenizer → Qwen2 model → SFT → a plain Hugging Face folder in the cache.

Invariants
* The folder appears whole or not at all (temp folder, then rename); its name is the hash of everything that shaped it.
* A policy that `sft.max_seconds` cut lies under a name of its own: who asks later gets a whole one, made anew.
* From there on the small policy is loaded like any other model: no other code path knows it is ours.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

import kbrl_async.lab.small_policy
from kbrl_async.kernels.problems.sources.folder import SUITE
from kbrl_async.lab.small_policy.author import Habits
from kbrl_async.lab.small_policy.corpus import CorpusExample, examples
from kbrl_async.learning.packing import TREE_TOKENS
from kbrl_async.learning.settings import Sft
from kbrl_async.learning.sft import SftReport, is_bf16_faster, train_sft
from kbrl_async.weights import MADE

PAD, EOS = "<pad>", "<eos>"


class SmallPolicyOptions(msgspec.Struct, frozen=True):
    """What the small policy is made from, by `configured.small_options`; what has a default here is no setting."""

    sft: Sft
    """With the shares that the run has use for, else 0."""
    prompt_option: str
    backend: str
    """What the answers are written in."""
    verdict_share: float
    """Share of the corpus that predicts an attempt's verdict: for runs with a verifier."""
    seed: int = 0
    habits: Habits = Habits()


TOKENIZER_EXAMPLES = 6000
"""Of the corpus, from which the tokenizer is made."""
LEAST_LINES = 3
"""A line that is written less often is no entry of the tokenizer."""
PIECE_SCORE, BYTE_SCORE = -1.0, -10.0
"""Of the tokenizer's entries: of all ways to spell a text the one with the largest sum counts, so the shortest does."""
_PIECE = r"```python\n(?:[^\n]*\n){4}| *(?:x =|//) |[^\n]*\n|[^\n]+"
"""How a text is cut before entries are looked up: an answer's head, the beginning of a statement of PyTorch and of a
comment, so that what follows is the same entry in a problem and in an answer, and else whole lines."""
_WORD = re.compile(r" *[^ \n]+\n?|\s+")
WINDOW_BATCHES = 8
MOST_WORKERS = 4
Pair = tuple[list[int], list[int]]
"""Ids of a prompt and of its answer."""
Progress = Callable[[str, float], None]
"""Called with a line to show and the share done (0 … 1)."""


def ensure_small_policy(
    cache: Path,
    options: SmallPolicyOptions,
    progress: Progress = lambda line, share: None,
    device: str = "cpu",
) -> Path:
    """The policy's folder, made on first use. Safe to call from several processes: the first rename wins."""
    if (made := folder_of(cache, options)) is not None:
        return made
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
    try:
        report = make_policy(unfinished, options, progress, device)
        folder = place_of(cache, options, report.steps)
        if folder.exists():
            shutil.rmtree(unfinished if (folder / MADE).is_file() else folder)
        if unfinished.exists():
            os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def folder_of(cache: Path, options: SmallPolicyOptions) -> Path | None:
    """Where the policy lies; None where it was not made yet."""
    folder = place_of(cache, options)
    return folder if (folder / MADE).is_file() else None


def place_of(cache: Path, options: SmallPolicyOptions, steps: int | None = None) -> Path:
    """`steps`: done, where they are known."""
    whole = steps is None or steps >= options.sft.steps
    return cache / f"small-{_fingerprint(options)}{'' if whole else f'-cut-at-{steps}'}"


def make_policy(folder: Path, options: SmallPolicyOptions, progress: Progress, device: str) -> SftReport:
    sft = options.sft
    torch.manual_seed(options.seed)
    transformers_logging.disable_progress_bar()
    corpus = examples(
        options.seed,
        sft.examples,
        habits=options.habits,
        prompt_option=options.prompt_option,
        turn_share=sft.turn_share,
        verdict_share=options.verdict_share,
        shot_share=sft.shot_share,
        backend=options.backend,
    )
    first = list[CorpusExample]()
    for example in itertools.islice(corpus, TOKENIZER_EXAMPLES):
        if len(first) % 500 == 0:
            progress("writing the corpus", 0.0)
        first.append(example)
    progress("making the tokenizer", 0.0)
    tokenizer = train_tokenizer((text for e in first for text in (e.prompt, e.answer)), sft.vocab_size)
    pairs = MadeOnce(bucketed(tokenize(itertools.chain(first, corpus), tokenizer), options.seed))
    model = small_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, sft).to(device)
    tree_tokens = TREE_TOKENS if device == "cpu" else 0
    workers = min(MOST_WORKERS, torch.get_num_threads()) if device == "cpu" else 1
    with _without_plans(device), _threads(torch.get_num_threads() // workers):
        report = train_sft(
            model,
            pairs,
            sft,
            lambda step, loss, share: progress(f"step {step} of {sft.steps}, loss {loss:.2f}", share),
            tree_tokens=tree_tokens,
            bf16=is_bf16_faster(torch.device(device)),
            workers=workers,
        )
    model.to("cpu").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    facts = {"report": report._asdict(), "options": msgspec.to_builtins(options)}
    (folder / MADE).write_text(json.dumps(facts, indent=1))
    return report


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Of torch, in each worker. Its operations on a model of this size last microseconds: to split each of them costs
    two threads two to four times the work that one thread has, and microbatches need no waiting for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _without_plans(device: str) -> contextlib.AbstractContextManager[None]:
    """cuDNN's attention plans for every new shape, for tenths of a second, and here each microbatch has its own."""
    if device == "cpu":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen: contextlib.AbstractContextManager[None] = sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )
    return chosen


def small_model(vocab_size: int, eos: int, pad: int, sft: Sft) -> Any:
    """A Qwen2-architecture model with tied embeddings, randomly initialised."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=sft.hidden_size,
        intermediate_size=4 * sft.hidden_size,
        num_hidden_layers=sft.layers,
        num_attention_heads=sft.heads,
        num_key_value_heads=sft.heads,
        max_position_embeddings=sft.context,
        tie_word_embeddings=True,
        eos_token_id=eos,
        pad_token_id=pad,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


class MadeOnce(Iterable[Pair]):
    """The pairs of `source`, again and again; each is made once, when it is first wanted.

    The steps of the default run want three quarters of the corpus, and the first of them none of its end.
    """

    def __init__(self, source: Iterator[Pair]) -> None:
        self._source, self._made = source, list[Pair]()

    def __iter__(self) -> Iterator[Pair]:
        for at in itertools.count():
            if at == len(self._made):
                if (pair := next(self._source, None)) is None:
                    return
                self._made.append(pair)
            yield self._made[at]


def bucketed(pairs: Iterable[Pair], seed: int, batch: int = 64) -> Iterator[Pair]:
    """The same pairs, neighbours of like length within random windows: batches then hold almost no padding."""
    rng, left = random.Random(seed), iter(pairs)
    while window := list(itertools.islice(left, WINDOW_BATCHES * batch)):
        window.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        parts = [window[i : i + batch] for i in range(0, len(window), batch)]
        rng.shuffle(parts)
        yield from (pair for part in parts for pair in part)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of whole lines, with `vocab_size` entries at most; `<pad>` is 0 and `<eos>` is 1.

    Lines of the texts are entries, the most frequent ones, then words of the others; what is neither is spelt in bytes.
    So an answer is some 35 tokens long, every choice between a right and a wrong line is one decision of the policy,
    and there is no entry that is never written: a sampler would now and then pick one.
    """
    lines = Counter(line for text in texts for line in re.findall(_PIECE, text))
    words = Counter[str]()
    for line, count in lines.items():
        if count < LEAST_LINES:
            words.update(dict.fromkeys(_WORD.findall(line), count))
    frequent = [line for line, count in lines.most_common() if count >= LEAST_LINES]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = dict.fromkeys(alphabet, BYTE_SCORE)
    for piece in [*frequent, *(word for word, _ in words.most_common())][: vocab_size - len(alphabet) - 2]:
        pieces.setdefault(byte_level.pre_tokenize_str(piece)[0][0], PIECE_SCORE)
    tokenizer = Tokenizer(models.Unigram([(PAD, 0.0), (EOS, 0.0), *pieces.items()], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_PIECE), behavior="isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left")


def tokenize(corpus: Iterable[CorpusExample], tokenizer: PreTrainedTokenizerFast, chunk: int = 512) -> Iterator[Pair]:
    """(prompt ids, answer ids with end-of-text) of each example."""
    end, left = [tokenizer.convert_tokens_to_ids(EOS)], iter(corpus)
    while some := list(itertools.islice(left, chunk)):
        prompts = tokenizer([e.prompt for e in some], return_attention_mask=False)["input_ids"]
        answers = tokenizer([e.answer for e in some], return_attention_mask=False)["input_ids"]
        yield from ((prompt, answer + end) for prompt, answer in zip(prompts, answers, strict=True))


def _fingerprint(options: SmallPolicyOptions) -> str:
    """Hash of the options, of this room's code and of the suite: whatever could change the result."""
    digest = hashlib.sha256(msgspec.json.encode(options))
    room = Path(kbrl_async.lab.small_policy.__file__).parent
    for path in sorted([*room.rglob("*.py"), *SUITE.rglob("*.py"), *SUITE.rglob("*.toml")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
