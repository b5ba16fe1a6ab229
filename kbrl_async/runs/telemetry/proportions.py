"""How far a share that was counted may be from the true one."""

from __future__ import annotations


def wilson(hits: int, total: int) -> tuple[float, float]:
    """The 95 % score interval of `hits` in `total` independent tries (Wilson, 1927), both ends in 0 … 1.

    Of several answers to each of a fixed set of problems it is, if anything, too wide: the problems don't vary.
    """
    from scipy.stats import binomtest

    found = binomtest(hits, total).proportion_ci(0.95, method="wilson")
    return float(found.low), float(found.high)
