"""One speedup of several workloads: the weighted geometric mean, with an interval of its own.

::

    log speedup = Σ weight · log median(pairs of a workload)      pairs are drawn again within each workload: bootstrap

What sampling can't remove (the bench's resolution, what is held against a candidate) adds up; what it can, averages
out. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kbrl_async.kernels.timing.statistics import Interval
from protocols.records import DISTURBED, Timing, WorkloadTiming

_RESAMPLES, _SEED = 4000, 20


class Part(msgspec.Struct, frozen=True):
    """One workload's measurement."""

    name: str
    weight: float
    timing: Timing
    ratios: Sequence[float]
    """Reference over candidate, of each pair."""


def combined(parts: Sequence[Part]) -> Timing:
    """Of at least one. The same pairs give the same interval."""
    total = sum(part.weight for part in parts)
    weights = [part.weight / total for part in parts]
    timings = [part.timing for part in parts]
    first = max(zip(weights, timings, strict=True), key=lambda pair: pair[0])[1]
    interval = _interval(parts, weights, first.confidence)
    is_disturbed = any(timing.stopped == DISTURBED for timing in timings)
    return msgspec.structs.replace(
        first,
        n=sum(timing.n for timing in timings),
        speedup=interval.median,
        lo=min(interval.lo, 1.0) if is_disturbed else interval.lo,
        hi=interval.hi,
        candidate_ms=math.fsum(w * t.candidate_ms for w, t in zip(weights, timings, strict=True)),
        reference_ms=math.fsum(w * t.reference_ms for w, t in zip(weights, timings, strict=True)),
        stopped=DISTURBED if is_disturbed else first.stopped,
        throttle=sorted({reason for timing in timings for reason in timing.throttle}),
        load=max((timing.load for timing in timings if timing.load is not None), default=None),
        resolution=max(timing.resolution for timing in timings),
        rejected=sum(timing.rejected for timing in timings),
        spent_s=sum(timing.spent_s for timing in timings),
        roofline=_mean([timing.roofline for timing in timings], weights),
        ratios=(),
        workloads=tuple(_row(part, weight) for part, weight in zip(parts, weights, strict=True)),
    )


def _row(part: Part, weight: float) -> WorkloadTiming:
    t = part.timing
    return WorkloadTiming(part.name, weight, t.n, t.speedup, t.lo, t.hi, t.candidate_ms, t.reference_ms, t.stopped)


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    return math.fsum(v * w for v, w in known) / math.fsum(w for _, w in known) if known else None


def _interval(parts: Sequence[Part], weights: Sequence[float], confidence: float) -> Interval:
    gaps = [_gaps(part.timing) for part in parts]
    below, above = _bootstrapped(parts, weights, confidence)
    propagated = math.hypot(*(weight * gap.sampling for weight, gap in zip(weights, gaps, strict=True)))
    bias = math.fsum(weight * gap.bias for weight, gap in zip(weights, gaps, strict=True))
    held = math.fsum(weight * gap.held for weight, gap in zip(weights, gaps, strict=True))
    median = math.fsum(w * math.log(part.timing.speedup) for w, part in zip(weights, parts, strict=True))
    return Interval(
        math.exp(median),
        math.exp(median - max(below, propagated) - bias - held),
        _exp(median + max(above, propagated) + bias),
    )


class _Gaps(msgspec.Struct, frozen=True):
    """Of a workload's interval, in logarithms."""

    sampling: float
    """What more pairs would have made smaller."""
    bias: float
    held: float
    """By so much more the lower end was lowered than the upper one was raised."""


def _gaps(timing: Timing) -> _Gaps:
    below = math.log(timing.speedup / timing.lo) if timing.lo > 0 else math.inf
    above = math.log(timing.hi / timing.speedup) if timing.hi < math.inf else math.inf
    bias, both = math.log1p(timing.resolution), min(below, above)
    held = below - above if math.inf > below > above else 0.0
    return _Gaps(max(0.0, both - bias), bias, held)


def _bootstrapped(parts: Sequence[Part], weights: Sequence[float], confidence: float) -> tuple[float, float]:
    """How far the ends lie from the middle."""
    import numpy as np

    rng = np.random.default_rng(_SEED)
    total = np.zeros(_RESAMPLES)
    for part, weight in zip(parts, weights, strict=True):
        logs = np.log(np.asarray(part.ratios or [part.timing.speedup]))
        drawn = logs[rng.integers(0, len(logs), (_RESAMPLES, len(logs)))]
        total += weight * (np.median(drawn, axis=1) - np.median(logs))
    low, high = np.quantile(total, [(1 - confidence) / 2, (1 + confidence) / 2])
    return max(0.0, -float(low)), max(0.0, float(high))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
