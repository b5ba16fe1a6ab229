"""Supervised fine-tuning, prompt-masked: cross-entropy of the target tokens given the prompt.

Makes the small starting policy (`sft.*`): as many passes over the examples as `steps` or `max_seconds` allow. The
learning rate goes by the steps alone: a busy host that makes all of them makes what an idle one makes.
"""

# ruff: noqa: N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import NamedTuple

import torch

from kbrl_async.learning.logprobs import batch_logprobs
from kbrl_async.learning.optimizer import guarded_step, make_adamw, rate_at
from kbrl_async.learning.packing import TREE_TOKENS, Microbatch, pack
from kbrl_async.learning.policies.models import causal_lm
from kbrl_async.learning.settings import Sft

WARMUP_STEPS = 20
GRAD_CLIP = 1.0


class Example(NamedTuple):
    prompt_ids: list[int]
    token_ids: list[int]
    """The target, end-of-text included."""


class SftReport(NamedTuple):
    steps: int
    seconds: float
    target_tokens: int
    loss: float
    """Mean over the last tenth of the steps."""


def is_bf16_faster(device: torch.device) -> bool:
    """Than fp32. A CPU with avx512_bf16 does products in bf16 1.7–2 times as fast; for one without AVX-512 torch has
    none but a plain loop, 20 times as slow."""
    return device.type != "cpu" or bool(torch.cpu._is_avx512_bf16_supported())  # torch has no public name for it


def train_sft(
    model: torch.nn.Module,
    examples: Iterable[tuple[list[int], list[int]]],
    settings: Sft,
    progress: Callable[[int, float, float], None] = lambda step, loss, share: None,
    *,
    tree_tokens: int = TREE_TOKENS,
    bf16: bool = False,
    workers: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> SftReport:
    """Trains `model` in place, on `examples` over and over. `progress(step, loss, share_done)` is called after every
    optimiser step.

    `tree_tokens`: longest row of examples that share a prompt. Sharing saves tokens, which a step costs on a CPU; on a
    GPU it costs its microbatches, and rows of one kind (0) make fewer. `bf16`: by autocast, weights stay fp32 (see
    `is_bf16_faster`). `workers` compute microbatches at once, each with torch's own threads.
    """
    optimizer = make_adamw(model.parameters(), settings.lr)
    started, tokens, losses = clock(), 0, list[float]()
    budget = 2 * settings.batch_tokens if workers == 1 else settings.batch_tokens // workers
    with ThreadPoolExecutor(workers) as pool:
        for batch in _batches(examples, settings.batch_tokens):
            of_steps = len(losses) / settings.steps
            share = max(of_steps, (clock() - started) / settings.max_seconds)
            if share >= 1.0:
                break
            rate = rate_at(len(losses), settings.lr, WARMUP_STEPS, "cosine", of_steps, floor=0.02)
            microbatches = sorted(pack(batch, budget, tree_tokens), key=lambda m: -m.input_BL.numel())
            losses.append(_step(model, optimizer, microbatches, rate, bf16, pool))
            tokens += sum(len(example.token_ids) for example in batch)
            progress(len(losses), losses[-1], share)
    last = losses[-max(1, len(losses) // 10) :]
    return SftReport(len(losses), clock() - started, tokens, sum(last) / max(1, len(last)))


_OF_SAMPLING = ("ratio_", "mismatch_", "staleness_", "ess", "reward_mean", "advantage_abs", "dropped_share")
"""Beginnings of metrics that compare the learner with who wrote the samples."""


def without_behaviour(metrics: Mapping[str, float]) -> dict[str, float]:
    """An update's metrics where its samples are demonstrations: nobody sampled them, so ratios say nothing. `loss` is
    the mean cross-entropy of a target token, and `perplexity` its exponential."""
    kept = {name: value for name, value in metrics.items() if not name.startswith(_OF_SAMPLING)}
    return {**kept, "perplexity": math.exp(min(metrics.get("loss", 0.0), 50.0))}


def _batches(examples: Iterable[tuple[list[int], list[int]]], batch_tokens: int) -> Iterator[list[Example]]:
    """Batches of about `batch_tokens`, pass after pass, without end."""
    batch, size = list[Example](), 0
    for prompt_ids, token_ids in itertools.chain.from_iterable(itertools.repeat(examples)):
        batch.append(Example(prompt_ids, token_ids))
        size += len(prompt_ids) + len(token_ids)
        if size >= batch_tokens:
            yield batch
            batch, size = [], 0


def _step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: list[Microbatch],
    rate: float,
    bf16: bool,
    pool: Executor,
) -> float:
    """One optimiser step, and its loss. Gradients are added up in order, whichever of them was ready first."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    n_tokens = sum(len(microbatch.target_T) for microbatch in microbatches)

    def gradients(microbatch: Microbatch) -> tuple[float, tuple[torch.Tensor, ...]]:
        # autocast's cache of weights is one for all threads
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            logp_T, _ = batch_logprobs(causal_lm(model), microbatch.to(device), temperature=1.0)
        loss = -logp_T.sum() / n_tokens
        return float(loss.detach()), torch.autograd.grad(loss, parameters, materialize_grads=True)

    total = 0.0
    for loss, found in pool.map(gradients, microbatches):
        total += loss
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    guarded_step(optimizer, total, GRAD_CLIP, rate)
    return total
