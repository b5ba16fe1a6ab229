"""Does retrieval help the small policy?"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from scipy import stats

from benchmarks.harness import Halves, Result, verifying
from kbrl_async.kernels.problems import load_suite
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.lab.indexing import build_index
from kbrl_async.lab.small_policy.author import CAREFUL, Author
from kbrl_async.lab.small_policy.configured import small_options
from kbrl_async.lab.small_policy.families.source import render_answer
from kbrl_async.lab.small_policy.making import ensure_small_policy
from kbrl_async.lab.small_policy.specs import SPECS
from kbrl_async.learning.policies.models import load_tokenizer
from kbrl_async.rollouts.prompts import extract, render_prompt
from kbrl_async.rollouts.prompts.examples import render_with_examples
from kbrl_async.rollouts.retrieval import CorpusSource, Entry, Query, Retriever
from kbrl_async.runs.config import load
from protocols.records import Candidate, Fault, Problem

CONTEXT, ANSWER = 768, 256
WORD = re.compile(r"\w+|[^\w\s]")


def raicl(
    samples: Annotated[int, "answers to each problem and kind of prompt"] = 24,
    k: Annotated[int, "examples"] = 3,
    policy: Annotated[Path | None, "folder of a small policy that knows examples"] = None,
    cache: Annotated[Path | None, "where a policy that is made is kept"] = None,
) -> Result:
    """Does retrieval raise the small policy's correct rate on held-out problems? Prompts without and with examples.

    The policy is made first, unless a folder is given: by SFT alone, on a corpus of which half holds worked examples.
    The index holds a right kernel of every problem of the suite, held-out ones included, so the leak rules have work.
    Each held-out problem is answered so many times at temperature 1 with each kind of prompt; every answer is compiled
    and verified. The anchor is the prompt without examples.
    """
    torch.manual_seed(0)
    heldout = [problem for problem in load_suite(split="heldout") if problem.problem_id in SPECS]
    counts = {"without": [0, 0], "with": [0, 0]}
    with tempfile.TemporaryDirectory() as name, verifying(settings=TimingBench(deadline_s=10.0)) as halves:
        wanted = ["prompt.option=raicl", "prompt.index=index", "sft.shot_share=0.5", "sft.max_seconds=240"]
        options = small_options(load(overrides=wanted))
        writer = SampledPolicy(policy or ensure_small_policy(cache or Path(name) / "cache", options))
        retriever = Retriever.open(suite_index(Path(name) / "index"), [(p.problem_id, p.source) for p in heldout])
        judged: dict[tuple[str, str], tuple[bool, bool]] = {}
        for problem in heldout:
            hits = retriever.retrieve(Query(problem.source, problem.problem_id, "c", only_backend=True, k=k)).hits
            shown = render_with_examples("compact", problem, hits, writer.tokens, CONTEXT - ANSWER)
            for kind, prompt in (("without", render_prompt("compact", problem)), ("with", shown.text)):
                for answer in writer.answers(prompt, samples):
                    key = (problem.problem_id, extract(answer).source)
                    if key not in judged:  # equal answers are judged once
                        judged[key] = verdict(halves, problem, key[1])
                    counts[kind] = [count + ok for count, ok in zip(counts[kind], judged[key], strict=True)]
    total = samples * len(heldout)
    table = [[counts[kind][1], total - counts[kind][1]] for kind in ("with", "without")]
    return {
        "heldout_problems": len(heldout),
        "answers_each": total,
        "examples": k,
        **{f"compile_rate_{kind}": found[0] / total for kind, found in counts.items()},
        **{f"correct_rate_{kind}": found[1] / total for kind, found in counts.items()},
        "fisher_p": float(stats.fisher_exact(table, alternative="greater").pvalue),
    }


def verdict(halves: Halves, problem: Problem, source: str) -> tuple[bool, bool]:
    """Whether it compiled, and was correct."""
    if not source:
        return False, False
    build, bench = halves.both(problem, Candidate(source, "c"))
    return build.fault is Fault.OK, bench is not None and bench.verdict.fault is Fault.OK


def suite_index(folder: Path) -> Path:
    """An index of a right kernel to each problem, held-out ones included, so that the leak rules have work."""
    if not folder.exists():
        build_index([CorpusSource("suite", "run", "1", solutions)], folder)
    return folder


def solutions() -> Iterator[Entry]:
    """A right kernel of every problem of the grammar, as a run that solved them all would leave them."""
    for problem in (problem for problem in load_suite() if problem.problem_id in SPECS):
        spec = SPECS[problem.problem_id]
        author = Author(random.Random(problem.problem_id), msgspec.structs.replace(CAREFUL, fast=0.5))
        source = extract(render_answer(spec.module(), spec.answer(author), author)).source
        uid = f"run:{problem.problem_id}"
        yield Entry(uid, "run", problem.source, source, "c", problem.problem_id, problem.level, 1.0, True)


class SampledPolicy:
    """Draws answers at temperature 1."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._tokenizer: Any = load_tokenizer(str(folder))
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()

    def tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    @torch.no_grad()
    def answers(self, prompt: str, count: int) -> list[str]:
        ids = torch.tensor([self._tokenizer.encode(prompt, add_special_tokens=False)] * count)
        drawn = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=ANSWER, pad_token_id=self._tokenizer.pad_token_id,
        )  # fmt: skip
        return [self._tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True) for row in drawn]
