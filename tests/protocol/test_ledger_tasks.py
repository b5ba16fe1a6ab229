"""The way of a task through the ledger: taken once, done once, given up when it is too old or its group has ended."""

from __future__ import annotations

import pytest

from protocols import events as ev
from protocols import messages as msg
from protocols.messages import Status
from tests.protocol.desk import Desk

# ── submitting ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_submission_is_journaled_before_it_is_acknowledged(desk: Desk) -> None:
    store, reply = desk.do(ev.FromProducer(b"p", msg.Submit("t1", "compile")))
    assert isinstance(store, ev.Store)
    assert reply == ev.ToProducer(b"p", msg.SubmitAck("t1"))


def test_the_same_task_id_is_taken_once(desk: Desk) -> None:
    desk.submit()
    assert desk.submit() == msg.SubmitAck("t1", duplicate=True)
    assert desk.count("submitted") == 1


def test_an_ended_task_is_not_taken_again(desk: Desk) -> None:
    desk.submit()
    desk.result("w1", desk.lease(), next_stage="")
    assert desk.submit() == msg.SubmitAck("t1", duplicate=True)


def test_a_full_queue_answers_busy_and_takes_nothing(desk: Desk) -> None:
    for number in range(3):
        desk.submit(f"t{number}")
    assert desk.submit("t9") == msg.Busy("t9", 0.5)
    assert desk.count("submitted") == 3


def test_a_known_task_is_acknowledged_even_where_the_queue_is_full(desk: Desk) -> None:
    for number in range(3):
        desk.submit(f"t{number}")
    assert desk.submit("t0") == msg.SubmitAck("t0", duplicate=True)


def test_a_full_queue_never_refuses_a_task_that_comes_from_another_stage(desk: Desk) -> None:
    for number in range(3):
        desk.submit(f"t{number}")
    desk.submit("late", "generate")
    assert desk.result("s", desk.lease("s", "generate"), "compile").accepted
    assert len(desk.ledger.tasks.queues["compile"]) == 4


def test_a_stage_that_does_not_exist_is_busy(desk: Desk) -> None:
    assert isinstance(desk.submit(stage="polish"), msg.Busy)


# ── results ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_result_is_journaled_before_its_ack(desk: Desk) -> None:
    desk.submit()
    task = desk.lease()
    append, ack = desk.hear("w1", msg.Result("t1", task.lease_id, "bench"))
    assert isinstance(append, ev.Append)
    assert ack == ev.ToWorker(b"w1", msg.Ack("t1", task.lease_id))


def test_the_same_result_counts_once(desk: Desk) -> None:
    desk.submit()
    task = desk.lease()
    desk.result("w1", task)
    assert desk.result("w1", task) == msg.Ack("t1", task.lease_id, accepted=False, reason="duplicate")


def test_a_result_after_the_end_is_a_duplicate(desk: Desk) -> None:
    desk.submit()
    task = desk.lease()
    desk.result("w1", task, next_stage="")
    assert desk.result("w1", task, next_stage="").reason == "duplicate"


def test_a_late_result_wins_where_nobody_was_faster_and_the_other_lease_is_revoked(desk: Desk) -> None:
    desk.submit()
    late = desk.lease("w1")
    desk.pass_time(11.0)
    second = desk.lease("w2")
    actions = desk.hear("w1", msg.Result("t1", late.lease_id, "bench"))
    assert desk.said(actions, "w1") == [msg.Ack("t1", late.lease_id)]
    assert desk.said(actions, "w2") == [msg.Revoke(second.lease_id, "superseded")]


def test_a_new_incarnation_fences_the_leases_of_the_old_one(desk: Desk) -> None:
    desk.submit()
    old = desk.lease("w1")
    desk.hear("w1-again", msg.Hello("w1", "b", ["compile"], 1))
    assert desk.result("w1", old).reason == "fenced"
    assert desk.count("lost") == 1


def test_a_fenced_lease_is_not_adopted_again(desk: Desk) -> None:
    desk.submit()
    old = desk.lease("w1")
    said = desk.said(desk.hear("again", msg.Hello("w1", "b", ["compile"], 1, [old.lease_id])), "again")
    assert [message.adopted for message in said if isinstance(message, msg.Welcome)] == [[]]


def test_a_zombie_can_not_take_its_name_back(desk: Desk) -> None:
    desk.hello("w1", incarnation="a")
    desk.hear("w1-again", msg.Hello("w1", "b", ["compile"], 1))
    assert isinstance(desk.said(desk.hello("w1", incarnation="a"), "w1")[0], msg.Drain)
    assert desk.ledger.pool.by_id["w1"].incarnation == "b"


def test_a_result_of_a_task_that_nobody_knows_is_refused(desk: Desk) -> None:
    ack = desk.said(desk.hear("w1", msg.Result("t9", "1.1:compile:t9")), "w1")
    assert ack == [msg.Ack("t9", "1.1:compile:t9", accepted=False, reason="unknown task")]


@pytest.mark.parametrize("lease_id", ["", "nonsense", "1.1:compile:other", "1.1:polish:t1"])
def test_a_result_under_a_lease_that_is_none_is_refused(desk: Desk, lease_id: str) -> None:
    desk.submit()
    task = desk.lease()
    ack = desk.said(desk.hear("w1", msg.Result("t1", lease_id, "bench")), "w1")[0]
    assert ack == msg.Ack("t1", lease_id, accepted=False, reason="invalid lease")
    assert desk.result("w1", task).accepted


@pytest.mark.parametrize("stage", ["compile", "generate", "polish"])
def test_a_task_never_goes_back(desk: Desk, stage: str) -> None:
    desk.submit()
    assert not desk.result("w1", desk.lease(), next_stage=stage).accepted


def test_the_memory_of_ended_tasks_is_bounded(desk: Desk) -> None:
    for number in range(5):
        desk.submit(f"t{number}")
        desk.result("w1", desk.lease(), next_stage="")
        desk.hear("w1", msg.Bye())
    assert list(desk.ledger.tasks.ended) == ["t2", "t3", "t4"]
    assert len(desk.rows) == 3


# ── staleness ─────────────────────────────────────────────────────────────────────────────────────────────────────


def generated(desk: Desk, version: int, lag: int) -> None:
    desk.submit(stage="generate", lag=lag)
    desk.result("s", desk.lease("s", "generate"), "compile", version)


def policy(desk: Desk, version: int) -> None:
    desk.hear("learner", msg.Hello("learner", "a", ["train"], 1, policy_version=version))


def test_a_task_that_is_too_old_is_scored_as_stale_and_not_compiled(desk: Desk) -> None:
    generated(desk, version=3, lag=1)
    policy(desk, 5)
    assert desk.tasks(desk.hello("w1"), "w1") == []
    assert desk.lease("aggregator", "score").status == Status.STALE


def test_a_stale_task_reaches_a_waiting_scorer_at_once(desk: Desk) -> None:
    desk.hello("aggregator", stage="score")
    generated(desk, version=3, lag=1)
    policy(desk, 5)
    assert len(desk.tasks(desk.hello("w1"), "aggregator")) == 1


def test_a_task_as_old_as_allowed_is_compiled(desk: Desk) -> None:
    generated(desk, version=4, lag=1)
    policy(desk, 5)
    assert len(desk.tasks(desk.hello("w1"), "w1")) == 1


def test_a_task_without_a_limit_never_gets_stale(desk: Desk) -> None:
    generated(desk, version=0, lag=-1)
    policy(desk, 50)
    assert len(desk.tasks(desk.hello("w1"), "w1")) == 1


def test_the_policy_version_comes_from_accepted_training(desk: Desk) -> None:
    desk.submit("batch", "train")
    desk.result("l", desk.lease("l", "train"), "trained", version=6)
    assert desk.ledger.policy_version == 6
    assert desk.lease("a", "trained").policy_version == 6


def test_the_policy_version_never_falls(desk: Desk) -> None:
    policy(desk, 5)
    policy(desk, 4)
    assert desk.ledger.policy_version == 5


# ── retiring ──────────────────────────────────────────────────────────────────────────────────────────────────────


def retire(desk: Desk, group: str = "g") -> list[ev.Action]:
    return desk.do(ev.FromProducer(b"p", msg.Retire(group)))


def test_retiring_a_group_drops_what_is_queued_of_it(desk: Desk) -> None:
    desk.submit("mine", group="g")
    desk.submit("other", group="h")
    retire(desk)
    assert list(desk.ledger.tasks.queues["compile"]) == ["other"]
    assert desk.count("retired") == 1


def test_retiring_a_group_revokes_what_runs_of_it(desk: Desk) -> None:
    desk.submit(group="g")
    task = desk.lease()
    assert desk.said(retire(desk), "w1") == [msg.Revoke(task.lease_id, "group retired")]


def test_retiring_a_group_forgets_what_has_ended_of_it(desk: Desk) -> None:
    desk.submit(group="g")
    desk.result("w1", desk.lease(), next_stage="")
    retire(desk)
    assert "t1" not in desk.ledger.tasks.ended
    assert "t1" not in {row.task_id for row in desk.rows.values()}


def test_a_late_copy_of_a_submission_does_not_revive_a_retired_group(desk: Desk) -> None:
    desk.submit(group="g")
    retire(desk)
    assert desk.submit(group="g") == msg.SubmitAck("t1", duplicate=True)
    assert desk.restarted().submit(group="g") == msg.SubmitAck("t1", duplicate=True)
    assert not desk.ledger.tasks.live


def test_retiring_is_acknowledged_even_where_nothing_is_known(desk: Desk) -> None:
    assert desk.replies(retire(desk, "nobody")) == [msg.SubmitAck("", group_id="nobody")]
