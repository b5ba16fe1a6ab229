"""One candidate on all workloads of its problem: built once, right on each or wrong, timed on some or all.

::

    all but the first timed one, in secret order, in one process ─▶ checked
         all right ─▶ the timed ones, each in a process of its own, checked and timed ─▶ combined
         one wrong ─▶ the others are looked at for partial credit; a crash, a cheat or a hang ends it

A workload whose input sets all have one answer (a softmax over one element) proves nothing and is worth no time, where
others tell more: it is only checked.

Cost grows less than with their number: the process, the weights and the build are shared, workloads but the first have
a secret few of the input sets, and each is timed as much less closely as their mean needs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kbrl_async.kernels.problems.cases import BACKWARD, FORWARD
from kbrl_async.kernels.timing import Recipe
from kbrl_async.kernels.timing.combining import Part, combined, difference
from kbrl_async.kernels.verify.family import WorkloadCase
from kbrl_async.kernels.verify.options import BenchOptions
from kbrl_async.kernels.verify.reference import Reference
from kbrl_async.kernels.verify.sharing import Shared
from protocols.records import OBSERVED, REPLAYED, Fault, Timing, Verdict, WorkloadVerdict

_LEAST_PAIRS = 4
Settle = Callable[[Reference, BenchOptions, Shared | None, bool], tuple[Verdict, Timing | None]]
"""One candidate on one workload, in a process that it shares or in one of its own, timed or not."""


class Several:
    """One candidate's way through `cases`."""

    def __init__(
        self, cases: Sequence[WorkloadCase], settle: Settle, options: BenchOptions, rng: random.Random, shares: bool
    ) -> None:
        self._cases, self._settle, self._options, self._rng, self._shares = cases, settle, options, rng, shares
        self._verdicts: dict[int, Verdict] = {}
        self._parts: list[Part] = []
        timed = [number for number, case in enumerate(cases) if case.workload.is_timed]
        telling = [number for number in timed if cases[number].tells]
        self._telling = telling if any(cases[number].workload.weight for number in telling) else timed

    def run(self, timing: bool) -> tuple[Verdict, Timing | None]:
        timed = self._chosen() if timing else []
        rest = [number for number in range(len(self._cases)) if number not in timed[:1]]
        self._rng.shuffle(rest)
        with Shared() as shared:
            for number in rest:
                self._check(number, shared if self._shares else None)
        if self._is_right:
            for number in timed:
                self._time(number, len(timed))
        elif timed:
            self._check(timed[0], None)
        verdict = combined_verdict(self._cases, self._verdicts)
        if verdict.fault is not Fault.OK or not self._parts:
            return verdict, None
        self._parts.sort(key=lambda part: [case.workload.name for case in self._cases].index(part.name))
        return verdict, _with_backward(combined(self._parts))

    def _chosen(self) -> list[int]:
        """Which are timed, in secret order."""
        names = [case.workload.name for case in self._cases]
        counts = [number for number in self._telling if self._cases[number].workload.weight]
        wanted = self._options.timed_workloads
        chosen = self._rng.sample(counts, min(wanted, len(counts)) if wanted else len(counts))
        passes = [names[number] + FORWARD for number in chosen]
        return [*chosen, *(names.index(name) for name in passes if name in names)]

    @property
    def _is_right(self) -> bool:
        return all(verdict.fault is Fault.OK for verdict in self._verdicts.values())

    @property
    def _is_over(self) -> bool:
        """Nothing more is asked of a candidate that crashed, hung or cheated."""
        return any(verdict.fault not in (Fault.OK, Fault.INCORRECT) for verdict in self._verdicts.values())

    def _check(self, number: int, shared: Shared | None) -> None:
        if not self._is_over:
            self._verdicts[number], _ = self._settled(number, self._options, shared, False)

    def _time(self, number: int, count: int) -> None:
        if not self._is_right:
            return
        options = msgspec.structs.replace(self._options, recipe=_shared(self._options.recipe, count))
        self._verdicts[number], timing = self._settled(number, options, None, True)
        if timing is not None:
            workload = self._cases[number].workload
            self._parts.append(Part(workload.name, workload.weight, timing, timing.ratios))

    def _settled(
        self, number: int, options: BenchOptions, shared: Shared | None, timing: bool
    ) -> tuple[Verdict, Timing | None]:
        case = self._cases[number]
        options = msgspec.structs.replace(options, is_proven=number in self._telling)
        return self._settle(case.reference, options, shared, timing)


def _shared(recipe: Recipe, count: int) -> Recipe:
    """For one of `count` workloads: their mean is as exact as a single one would be."""
    share = math.sqrt(count)
    return msgspec.structs.replace(
        recipe,
        resolution=recipe.resolution * share,
        cap_s=recipe.cap_s / share,
        min_pairs=min(recipe.min_pairs, max(_LEAST_PAIRS, round(recipe.min_pairs / share))),
    )


def _with_backward(timing: Timing) -> Timing:
    """Beside a forward with gradients and one without, what is between them."""
    rows = {row.name: row for row in timing.workloads}
    found = [
        difference(name + BACKWARD, row, rows[name + FORWARD]) for name, row in rows.items() if name + FORWARD in rows
    ]
    return msgspec.structs.replace(timing, workloads=(*timing.workloads, *filter(None, found)))


def combined_verdict(cases: Sequence[WorkloadCase], found: Mapping[int, Verdict]) -> Verdict:
    """Right where all are. The first that is not, in the problem's order, speaks for the whole, and is named."""
    wrong = [number for number in sorted(found) if found[number].fault is not Fault.OK]
    worst = min(wrong, key=lambda number: (found[number].fault is Fault.INCORRECT, number), default=None)
    said = found[min(found) if worst is None else worst]
    if worst is not None:
        where = f"on workload {cases[worst].workload.name}: "
        said = msgspec.structs.replace(said, message=where + said.message)
    observed = [verdict for verdict in found.values() if verdict.trust != REPLAYED]
    shares = [verdict.own_share for verdict in found.values() if verdict.own_share is not None]
    asked = [verdict.kernelbench for verdict in found.values()]
    return msgspec.structs.replace(
        said,
        passed=sum(verdict.passed for verdict in found.values()),
        total=sum(_total(case, found.get(number)) for number, case in enumerate(cases)),
        near=sum(verdict.near for verdict in found.values()),
        trust=OBSERVED if observed else REPLAYED,
        trust_reason=next((verdict.trust_reason for verdict in observed), ""),
        own_share=min(shares, default=None),
        kernelbench=None if None in asked else all(asked),
        workloads=tuple(_row(case, found[number]) for number, case in enumerate(cases) if number in found),
    )


def _total(case: WorkloadCase, verdict: Verdict | None) -> int:
    return len(case.reference.sets) if verdict is None else verdict.total


def _row(case: WorkloadCase, verdict: Verdict) -> WorkloadVerdict:
    v = verdict
    return WorkloadVerdict(case.workload.name, v.fault, v.passed, v.total, v.message, v.trust)
