"""Pure statistics of paired ratios."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence

import msgspec


class Interval(msgspec.Struct, frozen=True):
    """Median and a confidence interval for it, from order statistics: exact for any distribution of
    independent samples.
    """

    median: float
    lo: float
    hi: float

    @property
    def half_width(self) -> float:
        """Relative to the median."""
        return (self.hi - self.lo) / (2 * self.median)


@functools.lru_cache(maxsize=1024)
def _rank(n: int, confidence: float) -> int:
    """Largest 0-based rank k such that [x(k), x(n−1−k)] covers the median with at least `confidence`."""
    from scipy.stats import binom

    # The interval misses the median when at most k samples lie on one side: probability 2·P(B(n, ½) ≤ k).
    return max(0, int(binom.ppf((1 - confidence) / 2, n, 0.5)) - 1 + int(_ppf_is_exact(n, confidence)))


def _ppf_is_exact(n: int, confidence: float) -> bool:
    from scipy.stats import binom

    k = int(binom.ppf((1 - confidence) / 2, n, 0.5))
    return bool(2 * binom.cdf(k, n, 0.5) <= 1 - confidence)


def median_interval(ratios: Sequence[float], confidence: float = 0.95) -> Interval:
    """Median of `ratios` with its distribution-free interval (sign test). With fewer than 6 samples it is
    wider than said.
    """
    if not ratios:
        raise ValueError("a median needs at least one sample")
    ordered = sorted(ratios)
    k = _rank(len(ordered), confidence)
    return Interval(statistics.median(ordered), ordered[k], ordered[-1 - k])


def widened(interval: Interval, share: float) -> Interval:
    """The interval with a systematic relative uncertainty added on both sides."""
    return Interval(interval.median, interval.lo / (1 + share), interval.hi * (1 + share))


def stop_reason(interval: Interval, n: int, minimum: int, resolution: float, margin: float) -> str:
    """Why sampling may stop now, or an empty string.

    `"resolved"`: the interval's relative half width is at most `resolution`. `"decided"`: the whole interval
    is at least
    `margin` away from 1 and its half width at most `3·resolution`; the margin pays for looking more than once.
    """
    if n < minimum:
        return ""
    if interval.half_width <= resolution:
        return "resolved"
    if (interval.lo > 1 + margin or interval.hi < 1 - margin) and interval.half_width <= 3 * resolution:
        return "decided"
    return ""
