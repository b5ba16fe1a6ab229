"""What lanes found: one row a verdict, and what a phase of many comes to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from statistics import mean, median

import msgspec

from benchmarks.harness import Result, percentiles
from protocols.records import OBSERVED, Fault

_EDGE_S = 1.0
"""At both ends of a phase lanes begin and end one after the other."""


class Row(msgspec.Struct, frozen=True):
    """One verdict."""

    problem: str
    fault: str
    rule: str
    trust: str
    reason: str
    slips: tuple[str, ...]
    begun: float
    ended: float
    stages: dict[str, float]
    spans: dict[str, float]
    """Of pieces of work, some of which lie within others."""
    measured: tuple[float, float, float] | None
    """Speedup with its interval."""
    pairs: str = ""
    """How many, why no more, and why some were set aside."""
    is_last: bool = True
    """False: another process times it yet, and that one's row counts."""
    written: int = 1


class HostFault(msgspec.Struct, frozen=True):
    """In a verdict's place: the host failed, and says nothing of the candidate."""

    reason: str

    @classmethod
    def of(cls, error: BaseException, problem_id: str) -> HostFault:
        """The same words for the same cause: without the problem and numbers of that one time."""
        text = str(error).replace(problem_id, "a problem")
        return cls(f"{type(error).__name__}: {re.sub(r'[0-9][0-9.,]*', '…', text)}"[:200])


def steady(rows: list[Row]) -> tuple[list[Row], float]:
    """The rows that ended at least `_EDGE_S` from both ends, and the seconds between; all of them where that leaves too
    little.
    """
    first, last = min(row.begun for row in rows), max(row.ended for row in rows)
    if last - first < 4 * _EDGE_S:
        return rows, last - first
    inside = [row for row in rows if first + _EDGE_S < row.ended <= last - _EDGE_S]
    return inside, last - first - 2 * _EDGE_S


def summary(every: list[Row], faults: Counter[str]) -> Result:
    """Of one phase; `faults`: what the host failed at, by reason."""
    rows = [row for row in every if row.is_last]
    if not rows:
        return {"verdicts": 0, "host_faults": faults}
    wall = max(row.ended for row in rows) - min(row.begun for row in rows)
    inside, seconds = steady(rows)
    right = [row for row in rows if row.fault == Fault.OK]
    exclusive = [row.stages["alone"] for row in right if "alone" in row.stages]
    accused = [row for row in rows if row.fault == Fault.CHEATING]
    return {
        "verdicts": len(rows),
        "a_second": len(inside) / seconds,
        "a_second_with_ends": len(rows) / wall,
        "answers_a_second": sum(row.written for row in inside) / seconds,
        "compiled": len(rows) / sum(row.written for row in rows),
        "faults": Counter(row.fault for row in rows),
        "host_faults": faults,
        "observed": Counter(row.reason[:90] for row in rows if row.trust == OBSERVED),
        "observed_of": [(row.problem, row.fault, row.slips) for row in rows if row.trust == OBSERVED][:12],
        "pairs": Counter(row.pairs for row in right).most_common(6),
        "right_s": _spread([row.ended - row.begun for row in right]),
        "wrong_s": _spread([row.ended - row.begun for row in rows if row.fault != Fault.OK]),
        "exclusive_s": _spread(exclusive),
        "stages_mean_s": _of_each(every, lambda row: row.stages),
        "spans_mean_s": _of_each(every, lambda row: row.spans),
        "right_though_slipped": sum(bool(row.slips) for row in right),
        "wrong_without_a_slip": [
            (row.problem, row.fault, row.rule) for row in rows if row.fault != Fault.OK and not row.slips
        ][:8],
        "accused": [(row.problem, row.rule, row.slips) for row in accused][:8],
    }  # fmt: skip


def _of_each(rows: list[Row], of: Callable[[Row], dict[str, float]]) -> dict[str, list[float]]:
    """How many candidates had each, its seconds on the mean and at the median, and those a verdict (of its kind)."""
    found: dict[str, list[float]] = {}
    kinds = Counter(_kind(row) for row in rows)
    for row in rows:
        for name, seconds in of(row).items():
            found.setdefault(f"{_kind(row)}: {name}", []).append(seconds)
    return {
        name: [len(each), mean(each), median(each), sum(each) / kinds[name.partition(":")[0]]]
        for name, each in sorted(found.items())
    }


def _kind(row: Row) -> str:
    if not row.is_last:
        return "proven"
    return "right" if row.fault == Fault.OK else "wrong"


def _spread(seconds: list[float]) -> list[float]:
    """10th percentile, median, 90th percentile, mean."""
    return [*percentiles(seconds, 10, 50, 90), mean(seconds)] if seconds else []
