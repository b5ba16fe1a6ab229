"""What verifiers would take off a run's benches: a forecast for `processes.verifier` from benches that did both. Pure.

A verifier does all but the timing. A bench that times what a verifier has proven right makes its own reference and
proves it again on few of the input sets, as `services.timing_bench` does (`is_light`), on two where it has the steps
that the verifier saw; wrong kernels never reach it. Its reference is counted as the run's benches made theirs, on all
sets, which is more than it takes.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.lab.plan import RunObservation, StageWork
from protocols.messages import Stage
from protocols.records import BenchReport

SETS, LIGHT_SETS, KNOWN_SETS = 10, 4, 2
"""Secret input sets that a kernel is proven right on, and those of a bench behind verifiers: of any kernel, and of one
whose steps can be compared, which are taken to be the same there."""
ONLY_TIMED = ("timing", "sanitize")
"""Steps of the funnel that a verifier leaves to the bench."""


def with_verifiers(observed: RunObservation, reports: Iterable[BenchReport]) -> RunObservation:
    """The observation with its benches' work shared out between verifiers and benches, by what `reports` of the same
    benches say of their steps.

    :raises UserError: the run had verifiers already, or nothing was timed in it.
    """
    if observed.visits(Stage.VERIFY):
        raise UserError("this run had verifiers: its own times are those of both", "Leave --verifiers out")
    whole = verifying = timing = 0.0
    judged = timed = 0
    for report in reports:
        spent = max(0.0, report.finished_at - report.started_at)
        steps = {stage.name: stage.seconds for stage in report.stages}
        left = sum(steps.get(name, 0.0) for name in ONLY_TIMED)
        whole, verifying, judged = whole + spent, verifying + max(0.0, spent - left), judged + 1
        if "timing" in steps:
            timed += 1
            timing += left + _again(steps, KNOWN_SETS if report.plan else LIGHT_SETS)
    if not timed or not whole:
        raise UserError(
            "no kernel of this run was timed and kept", "Give a run with archive.keep=all and right kernels"
        )
    work = observed.stages[Stage.BENCH]
    both = {
        Stage.VERIFY: _share(work, verifying / whole, 1.0),
        Stage.BENCH: _share(work, timing / whole, timed / judged),
    }
    return msgspec.structs.replace(observed, stages={**observed.stages, **both})


def _again(steps: dict[str, float], sets: int) -> float:
    """Seconds of proving once more, on so many sets, what a verifier has proven."""
    first, others = steps.get("small_inputs", 0.0), steps.get("full_inputs", 0.0)
    return steps.get("reference", 0.0) + first + others * (sets - 1) / (SETS - 1)


def _share(work: StageWork, of_seconds: float, of_tasks: float) -> StageWork:
    return msgspec.structs.replace(
        work,
        busy_s=work.busy_s * of_seconds,
        cores_s=work.cores_s * of_seconds,
        held_s=work.held_s * of_seconds,
        tasks=round(work.tasks * of_tasks),
    )
