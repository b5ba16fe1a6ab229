"""Which stage a run waits for, from spans that were drawn by hand."""

from __future__ import annotations

import pytest

from kbrl_async.lab.report.model import PolicyUpdate, RunData, ScoredTurn, StageSpan
from kbrl_async.lab.report.verdict import FAULT_NAMES, verdict
from kbrl_async.lab.report.waiting import waits
from protocols.records import INFRASTRUCTURE_FAULTS, Fault
from tests.records import stats


def run(*turns: tuple[StageSpan, ...], updates: tuple[PolicyUpdate, ...] = ()) -> RunData:
    made = [
        ScoredTurn(stats(rollout_id=f"r{n}"), at=max(span.end for span in spans), asked=0.0, spans=spans)
        for n, spans in enumerate(turns)
    ]
    return RunData(name="drawn", turns=made, updates=updates or (PolicyUpdate(1, 20.0, 18.0),), duration=20.0)


QUICK = (
    StageSpan("generate", 1, 2, "s", 1.0), StageSpan("compile", 2, 3, "c", 0.0), StageSpan("bench", 5, 7, "b", 2.0),
)  # fmt: skip
SLOW = (
    StageSpan("generate", 1, 2, "s", 1.0), StageSpan("compile", 2, 3, "c", 0.0), StageSpan("bench", 7, 9, "b", 4.0),
)  # fmt: skip
BROKEN = (StageSpan("generate", 1, 2, "s", 1.0), StageSpan("compile", 2, 4, "c", 0.0))


def test_the_longest_queue_is_before_what_is_waited_for() -> None:
    found = waits(run(QUICK, SLOW, BROKEN))
    assert found is not None
    assert found.longest is not None
    assert found.longest.stage == "bench"
    assert found.longest.rollouts == 2
    assert found.longest.waited == pytest.approx((2 + 4) / 3), "the third one left before it, and waited none"
    assert found.whole == pytest.approx((7 + 9 + 4) / 3)


def test_busy_is_the_share_of_training_in_which_a_worker_had_something_in_hand() -> None:
    found = waits(run(QUICK, SLOW, BROKEN))
    assert found is not None
    assert {stage.stage: stage.busy for stage in found.stages} == pytest.approx(
        {"generate": 1 / 20, "compile": 2 / 20, "bench": 4 / 20, "train": 2 / 20}
    )


def test_a_learner_that_never_rests_is_what_is_waited_for() -> None:
    data = run(QUICK, SLOW, updates=(PolicyUpdate(1, 12.0, 3.0), PolicyUpdate(2, 20.0, 12.0)))
    found = waits(data)
    assert found is not None
    assert found.longest is not None
    assert found.longest.stage == "train"
    assert "The learner is what it waits for" in verdict(data)


def test_without_queues_nothing_is_waited_for() -> None:
    assert "No stage is waited for much" in verdict(run((StageSpan("bench", 1, 9, "b", 0.1),)))


def test_without_spans_nobody_knows() -> None:
    data = run(QUICK)
    bare = [ScoredTurn(turn.stats) for turn in data.turns]
    assert waits(RunData(name="bare", turns=bare, updates=data.updates)) is None


def test_every_fault_of_a_candidate_has_a_name() -> None:
    assert FAULT_NAMES.keys() == set(Fault) - INFRASTRUCTURE_FAULTS - {Fault.OK}
