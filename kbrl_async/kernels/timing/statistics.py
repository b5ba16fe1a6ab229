"""Pure statistics of paired ratios.

Two questions are asked of the same pairs: *is it faster?* (the interval excludes 1) and *by how much?* (the interval is
narrow). Both are looked at several times while samples come in, so the interval must hold at every look at once.

::

    x(0) ≤ … ≤ x(n−1)        the median m is missed by [x(k), x(n−1−k)]  ⇔  samples below m are ≤ k or ≥ n−k
    samples below m after n  =  a fair random walk  ⇒  P(missed at any look) is counted exactly, look by look

Invariants
* The intervals of all looks together miss the true median with at most 1 − confidence, for any distribution of
  independent samples; the sides share that equally. Only *when* to look may depend on time, never on the ratios.
* With candidate and reference exchanged at random in each pair, A/A ratios lie above and below 1 with equal chance
  whatever the clock, the load and drift do: the sign is all that these intervals use.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence

import msgspec


class Interval(msgspec.Struct, frozen=True):
    """Median and a confidence interval for it."""

    median: float
    lo: float
    hi: float

    @property
    def half_width(self) -> float:
        """Relative to the median."""
        return (self.hi - self.lo) / (2 * self.median)

    def excludes(self, value: float) -> bool:
        return self.lo > value or self.hi < value


def ready() -> None:
    """Imports what the first interval needs, tenths of a second: before a measurement, not within it."""
    import scipy.special  # noqa: F401


@functools.lru_cache(maxsize=1024)
def rank(n: int, confidence: float) -> int:
    """Largest 0-based k such that [x(k), x(n−1−k)] covers the median with at least `confidence`; −1: none does."""
    import numpy as np
    from scipy.special import bdtr  # scipy.stats takes half a second of every bench's start

    return int(np.count_nonzero(2 * bdtr(np.arange(n), n, 0.5) <= 1 - confidence)) - 1


def median_interval(ratios: Sequence[float], confidence: float = 0.95) -> Interval:
    """Median of `ratios` with its exact interval (sign test), looked at once. Where no rank is enough, see `few`."""
    if not ratios:
        raise ValueError("a median needs at least one sample")
    return _at_rank(ratios, rank(len(ratios), confidence), confidence)


def few(ratios: Sequence[float], confidence: float) -> Interval:
    """For samples too few for ranks: Student's t on logarithms, never inside [min, max]; one sample says nothing.

    Such samples are of long calls, whose noise is small and close to normal.
    """
    from scipy.special import stdtrit

    median = statistics.median(ratios)
    if len(ratios) < 2:
        return Interval(median, 0.0, math.inf)
    logs = [math.log(ratio) for ratio in ratios]
    mean, deviation = statistics.fmean(logs), statistics.stdev(logs)
    reach = float(stdtrit(len(logs) - 1, 0.5 + confidence / 2)) * deviation / math.sqrt(len(logs))
    return Interval(median, min(math.exp(mean - reach), *ratios), max(_exp(mean + reach), *ratios))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _at_rank(ratios: Sequence[float], k: int, confidence: float) -> Interval:
    if k < 0:
        return few(ratios, confidence)
    ordered = sorted(ratios)
    return Interval(statistics.median(ordered), ordered[k], ordered[-1 - k])


# ── looking more than once ──────────────────────────────────────────────────────────────────────────────────────────


@functools.lru_cache(maxsize=4096)
def boundary(looks: tuple[int, ...], horizon: int, confidence: float, *, is_last: bool = False) -> int:
    """Rank k for the last of `looks` (sample counts, ascending); −1 where that look has nothing to spend yet.

    Spends the error in proportion to n / horizon (Lan and DeMets' spending function, linear), exactly: the walk's
    probability mass is carried from look to look, and what an earlier interval has missed is not counted again.
    `is_last`: sampling ends here whatever is seen, so all that is left may be spent.
    """
    total = 1 - confidence
    mass, spent, k, before = [1.0], 0.0, -1, 0
    for number, n in enumerate(looks):
        mass = _walk(mass, n - before)
        last = is_last and number == len(looks) - 1
        allowed = total if last else total * min(1.0, n / horizon)
        k, tail = _largest(mass, allowed - spent)
        spent += 2 * tail
        for below in range(k + 1):
            mass[below] = mass[n - below] = 0.0
        before = n
    return k


def _walk(mass: list[float], steps: int) -> list[float]:
    import numpy as np

    found = np.asarray(mass)
    for _ in range(steps):
        found = (np.append(found, 0.0) + np.append(0.0, found)) / 2
    return [float(value) for value in found]


def _largest(mass: list[float], allowed: float) -> tuple[int, float]:
    """Largest k whose two tails weigh at most `allowed`, and the weight of one."""
    k, tail = -1, 0.0
    while k + 1 < len(mass) // 2 and 2 * (tail + mass[k + 1]) <= allowed:
        k += 1
        tail += mass[k]
    return k, tail


class Sequential:
    """Intervals at several looks that all hold together::

    watch = Sequential(confidence=0.98, horizon=30)
    watch.look(ratios)                  # at 8, 12, 16 … samples
    watch.look(ratios, is_last=True)    # when time is up
    """

    def __init__(self, confidence: float, horizon: int) -> None:
        self._confidence, self._horizon = confidence, horizon
        self._looks: tuple[int, ...] = ()

    def look(self, ratios: Sequence[float], *, is_last: bool = False) -> Interval | None:
        """None where so few samples give no interval yet; at the last look there always is one."""
        n = len(ratios)
        if n == 0:
            raise ValueError("a median needs at least one sample")
        looks = self._looks if self._looks[-1:] == (n,) else (*self._looks, n)
        if not is_last:
            self._looks = looks
        k = boundary(looks, self._horizon, self._confidence, is_last=is_last)
        if k < 0 and not is_last:
            return None
        return _at_rank(ratios, k, self._confidence)


def stop_reason(interval: Interval, n: int, minimum: int, resolution: float, margin: float) -> str:
    """Why sampling may stop now, or an empty string.

    `"resolved"`: the interval's relative half width is at most `resolution` (by how much?). `"decided"`: it is all of
    `margin` away from 1 and its half width at most `3·resolution` (faster or slower, and roughly by how much).
    """
    if n < minimum:
        return ""
    if interval.half_width <= resolution:
        return "resolved"
    if (interval.lo > 1 + margin or interval.hi < 1 - margin) and interval.half_width <= 3 * resolution:
        return "decided"
    return ""


def widened(interval: Interval, share: float) -> Interval:
    """The interval with a systematic relative uncertainty added on both sides."""
    return Interval(interval.median, interval.lo / (1 + share), interval.hi * (1 + share))
