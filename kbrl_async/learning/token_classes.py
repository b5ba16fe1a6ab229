"""From a sample's advantages to one for each token: the kernel's tokens, and those around it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from protocols.records import TrainSample


def token_advantages(sample: TrainSample) -> list[float]:
    """`advantage` for the kernel's tokens and `plan_advantage` for all others; `advantage` for all where there is one
    class only."""
    n = len(sample.token_ids)
    if not sample.has_plan:
        return [sample.advantage] * n
    start, end = min(sample.code_start, n), min(sample.code_end, n)
    plan = sample.plan_advantage
    return [plan] * start + [sample.advantage] * (end - start) + [plan] * (n - end)


def flat_advantages(samples: Sequence[TrainSample]) -> torch.Tensor:
    """Of all response tokens of `samples`, in order [T]."""
    if not any(sample.has_plan for sample in samples):  # no list of millions of equal numbers
        lengths = torch.tensor([len(sample.token_ids) for sample in samples])
        return torch.tensor([sample.advantage for sample in samples]).repeat_interleave(lengths)
    return torch.tensor([a for sample in samples for a in token_advantages(sample)])
