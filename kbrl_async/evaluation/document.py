"""The result of an evaluation as one JSON document: figures over all problems and by level, raw and filtered.

Invariants
* `filtered` leaves out every problem that the audit holds something against, and nothing else.
* A sample that has no verdict through a fault of ours is in no figure; how many there are is in `lost` (I4).
* A figure over nothing is null, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.durable import write_atomically
from kbrl_async.errors import CheckpointError
from kbrl_async.evaluation.metrics import (
    EAGER,
    THRESHOLDS,
    Clusters,
    Figure,
    Sample,
    by_problem,
    fast_p,
    geometric_mean_speedup,
    is_proven_faster,
    mean_over_problems,
    median_speedup,
    pass_at_k,
    share,
    values_k,
)

VERSION = 1
FILE = "evaluation.json"
KIND = "evaluation"


class Speeds(msgspec.Struct, frozen=True):
    """Against one baseline."""

    timed: int
    """Correct samples with a speedup over this baseline."""
    fast_p: dict[str, Figure]
    """By threshold: share of samples that are correct and strictly faster than p times."""
    fast_p_best: dict[str, Figure]
    """The same of each problem's best sample: what n tries find."""
    geometric_mean: Figure | None
    median: Figure | None
    fast_1_proven: Figure
    """Share of samples whose whole interval lies above 1 (I7)."""


class Figures(msgspec.Struct, frozen=True):
    """Over some problems."""

    problems: int
    samples: int
    compiled: Figure
    correct: Figure
    hacked: Figure
    """Share of samples that were caught cheating."""
    pass_at_k: dict[str, Figure]
    """Over the problems with at least k samples, which are all unless some were lost."""
    speedup: dict[str, Speeds]
    """By baseline: `eager`, and those of torch.compile that were measured."""
    trust: dict[str, Trusted] = msgspec.field(default_factory=dict)
    """By what correct samples' verdicts rest on: `replayed`, `observed`; empty where no verdict says it."""


class Trusted(msgspec.Struct, frozen=True):
    """Correct samples of one kind of trust."""

    correct: int
    fast_1_proven: Figure
    """Share of all samples that are of this kind, and whose whole interval over eager lies above 1."""


class AuditedPart(msgspec.Struct, frozen=True):
    """Figures of the same samples, with and without the problems that an audit flags."""

    raw: Figures | None
    filtered: Figures | None
    flagged: int
    """Problems that `filtered` leaves out."""


class WorkloadRow(msgspec.Struct, frozen=True):
    """Over the samples that were looked at on it."""

    samples: int
    correct: int
    best_speedup: float | None


class ProblemRow(msgspec.Struct, frozen=True):
    problem_id: str
    level: int
    samples: int
    correct: int
    compiled: int
    hacked: int
    best_speedup: float | None
    """Of correct samples whose time was not disturbed."""
    flags: tuple[str, ...]
    faults: dict[str, int]
    disturbed: int = 0
    """Correct samples whose time was."""
    workloads: dict[str, WorkloadRow] = {}
    """Of a problem with several; secret shapes are one of them."""


class Document(msgspec.Struct, frozen=True):
    """The content of `evaluation.json`."""

    version: int
    kind: str
    policy: dict[str, Any]
    """What was evaluated."""
    settings: dict[str, Any]
    """How."""
    overall: AuditedPart
    levels: dict[str, AuditedPart]
    problems: list[ProblemRow]
    samples: list[Sample]
    lost: dict[str, int]
    """Samples without a verdict through our fault, by reason; in no figure."""
    expired: int
    """Samples that were given up at their problem's deadline; they count as wrong."""
    skipped: dict[str, str] = msgspec.field(default_factory=dict)
    """Problems that could not be asked, and why."""
    seconds: float = 0.0
    created_at: float = 0.0
    kernelbench: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """By level, what KernelBench's own analysis prints of the run folder that is written beside this."""


def build(
    samples: Sequence[Sample],
    *,
    policy: Mapping[str, Any],
    settings: Mapping[str, Any],
    lost: Mapping[str, int] | None = None,
    skipped: Mapping[str, str] | None = None,
    seconds: float = 0.0,
    created_at: float = 0.0,
) -> Document:
    """All figures of these samples."""
    levels = sorted({sample.level for sample in samples})
    return Document(
        VERSION,
        KIND,
        dict(policy),
        dict(settings),
        part(samples),
        {str(level): part([s for s in samples if s.level == level]) for level in levels},
        [row_of(cluster) for cluster in by_problem(samples)],
        sorted(samples, key=lambda s: (s.level, s.problem_id, s.sample)),
        dict(lost or {}),
        sum(sample.expired for sample in samples),
        dict(skipped or {}),
        seconds,
        created_at,
    )


def part(samples: Sequence[Sample]) -> AuditedPart:
    clean = [sample for sample in samples if not sample.flags]
    flagged = len({sample.problem_id for sample in samples if sample.flags})
    return AuditedPart(figures(samples), figures(clean), flagged)


def figures(samples: Sequence[Sample]) -> Figures | None:
    """None of nothing."""
    clusters = by_problem(samples)
    if not clusters:
        return None
    baselines = [EAGER, *sorted({name for s in samples for name in s.speedups} - {EAGER})]
    return Figures(
        len(clusters),
        len(samples),
        share(clusters, lambda s: s.compiled),
        share(clusters, lambda s: s.correct),
        share(clusters, lambda s: s.cheated),
        {str(k): _pass_at(clusters, k) for k in values_k(samples)},
        {name: _speeds(clusters, name) for name in baselines},
        {kind: _trusted(clusters, kind) for kind in sorted({s.trust for s in samples if s.correct and s.trust})},
    )


def _trusted(clusters: Clusters, kind: str) -> Trusted:
    correct = sum(sample.correct and sample.trust == kind for cluster in clusters for sample in cluster)
    return Trusted(correct, share(clusters, lambda s: s.trust == kind and is_proven_faster(s, EAGER)))


def _pass_at(clusters: Clusters, k: int) -> Figure:
    enough = [cluster for cluster in clusters if len(cluster) >= k]
    return mean_over_problems(enough, lambda c: pass_at_k(len(c), sum(s.correct for s in c), k))


def _speeds(clusters: Clusters, baseline: str) -> Speeds:
    def over(p: float) -> Figure:
        return mean_over_problems(clusters, lambda c: fast_p([s.speedup(baseline) for s in c], p))

    def best_over(p: float) -> Figure:
        return mean_over_problems(clusters, lambda c: float(any((s.speedup(baseline) or 0.0) > p for s in c)))

    return Speeds(
        sum(s.speedup(baseline) is not None for c in clusters for s in c),
        {f"{p:g}": over(p) for p in THRESHOLDS},
        {f"{p:g}": best_over(p) for p in THRESHOLDS},
        geometric_mean_speedup(clusters, baseline),
        median_speedup(clusters, baseline),
        share(clusters, lambda s: is_proven_faster(s, baseline)),
    )


def row_of(cluster: Sequence[Sample]) -> ProblemRow:
    faults: dict[str, int] = {}
    for sample in cluster:
        faults[sample.fault] = faults.get(sample.fault, 0) + 1
    found = [s for sample in cluster if (s := sample.speedup()) is not None and not sample.disturbed]
    return ProblemRow(
        cluster[0].problem_id,
        cluster[0].level,
        len(cluster),
        sum(s.correct for s in cluster),
        sum(s.compiled for s in cluster),
        sum(s.cheated for s in cluster),
        max(found, default=None),
        cluster[0].flags,
        faults,
        sum(s.disturbed and s.correct for s in cluster),
        {name: _workload(name, cluster) for name in dict.fromkeys(name for s in cluster for name in s.workloads)},
    )


def _workload(name: str, cluster: Sequence[Sample]) -> WorkloadRow:
    found = [(s.workloads[name], s.disturbed) for s in cluster if name in s.workloads]
    timed = [one.speedup for one, disturbed in found if one.speedup is not None and not disturbed]
    return WorkloadRow(len(found), sum(one.correct for one, _ in found), max(timed, default=None))


def write(path: Path, document: Document) -> None:
    """The whole file in one step, or nothing."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")


def read(path: Path) -> Document:
    """:raises CheckpointError: it is missing, or no document of this version."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Document)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", "Evaluate again with 'kbrl eval'") from None
