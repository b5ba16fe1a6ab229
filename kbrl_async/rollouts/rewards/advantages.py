"""Advantages: rewards against a baseline, within the samples of one prompt (and one turn).

Adding a baseline is one function and one line in `settings.ADVANTAGES`; a user's own is `package.module:object`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence

from kbrl_async.errors import ConfigError
from kbrl_async.rollouts.settings import ADVANTAGES, BestOfN

_EPSILON = 1e-6
STD_FLOOR = 0.02
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
    """(r_i − mean) / (std + 1e-6) with the population's std (GRPO, Shao et al. 2024), which counts as `STD_FLOOR` at
    least: next to nothing between rewards must not become advantages of 1."""
    centred = group_mean(rewards)
    std = math.sqrt(sum(a * a for a in centred) / max(1, len(centred)))
    return [a / (max(std, STD_FLOOR) + _EPSILON) for a in centred]


def none(rewards: Sequence[float]) -> list[float]:
    """r_i itself (REINFORCE without a baseline)."""
    return list(rewards)


def best_of_n(rewards: Sequence[float], rules: BestOfN) -> list[float]:
    """1 for the best `keep` samples with a reward above `above`, 0 for the others: with −A·log π this is supervised
    fine-tuning on the best of n."""
    ranked = sorted(range(len(rewards)), key=lambda i: -rewards[i])
    chosen = {i for i in ranked[: rules.keep] if rewards[i] > rules.above}
    return [float(i in chosen) for i in range(len(rewards))]


def reward_weight(rewards: Sequence[float]) -> list[float]:
    """max(r, 0): with −A·log π, scaled to mean 1 over the batch, this is reward-weighted supervised fine-tuning."""
    return [max(reward, 0.0) for reward in rewards]


def find_baseline(advantage: str, rules: BestOfN) -> Baseline:
    """The baseline of this name; `rules` are those of `best_of_n`.

    :raises UserError: there is none.
    """
    found: Baseline = ADVANTAGES.load(advantage)
    return functools.partial(best_of_n, rules=rules) if advantage == "best_of_n" else found


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
NEEDS_NO_GROUP = frozenset({"running_mean", "none", *IMITATES})
"""Of ours, baselines that do not compare the samples of a group: equal rewards teach, and so does one sample alone."""


def settled(rewards: Sequence[float], spreads: Sequence[float], sources: Sequence[str]) -> list[float]:
    """Rewards without differences that timing does not bear out. Of timed ones (`spread` above 0) equal kernels share
    one, and so do those whose intervals [reward, reward + spread] overlap that of the lowest among them.
    """
    timed = [place for place, spread in enumerate(spreads) if spread > 0]
    equal = [[i for i in timed if sources[i] == source] for source in {sources[i] for i in timed} - {""}]
    found = _merged(rewards, equal)
    alike: list[list[int]] = []
    for place in sorted(timed, key=lambda i: (found[i], spreads[i])):
        first = alike[-1][0] if alike else None
        if first is not None and found[place] <= found[first] + spreads[first]:
            alike[-1].append(place)
        else:
            alike.append([place])
    return _merged(found, alike)


def _merged(values: Sequence[float], groups: Iterable[Sequence[int]]) -> list[float]:
    """Each group's values become their mean."""
    found = list(values)
    for group in groups:
        mean = sum(values[place] for place in group) / max(1, len(group))
        for place in group:
            found[place] = mean
    return found


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """No sample differs from another: the group teaches nothing under any centred baseline (DAPO)."""
    return not rewards or max(rewards) - min(rewards) <= _EPSILON


def turn_returns(rewards: Sequence[float], gamma: float, how: str) -> list[float]:
    """Kevin's return of each turn t of one trajectory: Σ_k≥t γ^(k−t)·r_k, or the max of those terms."""
    if how not in ("sum", "max"):
        raise ConfigError(f"unknown return {how!r}", "Use sum or max")
    fold: Callable[[list[float]], float] = sum if how == "sum" else max
    return [fold([gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))]) for t in range(len(rewards))]
