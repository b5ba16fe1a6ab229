"""Supervised fine-tuning, prompt-masked: cross-entropy of the target tokens given the prompt.

Used to make the small starting policy, for best-of-N and for reward-weighted training data. Stops at the first of
`steps`, `epochs` of the examples (an endless iterable needs one of the others) and `max_seconds`.
"""

# ruff: noqa: N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import NamedTuple

import msgspec
import torch

from kbrl_async.errors import ConfigError
from kbrl_async.learning.logprobs import batch_logprobs
from kbrl_async.learning.optimizer import guarded_step, make_adamw, rate_at
from kbrl_async.learning.packing import pack
from kbrl_async.learning.policies.models import causal_lm


class Example(NamedTuple):
    prompt_ids: list[int]
    token_ids: list[int]
    """The target, end-of-text included."""


class SftOptions(msgspec.Struct, frozen=True):
    steps: int = 0
    epochs: int = 1
    """Passes over `examples`, which must then be a list or another iterable that starts again."""
    max_seconds: float = 0.0
    batch_tokens: int = 4096
    """Tokens (prompts included) of one optimiser step."""
    token_budget: int = 2048
    """Tokens of one microbatch."""
    tree_tokens: int = 768
    """Longest row of examples that share a prompt; 0: each stands alone. Sharing saves tokens, which a step costs on a
    CPU; on a GPU it costs its microbatches, and rows of one kind make fewer."""
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    schedule: str = "cosine"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    dtype: str = "bf16"
    """Arithmetic; bf16 autocast is 1.7–2× faster than fp32 where the CPU has avx512_bf16, weights stay fp32."""


class SftReport(NamedTuple):
    steps: int
    seconds: float
    target_tokens: int
    loss: float
    """Mean over the last tenth of the steps."""


def train_sft(
    model: torch.nn.Module,
    examples: Iterable[tuple[list[int], list[int]]],
    options: SftOptions,
    progress: Callable[[int, float, float], None] = lambda step, loss, share: None,
    clock: Callable[[], float] = time.perf_counter,
) -> SftReport:
    """Trains `model` in place. `progress(step, loss, share_done)` is called after every optimiser step."""
    if options.dtype not in ("fp32", "bf16"):
        raise ConfigError(f"unknown training dtype {options.dtype!r}", "Use fp32 or bf16")
    optimizer = make_adamw(model.parameters(), options.learning_rate, options.weight_decay, options.betas)
    started, tokens, losses = clock(), 0, list[float]()
    for batch, share in _batches(examples, options):
        share = max(share, _share(len(losses), clock() - started, options))
        if share >= 1.0:
            break
        rate = rate_at(len(losses), options.learning_rate, options.warmup_steps, options.schedule, share, floor=0.02)
        losses.append(_step(model, optimizer, batch, options, rate))
        tokens += sum(len(example.token_ids) for example in batch)
        progress(len(losses), losses[-1], share)
    tail = losses[-max(1, len(losses) // 10) :]
    return SftReport(len(losses), clock() - started, tokens, sum(tail) / max(1, len(tail)))


_OF_SAMPLING = ("ratio_", "mismatch_", "staleness_", "ess", "reward_mean", "advantage_abs", "dropped_share")
"""Beginnings of metrics that compare the learner with who wrote the samples."""


def without_behaviour(metrics: Mapping[str, float]) -> dict[str, float]:
    """An update's metrics where its samples are demonstrations: nobody sampled them, so ratios say nothing. `loss` is
    the mean cross-entropy of a target token, and `perplexity` its exponential."""
    kept = {name: value for name, value in metrics.items() if not name.startswith(_OF_SAMPLING)}
    return {**kept, "perplexity": math.exp(min(metrics.get("loss", 0.0), 50.0))}


def _share(steps: int, seconds: float, options: SftOptions) -> float:
    by_steps = steps / options.steps if options.steps > 0 else 0.0
    return max(by_steps, seconds / options.max_seconds if options.max_seconds > 0 else 0.0)


def _batches(
    examples: Iterable[tuple[list[int], list[int]]], options: SftOptions
) -> Iterator[tuple[list[Example], float]]:
    """Batches of about `batch_tokens`, each with the share of all passes done before it (0 for endless examples)."""
    total = options.epochs * len(examples) if isinstance(examples, Sized) else 0
    bounded = options.steps > 0 or options.max_seconds > 0
    batch, size, seen = list[Example](), 0, 0
    for _ in range(1 << 62 if bounded and options.epochs == 0 else max(1, options.epochs)):
        for prompt_ids, token_ids in examples:
            batch.append(Example(prompt_ids, token_ids))
            size += len(prompt_ids) + len(token_ids)
            if size >= options.batch_tokens:
                yield batch, seen / total if total else 0.0
                seen += len(batch)
                batch, size = [], 0
    if batch:
        yield batch, seen / total if total else 0.0


def _step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: list[Example],
    options: SftOptions,
    rate: float,
) -> float:
    device = next(model.parameters()).device
    n_tokens = sum(len(example.token_ids) for example in batch)
    total = 0.0
    for microbatch in pack(batch, options.token_budget, options.tree_tokens):
        with torch.autocast(device.type, torch.bfloat16, enabled=options.dtype == "bf16"):
            logp_T, _ = batch_logprobs(causal_lm(model), microbatch.to(device), temperature=1.0)
        loss = -logp_T.sum() / n_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    guarded_step(optimizer, total, options.grad_clip, rate)
    return total
