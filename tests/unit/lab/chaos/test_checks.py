"""The checks after chaos: each notices what it is there for, on evidence that is right but for one thing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kbrl_async.lab.chaos.checks import ChaosReport, Check, Evidence, gather, judge
from kbrl_async.lab.chaos.driver import Happened
from kbrl_async.lab.chaos.faults import FaultKind, PlannedFault


def evidence() -> Evidence:
    """Three groups of two: two trained in a batch each, one filtered."""
    rollouts = [(f"g{g}", f"g{g}.r{r}") for g in range(3) for r in range(2)]
    counts = {"groups_trained": 2, "groups_filtered": 1, "groups_dropped_stale": 0, "groups_failed": 0}
    return Evidence(
        summary={"groups_admitted": 3, **counts, "heldout_correct_rate_after": 0.5},
        admitted={"g0": 2, "g1": 2, "g2": 2},
        ended=rollouts,
        batches={"batch-0": ["g0"], "batch-1": ["g2"]},
        trained=[("batch-0", 1), ("batch-1", 2)],
        journaled=[rollout for _, rollout in rollouts],
        archived=[rollout for _, rollout in rollouts],
        group_ends={"g0": "trained", "g1": "filtered", "g2": "trained"},
        updates=[("batch-0", 1), ("batch-1", 2)],
        progress={"batches": 2, "version": 2, "last_batch_id": "batch-1"},
        policies=[0, 1, 2],
        counters={"submitted": 9, "finished": 9},
    )


def wrong(found: Evidence) -> list[Check]:
    return [check for check in judge(found) if not check.ok]


def test_a_run_that_lost_nothing_passes() -> None:
    assert wrong(evidence()) == []


def without_summary(e: Evidence) -> None:
    e.summary = {}


def group_lost(e: Evidence) -> None:
    e.admitted["g3"] = 2


def group_ended_otherwise(e: Evidence) -> None:
    assert e.group_ends is not None
    e.group_ends["g1"] = "trained"


def rollout_twice(e: Evidence) -> None:
    e.ended.append(("g1", "g1.r0"))


def rollout_missing(e: Evidence) -> None:
    e.ended.remove(("g0", "g0.r1"))


def record_missing(e: Evidence) -> None:
    assert e.archived is not None
    e.archived.remove("g1.r1")


def group_in_two_batches(e: Evidence) -> None:
    e.batches["batch-1"] = ["g2", "g0"]


def batch_twice(e: Evidence) -> None:
    e.trained.append(("batch-1", 3))


def version_skipped(e: Evidence) -> None:
    e.trained[1] = ("batch-1", 3)


def batch_open(e: Evidence) -> None:
    e.batches["batch-2"] = []


def learner_trained_more(e: Evidence) -> None:
    e.progress["batches"] = 3


def task_lost(e: Evidence) -> None:
    e.counters["submitted"] = 10


def task_left(e: Evidence) -> None:
    e.counters["submitted"], e.live = 10, ["g7.r0"]


def policy_not_published(e: Evidence) -> None:
    e.policies = [0, 1]


def not_evaluated(e: Evidence) -> None:
    e.summary["heldout_correct_rate_after"] = None


def orphan(e: Evidence) -> None:
    e.left = ["learner.1 (child, pid 7)"]


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (without_summary, "the run has ended"),
        (group_lost, "every group has one end"),
        (group_ended_otherwise, "every group has one end"),
        (rollout_twice, "every rollout ended once"),
        (rollout_missing, "every rollout ended once"),
        (record_missing, "every score has its record"),
        (group_in_two_batches, "every batch was trained once"),
        (batch_twice, "every batch was trained once"),
        (version_skipped, "every batch was trained once"),
        (batch_open, "every batch was trained once"),
        (learner_trained_more, "the learner counts the same"),
        (task_lost, "the broker's tasks add up"),
        (task_left, "the broker's tasks add up"),
        (policy_not_published, "the final policy is trained and evaluated"),
        (not_evaluated, "the final policy is trained and evaluated"),
        (orphan, "nothing runs on"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_is_off_is_noticed(spoil: Callable[[Evidence], None], name: str) -> None:
    found = evidence()
    spoil(found)
    assert name in [check.name for check in wrong(found)]


def test_a_task_that_a_torn_journal_brought_back_after_its_end_is_nothing_lost() -> None:
    found = evidence()
    found.counters["submitted"], found.live = 11, ["g0.r1", "batch-1"]
    assert wrong(found) == []


def test_of_a_rehearsal_the_newest_checkpoint_may_be_older_but_must_be_one_of_its_updates() -> None:
    found = evidence()
    found.progress = {"batches": 1, "version": 1, "last_batch_id": "batch-0"}
    assert [check.name for check in wrong(found)] == ["the learner counts the same"]
    found.keeps_last, found.policies = False, found.policies[:-1]
    assert wrong(found) == []
    found.progress["last_batch_id"] = "batch-1"
    assert [check.name for check in wrong(found)] == ["the learner counts the same"]
    for progress in ({"batches": 3, "version": 3, "last_batch_id": "batch-2"}, {}):
        found.progress = progress
        assert [check.name for check in wrong(found)] == ["the learner counts the same"]


def test_a_run_that_was_not_to_be_evaluated_lacks_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("eval_samples: 0\nsampler:\n  forced: answers.json\n")
    told = gather(tmp_path)
    assert (told.evaluates, told.keeps_last) == (False, False)
    found = evidence()
    not_evaluated(found)
    found.evaluates = False
    assert wrong(found) == []


def test_a_run_that_left_nothing_passes_nothing_that_needs_a_run(tmp_path: Path) -> None:
    names = {check.name for check in wrong(gather(tmp_path))}
    assert {"the run has ended", "the final policy is trained and evaluated"} <= names


@pytest.mark.parametrize(
    ("answered_s", "working_s", "pause_s", "ok"),
    [(0.5, 2.9, 0.2, True), (0.5, 3.1, 0.2, False), (0.5, 3.1, 2.0, True), (3.1, 3.2, 2.0, False)],
    ids=["in time", "late under load", "late where nobody had a result to hand in", "silent for too long"],
)
def test_a_broker_that_comes_back_too_late_is_a_failure(
    answered_s: float, working_s: float, pause_s: float, ok: bool
) -> None:
    fault = PlannedFault(FaultKind.KILL, "broker")
    killed = Happened(fault, began_s=1.0, answered_s=answered_s, working_s=working_s, pause_s=pause_s)
    report = ChaosReport("x", faults=[killed])
    report.conclude(judge(evidence()))
    assert report.ok is ok


def test_a_run_that_ended_by_itself_is_a_failure_and_one_that_was_ended_is_not() -> None:
    report = ChaosReport("x", faults=[Happened(PlannedFault(FaultKind.KILL, "nanny:learner"), began_s=1.0)], starts=2)
    report.conclude(judge(evidence()))
    assert report.ok
    report.starts = 3
    report.conclude(judge(evidence()))
    assert not report.ok


def test_a_fault_that_was_not_done_is_a_failure() -> None:
    report = ChaosReport(
        "x", faults=[Happened(PlannedFault(FaultKind.KILL, "broker"), failed="the run ended before its time")]
    )
    report.conclude(judge(evidence()))
    assert not report.ok
