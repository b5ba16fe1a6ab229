"""The figures of an evaluation. Pure.

Samples of one problem share much, so the unit of all means and of the bootstrap is the problem: each counts alike,
however many of its samples got a verdict.

Sources: pass@k, the unbiased estimator of Chen et al. 2021 (Codex), eq. 1; fast_p, Ouyang et al. 2025 (KernelBench):
the share of tasks that are correct *and* more than p times as fast, strictly.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kbrl_async.evaluation.proportions import CONFIDENCE
from kbrl_async.rollouts.stats import RolloutStats

THRESHOLDS = (0.0, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0)
EAGER = "eager"
RESAMPLES = 1000
Speed = tuple[float, float, float]
"""Speedup with the ends of its interval."""
Clusters = Sequence[Sequence["Sample"]]


class OnWorkload(msgspec.Struct, frozen=True):
    """What a sample is worth on one workload of its problem."""

    correct: bool
    speedup: float | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to one problem, as it ended; of several turns the best one."""

    problem_id: str
    level: int
    sample: int
    compiled: bool = False
    correct: bool = False
    cheated: bool = False
    fault: str = ""
    speedups: Mapping[str, Speed] = msgspec.field(default_factory=dict)
    """Of a correct, timed kernel by baseline: eager, and those of torch.compile that were measured."""
    disturbed: bool = False
    """Its speedups can't be compared with others': no best one."""
    trust: str = ""
    """`replayed` or `observed`, as its verdict says; empty where nothing was verified, or by an earlier version."""
    candidate_ms: float | None = None
    reference_ms: float | None = None
    flags: tuple[str, ...] = ()
    """What the audit holds against the problem."""
    workloads: Mapping[str, OnWorkload] = msgspec.field(default_factory=dict)
    """By name, of a problem with several; secret shapes are `secret shapes`."""
    expired: bool = False
    """Not answered before the problem's deadline; counts as wrong."""
    turns: int = 1
    tokens: int = 0
    reward: float = 0.0
    policy_version: int = 0

    def speedup(self, baseline: str = EAGER) -> float | None:
        """None for what is wrong or was not timed."""
        found = self.speedups.get(baseline)
        return found[0] if found is not None and self.correct else None


def sample_of(stats: RolloutStats, sample: int = 0) -> Sample:
    """The answer whose best turn has these numbers; `sample` is its number among those to its problem."""
    speedups: dict[str, Speed] = {}
    if stats.speedup is not None:
        speedups[EAGER] = (stats.speedup, stats.speedup_lo or 0.0, stats.speedup_hi or stats.speedup)
    return Sample(
        problem_id=stats.problem_id,
        level=stats.level,
        sample=sample,
        compiled=stats.compiled,
        correct=stats.correct,
        cheated=stats.cheated,
        fault=stats.fault,
        speedups=speedups,
        disturbed=stats.is_disturbed,
        trust=stats.trust,
        tokens=stats.tokens,
        reward=stats.reward,
        policy_version=stats.policy_version,
    )


class Figure(msgspec.Struct, frozen=True):
    """A value with its bootstrap interval over problems; equal ends where there is too little to resample."""

    value: float
    lo: float
    hi: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of `k` samples, drawn from `n` of which `c` are right, is right: 1 − C(n−c, k)/C(n, k).

    :raises ValueError: `k` is not in 1 … n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def fast_p(speedups: Sequence[float | None], p: float) -> float:
    """Share of all samples that are correct and strictly more than `p` times as fast; None is a wrong one."""
    return sum(s is not None and s > p for s in speedups) / len(speedups) if speedups else 0.0


def geometric_mean(speedups: Sequence[float]) -> float | None:
    """exp of the mean logarithm; None of nothing."""
    return math.exp(sum(map(math.log, speedups)) / len(speedups)) if speedups else None


def by_problem(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each problem, in order of problem and sample."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for sample in sorted(samples, key=lambda s: (s.level, s.problem_id, s.sample)):
        found[sample.problem_id].append(sample)
    return list(found.values())


def values_k(samples: Sequence[Sample]) -> list[int]:
    """Powers of two, and the number of samples itself. Problems that lost samples are left out of the larger ones."""
    most = max((len(group) for group in by_problem(samples)), default=0)
    powers = [2**i for i in range(most.bit_length()) if 2**i <= most]
    return sorted({*powers, most} - {0})


def mean_over_problems(clusters: Clusters, value: Callable[[Sequence[Sample]], float], seed: int = 0) -> Figure:
    """The mean of a problem's value, with its interval."""
    values = np.array([value(cluster) for cluster in clusters], dtype=np.float64)
    return Figure(float(values.mean()), *_interval((values,), np.mean, float(values.mean()), seed))


def heldout_scalars(results: Sequence[RolloutStats]) -> dict[str, float]:
    """What held-out problems say of a version while it trains: TensorBoard tags as `kbrl eval` writes them, without
    intervals, which would hold training up. Nothing of nothing.

    `eval/policy_version_mean` tells which versions really wrote the answers.
    """
    clusters = by_problem([sample_of(stats) for stats in results])
    if not clusters:
        return {}

    def mean(value: Callable[[Sample], float]) -> float:
        return float(np.mean([np.mean([value(sample) for sample in cluster]) for cluster in clusters]))

    values = {
        "reward_mean": mean(lambda s: s.reward),
        "compile_rate": mean(lambda s: s.compiled),
        "correct_rate": mean(lambda s: s.correct),
        "hack_rate": mean(lambda s: s.cheated),
        "solved_rate": float(np.mean([any(s.correct for s in cluster) for cluster in clusters])),
        "fast_1": mean(lambda s: (s.speedup() or 0.0) > 1.0),
        "fast_1_proven": mean(is_proven_faster),
        "speedup_geometric_mean": geometric_mean([v for c in clusters for s in c if (v := s.speedup()) is not None]),
        "policy_version_mean": mean(lambda s: s.policy_version),
    }
    return {f"eval/{name}": value for name, value in values.items() if value is not None}


def is_proven_faster(sample: Sample, baseline: str = EAGER) -> bool:
    """Its whole interval lies above 1 (I7)."""
    return sample.correct and baseline in sample.speedups and sample.speedups[baseline][1] > 1.0


def share(clusters: Clusters, holds: Callable[[Sample], bool], seed: int = 0) -> Figure:
    """Share of samples for which something holds, problems weighing alike."""
    return mean_over_problems(clusters, lambda cluster: sum(map(holds, cluster)) / len(cluster), seed)


def geometric_mean_speedup(clusters: Clusters, baseline: str, seed: int = 0) -> Figure | None:
    """Over all correct samples; None where there is none. Problems are resampled with all their samples."""
    logs = _logs(clusters, baseline)
    if not logs:
        return None
    totals = np.array([cluster.sum() for cluster in logs])
    counts = np.array([len(cluster) for cluster in logs], dtype=np.float64)

    def statistic(t: NDArray[np.float64], c: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        resampled: NDArray[np.float64] = np.exp(t.sum(axis) / c.sum(axis))
        return resampled

    value = float(statistic(totals, counts))
    return Figure(value, *_interval((totals, counts), statistic, value, seed))


def median_speedup(clusters: Clusters, baseline: str, seed: int = 0) -> Figure | None:
    """Over all correct samples; None where there is none."""
    logs = _logs(clusters, baseline)
    if not logs:
        return None

    def statistic(chosen: NDArray[np.int64]) -> float:
        return float(np.exp(np.median(np.concatenate([logs[i] for i in chosen]))))

    places = np.arange(len(logs))
    value = statistic(places)
    return Figure(value, *_interval((places,), statistic, value, seed, vectorized=False))


def _logs(clusters: Clusters, baseline: str) -> list[NDArray[np.float64]]:
    """Logarithms of the speedups of each problem that has any."""
    found = [[s for sample in cluster if (s := sample.speedup(baseline)) is not None] for cluster in clusters]
    return [np.log(np.array(listed)) for listed in found if listed]


def _interval(
    data: tuple[NDArray[np.generic], ...],
    statistic: Callable[..., object],
    value: float,
    seed: int,
    *,
    vectorized: bool = True,
) -> tuple[float, float]:
    """Percentile bootstrap: it neither fails nor warns on values that are all alike, as rates near 0 and 1 are."""
    if len(data[0]) < 2:
        return value, value
    from scipy.stats import bootstrap  # half a second to import: a run's actors count, and leave intervals to reports

    found = bootstrap(
        data,
        statistic,
        paired=True,
        vectorized=vectorized,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)
