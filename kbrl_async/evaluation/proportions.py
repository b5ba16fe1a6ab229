"""How far a share or a mean that was counted may be from the true one. Pure.

Answers of one group are answers to one problem, so they are alike: an interval that took each of them for a try of its
own would be too narrow by half and more. `clustered_share` and `clustered_mean` go by how much groups differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

CONFIDENCE = 0.95
"""Of every interval of a share or a mean. That of a single kernel's speedup has another: `TIMING_CONFIDENCE`."""
KEY = f"_{100 * CONFIDENCE:.0f}"
"""Ends the names of intervals in JSON."""
WORDS = f"{100 * CONFIDENCE:.0f} %"
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def wilson(hits: float, total: float, z: float = _Z) -> tuple[float, float]:
    """The score interval of `hits` in `total` independent tries (Wilson, 1927), both ends in 0 … 1.

    Of several answers to each of a fixed set of problems it is, if anything, too wide: the problems don't vary.
    `total` may be an effective number of tries, and then no whole one.
    """
    share, square = hits / total, z * z
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = z / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def clustered_share(groups: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """Interval of the share of hits over all tries of all groups, none of them empty.

    Wilson's interval of total / deff tries, deff being the design effect: the ratio estimator's variance over groups
    by that of independent tries (Kish, 1965; Korn & Graubard, 1998), at least 1, and Student's quantile for as many
    groups. One group alone counts as a single try.
    """
    total = sum(map(len, groups))
    share = sum(map(sum, groups)) / total
    if len(groups) < 2:
        return wilson(share, 1.0)
    variance = _variance([(float(sum(group)), len(group)) for group in groups])
    independent = share * (1 - share) / total
    tries = total / max(1.0, variance / independent) if independent > 0 else total
    return wilson(share * tries, tries, _quantile(len(groups)))


def clustered_mean(groups: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Interval of the mean of all values of all groups, none of them empty; None of fewer than two groups."""
    if len(groups) < 2:
        return None
    sums = [(math.fsum(group), len(group)) for group in groups]
    mean = math.fsum(total for total, _ in sums) / sum(count for _, count in sums)
    half = _quantile(len(groups)) * math.sqrt(_variance(sums))
    return mean - half, mean + half


def _variance(sums: Sequence[tuple[float, int]]) -> float:
    """Of the ratio estimator Σ sums / Σ counts, from (sum, count) of each group."""
    total = sum(count for _, count in sums)
    mean = math.fsum(value for value, _ in sums) / total
    squares = math.fsum((value - mean * count) ** 2 for value, count in sums)
    return len(sums) / (len(sums) - 1) * squares / total**2


def _quantile(groups: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(groups - 1, (1 + CONFIDENCE) / 2))
