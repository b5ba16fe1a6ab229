"""Which phase a run is in follows from its state."""

from __future__ import annotations

import msgspec

from kbrl_async.evaluation.heldout import BEFORE
from kbrl_async.runs.commands import AskTurn, Evaluated
from kbrl_async.runs.planning import plan_of
from kbrl_async.runs.run_state import RunState
from services.reward_aggregator.metrics_writer import Phase, phase_of
from tests.unit.services.test_limits import settings


def state(max_minutes: float | None = 6.0) -> RunState:
    plan = plan_of(settings())
    return RunState(msgspec.structs.replace(plan, max_minutes=max_minutes, eval_samples=1, heldout=plan.training[:2]))


def end_evaluation(run: RunState, answers: int) -> None:
    for asked in run.open_work()[:answers]:
        assert isinstance(asked, AskTurn)
        run.do(Evaluated(BEFORE, asked.rollout_id, None, 10.0))


def test_first_the_held_out_problems_are_asked() -> None:
    run = state()
    assert phase_of(run, 0.0) == Phase("evaluation before training", "0 of 2 answers", 0.0)
    end_evaluation(run, 1)
    assert phase_of(run, 0.0) == Phase("evaluation before training", "1 of 2 answers", 0.5)


def test_then_updates_count_and_the_limit_of_time() -> None:
    run = state()
    end_evaluation(run, 2)
    steps = run.plan.buffer.max_steps
    assert phase_of(run, 70.0) == Phase("training", f"update 0 of {steps}", 0.0, 300.0)
    endless = state(max_minutes=None)
    end_evaluation(endless, 2)
    assert phase_of(endless, 70.0).limit_s is None


def test_then_the_held_out_problems_again() -> None:
    run = state()
    end_evaluation(run, 2)
    finished = run.finish(80.0)
    assert finished is not None
    run.do(finished)
    assert phase_of(run, 90.0) == Phase("evaluation after training", "0 of 2 answers", 0.0)
