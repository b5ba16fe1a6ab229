"""Which stage a run waits for, from spans that were drawn by hand."""

from __future__ import annotations

import msgspec
import pytest

from kbrl_async.lab.report.model import PolicyUpdate, ReportedTurn, RunData
from kbrl_async.lab.report.verdict import FAULT_NAMES, verdict
from kbrl_async.lab.report.waiting import waits
from kbrl_async.runs.telemetry.system_metrics import SystemSample, WorkerSample
from protocols.records import INFRASTRUCTURE_FAULTS, Fault
from protocols.rollout import StageSpan
from tests.records import stats


def worked(stage: str, start: float, end: float, worker: str, waited: float = 0.0) -> StageSpan:
    return StageSpan(stage, start - waited, start, end, worker)


def run(*turns: tuple[StageSpan, ...], updates: tuple[PolicyUpdate, ...] = ()) -> RunData:
    made = [
        ReportedTurn(stats(rollout_id=f"r{n}"), at=max(span.finished for span in spans), asked=0.0, spans=spans)
        for n, spans in enumerate(turns)
    ]
    return RunData(name="drawn", turns=made, updates=updates or (PolicyUpdate(1, 20.0, 18.0),), duration=20.0)


QUICK = (
    worked("generate", 1, 2, "s", 1.0), worked("compile", 2, 3, "c", 0.0), worked("bench", 5, 7, "b", 2.0),
)  # fmt: skip
SLOW = (
    worked("generate", 1, 2, "s", 1.0), worked("compile", 2, 3, "c", 0.0), worked("bench", 7, 9, "b", 4.0),
)  # fmt: skip
BROKEN = (worked("generate", 1, 2, "s", 1.0), worked("compile", 2, 4, "c", 0.0))


def test_waits_are_means_over_all_rollouts() -> None:
    found = waits(run(QUICK, SLOW, BROKEN))
    assert found is not None
    bench = next(stage for stage in found.stages if stage.stage == "bench")
    assert bench.rollouts == 2
    assert bench.waited == pytest.approx((2 + 4) / 3), "the third one left before it, and waited none"
    assert found.whole == pytest.approx((7 + 9 + 4) / 3 - 1)


def test_what_is_asked_for_while_the_policy_is_made_waits_for_no_stage() -> None:
    """Of 20 seconds the first ten made the policy; the bench never rested after them, and the sampler had no queue."""
    turns = [
        (worked("generate", 10 + n, 10.5 + n, "s", 10.0 + n), worked("bench", 11 + n, 12 + n, "b", 0.5))
        for n in range(8)
    ]
    found = waits(run(*turns, updates=(PolicyUpdate(1, 20.0, 19.5),)))
    assert found is not None
    generate, bench, _ = found.stages
    assert (generate.waited, bench.busy) == pytest.approx((3.5, 0.8))
    assert found.slowest == bench
    assert found.whole == pytest.approx(5.5)


def worker(stage: str, busy: float) -> WorkerSample:
    return WorkerSample(stages=[stage], busy=busy)


@pytest.mark.parametrize(
    ("sampler", "bench", "slowest"), [(0.83, 0.95, "bench"), (0.94, 0.95, "generate"), (0.3, 0.4, None)]
)
def test_the_busiest_is_waited_for_and_of_two_alike_the_one_with_the_longer_queue(
    sampler: float, bench: float, slowest: str | None
) -> None:
    """A sampler that is held back has a long queue without being slow."""
    held_back = (worked("generate", 9, 10, "s", 9.0), worked("bench", 11, 12, "b", 1.0))
    workers = {"s": worker("generate", sampler), "b": worker("bench", bench)}
    system = [SystemSample(t=float(t), workers=workers) for t in range(21)]
    first = (worked("generate", 0, 1, "s"), worked("bench", 2, 3, "b", 1.0))
    found = waits(msgspec.structs.replace(run(first, held_back), system=system))
    assert found is not None
    assert (found.slowest.stage if found.slowest else None) == slowest


def test_busy_is_the_share_of_training_in_which_a_worker_had_something_in_hand() -> None:
    found = waits(run(QUICK, SLOW, BROKEN))
    assert found is not None
    assert {stage.stage: stage.busy for stage in found.stages} == pytest.approx(
        {"generate": 1 / 19, "compile": 2 / 19, "bench": 4 / 19, "train": 2 / 19}
    )


def test_a_learner_that_never_rests_is_what_is_waited_for() -> None:
    data = run(QUICK, SLOW, updates=(PolicyUpdate(1, 12.0, 3.0), PolicyUpdate(2, 20.0, 12.0)))
    found = waits(data)
    assert found is not None
    assert found.slowest is not None
    assert found.slowest.stage == "train"
    assert "The learner is what it waits for" in verdict(data)


def test_a_run_that_rested_waited_for_no_stage() -> None:
    assert "No stage was at work most of the time" in verdict(run(QUICK))


def test_without_spans_nobody_knows() -> None:
    data = run(QUICK)
    bare = [ReportedTurn(turn.stats) for turn in data.turns]
    assert waits(RunData(name="bare", turns=bare, updates=data.updates)) is None


def test_every_fault_of_a_candidate_has_a_name() -> None:
    assert FAULT_NAMES.keys() == set(Fault) - INFRASTRUCTURE_FAULTS - {Fault.OK}
