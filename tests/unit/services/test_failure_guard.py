"""A run that can't get anywhere ends, and says why."""

from __future__ import annotations

import pytest

from kbrl_async.errors import RunError
from kbrl_async.rollouts.buffer.buffer import RUN_ENDED
from kbrl_async.rollouts.buffer.events import Closed
from protocols.records import GroupOutcome
from services.reward_aggregator.guards import FailureGuard

FAILED = Closed("g1", "L1/01_x", GroupOutcome.FAILED, "worker_lost: the GPU is gone")
FILTERED = Closed("g3", "L1/01_x", GroupOutcome.FILTERED, "zero_variance")
TRAINED = Closed("g2", "L1/01_x", GroupOutcome.TRAINED, "")


def test_groups_that_all_fail_end_the_run_with_the_last_reason() -> None:
    guard = FailureGuard(most=3)
    guard.note([FAILED, FAILED])
    with pytest.raises(RunError, match=r"last 3 groups all failed.*the GPU is gone.*kbrl logs"):
        guard.note([FAILED])


def test_one_group_that_did_not_fail_is_enough_to_go_on() -> None:
    guard = FailureGuard(most=3)
    for _ in range(5):
        guard.note([FAILED, FAILED, TRAINED])


def test_groups_that_the_end_of_training_closes_do_not_fail_a_good_run() -> None:
    """With large batches and a staleness of several versions there are more of them than a run may fail."""
    FailureGuard(most=3).note([FAILED._replace(reason=RUN_ENDED)] * 100)


def test_groups_that_teach_nothing_are_told_of_now_and_then_and_end_nothing() -> None:
    guard = FailureGuard(most=3)
    assert [guard.note([FILTERED]) for _ in range(7)] == [0, 0, 3, 0, 0, 6, 0]
    assert guard.note([TRAINED]) == 0
    assert [guard.note([FILTERED]) for _ in range(3)] == [0, 0, 3]
