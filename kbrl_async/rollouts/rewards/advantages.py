"""Advantages: rewards against a baseline, within the samples of one prompt (and one turn).

Adding a baseline is one function and one line in `settings.ADVANTAGES`; a user's own is `package.module:object`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kbrl_async.errors import ConfigError
from kbrl_async.rollouts.settings import ADVANTAGES

_EPSILON = 1e-6
Baseline = Callable[[Sequence[float]], list[float]]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """r_i − mean of the others (RLOO, Kool et al. 2019): unbiased. A single sample has nothing to compare: 0."""
    n, total = len(rewards), sum(rewards)
    if n < 2:
        return [0.0] * n
    return [r - (total - r) / (n - 1) for r in rewards]


def group_mean(rewards: Sequence[float]) -> list[float]:
    """r_i − mean (Dr. GRPO): leave-one-out times (n − 1)/n."""
    mean = sum(rewards) / max(1, len(rewards))
    return [r - mean for r in rewards]


def group_mean_std(rewards: Sequence[float]) -> list[float]:
    """(r_i − mean) / (std + 1e-6) with the population's std (GRPO, Shao et al. 2024)."""
    centred = group_mean(rewards)
    std = math.sqrt(sum(a * a for a in centred) / max(1, len(centred)))
    return [a / (std + _EPSILON) for a in centred]


def none(rewards: Sequence[float]) -> list[float]:
    """r_i itself (REINFORCE without a baseline)."""
    return list(rewards)


def best_of_n(rewards: Sequence[float], keep: int = 3, above: float = 0.5) -> list[float]:
    """1 for the best `keep` samples with a reward above `above`, 0 for the others: with −A·log π this is supervised
    fine-tuning on the best of n."""
    ranked = sorted(range(len(rewards)), key=lambda i: -rewards[i])
    chosen = {i for i in ranked[:keep] if rewards[i] > above}
    return [float(i in chosen) for i in range(len(rewards))]


def reward_weight(rewards: Sequence[float]) -> list[float]:
    """max(r, 0): with −A·log π, scaled to mean 1 over the batch, this is reward-weighted supervised fine-tuning."""
    return [max(reward, 0.0) for reward in rewards]


def find_baseline(advantage: str) -> Baseline:
    """The baseline of this name.

    :raises UserError: there is none.
    """
    found: Baseline = ADVANTAGES.load(advantage)
    return found


def batch_scale(advantages: Sequence[float]) -> float:
    """1 / root mean square of all advantages of a batch (they are about 0 in the mean); 1 where all are 0."""
    square = sum(a * a for a in advantages) / max(1, len(advantages))
    return 1.0 / math.sqrt(square) if square > _EPSILON**2 else 1.0


def mean_scale(advantages: Sequence[float]) -> float:
    """1 / mean: makes weights of mean 1 of them; 1 where all are 0."""
    mean = sum(advantages) / max(1, len(advantages))
    return 1.0 / mean if mean > _EPSILON else 1.0


IMITATES = frozenset({"best_of_n", "reward_weight"})
"""Baselines under which samples are imitated: a group of equally good ones teaches something."""


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """No sample differs from another: the group teaches nothing under any centred baseline (DAPO)."""
    return not rewards or max(rewards) - min(rewards) <= _EPSILON


def turn_returns(rewards: Sequence[float], gamma: float, how: str) -> list[float]:
    """Kevin's return of each turn t of one trajectory: Σ_k≥t γ^(k−t)·r_k, or the max of those terms."""
    if how not in ("sum", "max"):
        raise ConfigError(f"unknown return {how!r}", "Use sum or max")
    fold: Callable[[list[float]], float] = sum if how == "sum" else max
    return [fold([gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))]) for t in range(len(rewards))]
