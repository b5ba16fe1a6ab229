"""A timed run: pairs of reference and candidate until the speedup is known well enough, or the cap."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec

from kbrl_async.timing.statistics import Interval, median_interval, stop_reason


class Recipe(msgspec.Struct, frozen=True):
    """Defaults are tuned for training throughput; an evaluation wants `max_pairs=200, cap_s=5, resolution=0.01`."""

    warmup: int = 2
    min_pairs: int = 6
    max_pairs: int = 30
    cap_s: float = 0.15
    """Wall-clock for one measurement; at least `min_pairs` are taken even so, unless four times the cap is used up."""
    resolution: float = 0.03
    """Stop when the interval's relative half width is at most this."""
    margin: float = 0.05
    confidence: float = 0.95
    placement: float = 0.02
    """Added to the interval on both sides: two processes of the same code differ by where their memory lies,
    and no number of pairs shows that. From `benchmarks/timing_aa.py`."""
    flush_bytes: int = 0
    """0: twice the L2 cache."""
    suspicious: float = 10.0
    """A speedup above this is measured a second time, independently, and the lower one counts."""
    looks: int = 6
    """Pairs between two looks at the interval: few looks keep the false-speedup rate low."""


class Pair(msgspec.Struct, frozen=True):
    """One time of reference and candidate each, overhead subtracted (means where the sampler calls them in
    both orders). `waited`: share of the time others had the core.
    """

    reference_ns: float
    candidate_ns: float
    waited: float = 0.0
    polluted: bool = False


class Measured(msgspec.Struct, frozen=True):
    interval: Interval
    n: int
    rejected: int
    reference_ms: float
    candidate_ms: float
    load: float
    stopped: str


def measure(sample: Callable[[], Pair], recipe: Recipe, clock: Callable[[], float] = time.monotonic) -> Measured:
    """Sample pairs until resolved, decided or capped. What `sample` raises passes through."""
    begin = clock()
    kept: list[Pair] = []
    polluted: list[Pair] = []
    for _ in range(recipe.warmup):
        sample()
    stopped = ""
    while not stopped:
        pair = sample()
        (polluted if pair.polluted else kept).append(pair)
        stopped = _stopped(kept, len(polluted), clock() - begin, recipe)
    return _summary(kept or polluted, polluted, stopped, recipe)


def _stopped(kept: list[Pair], polluted: int, spent: float, recipe: Recipe) -> str:
    n = len(kept)
    if n >= recipe.max_pairs or n + polluted >= 4 * recipe.max_pairs or spent > 4 * recipe.cap_s:
        return "cap"
    if spent > recipe.cap_s and n >= recipe.min_pairs:
        return "cap"
    if n == 0 or n % recipe.looks or n < recipe.min_pairs:
        return ""
    interval = median_interval([_ratio(pair) for pair in kept], recipe.confidence)
    return stop_reason(interval, n, recipe.min_pairs, recipe.resolution, recipe.margin)


def _ratio(pair: Pair) -> float:
    return pair.reference_ns / pair.candidate_ns


def _summary(pairs: list[Pair], polluted: list[Pair], stopped: str, recipe: Recipe) -> Measured:
    every = pairs if pairs is polluted else [*pairs, *polluted]
    return Measured(
        median_interval([_ratio(pair) for pair in pairs], recipe.confidence),
        len(pairs),
        len(polluted),
        statistics.median(pair.reference_ns for pair in pairs) / 1e6,
        statistics.median(pair.candidate_ns for pair in pairs) / 1e6,
        statistics.fmean(pair.waited for pair in every),
        stopped,
    )
