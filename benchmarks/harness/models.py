"""Models of real shapes with random weights, and a group of random tokens to train them on."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import msgspec
import torch

from kbrl_async.errors import UserError
from kbrl_async.runs.config import Config
from kbrl_async.runs.sizing import footprint, layout
from kbrl_async.shapes import read_shape, shape_of
from protocols.records import TrainGroup, TrainSample

_TINY = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False}  # fmt: skip
TOYS: dict[str, dict[str, Any]] = {
    "tiny": {**_TINY, "model_type": "qwen2"},
    "tiny-qwen3": {**_TINY, "model_type": "qwen3", "head_dim": 32},
    "300m": {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32_000},
}  # fmt: skip
POSITIONS = 131072
END = "<end>"
"""The end of text of `word_tokenizer`, its entry 1."""
H100_DENSE = 989e12
"""FLOP/s in bf16 by the data sheet of an H100 or H200 (SXM), what others' MFU are shares of."""


@functools.cache
def config_of(shape: str) -> Any:
    """Of a toy, a public model or a folder; as transformers has it, without sliding windows."""
    from transformers import AutoConfig

    if (Path(shape) / "config.json").is_file():
        return AutoConfig.from_pretrained(shape)
    try:
        given = TOYS[shape] if shape in TOYS else read_shape(shape).as_config()
    except UserError as error:
        raise SystemExit(f"{error}, or one of {', '.join(TOYS)}") from None
    return AutoConfig.for_model(**{**given, "max_position_embeddings": POSITIONS}, sliding_window=None)


def random_model(config: Any, device: str, dtype: torch.dtype, seed: int = 0) -> torch.nn.Module:
    """Made on the device: 7 billion random numbers on a CPU would take minutes."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: torch.nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def word_tokenizer(entries: int, **more: str) -> Any:
    """A real tokenizer of that many entries, all of them made up: words `t7`, and no end-of-text that is ever drawn.

    The end of text is no beginning of a word: a special token is cut out wherever it stands, of `t17`, too.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {END if number == 1 else f"t{number}": number for number in range(entries)}
    fast = Tokenizer(models.WordLevel(words, unk_token="t0"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END, **more)


def random_group(vocabulary: int, prompt_tokens: int, length: int, sequences: int) -> list[TrainGroup]:
    """One prompt with so many answers, half of them good; log-probabilities are about what a random model gives."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, vocabulary, (count,), generator=generator).tolist()

    prompt, guess = tokens(prompt_tokens), [-math.log(vocabulary)] * (length - prompt_tokens)
    samples = [
        TrainSample(f"g.r{i}", prompt, tokens(len(guess)), guess, 1.0 if i % 2 else -1.0, 0.0, 0)
        for i in range(sequences)
    ]
    return [TrainGroup("g", "p", 1, samples)]


def planned_gb(settings: Config, config: Any, length: int, device: str | torch.device) -> dict[str, Any]:
    """What `kbrl plan` counts for a learner beside vLLM at this length, without a CUDA context, which the allocator
    does not see."""
    on_gpu, replace = torch.device(device).type == "cuda", msgspec.structs.replace
    capacity = float(torch.cuda.get_device_properties(device).total_memory) if on_gpu else None
    sampler = replace(settings.sampler, engine="vllm")
    planned = replace(settings, sampler=sampler, max_tokens=max(1, length - layout.PROMPT_TOKENS))
    shape = shape_of(config.to_dict())
    found = footprint.learner(shape, layout.learning_of(planned, shape, capacity)).parts
    found.pop("CUDA", None)
    return {"predicted_gb": sum(found.values()) / 1e9, "largest_gb": {k: round(v / 1e9, 1) for k, v in found.items()}}
