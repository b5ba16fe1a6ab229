"""The ledger as a whole: it begins again with what it knew, drains, and tells how it stands."""

from __future__ import annotations

import msgspec

from protocols import events as ev
from protocols import messages as msg
from protocols.ledger import StageOptions
from tests.protocol.desk import OPTIONS, Desk

# ── restarts ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_after_a_restart_a_queued_task_goes_out_at_once(desk: Desk) -> None:
    desk.submit()
    assert len(desk.restarted().tasks(desk.restarted().hello("w1"), "w1")) == 1


def test_after_a_restart_a_leased_task_waits_for_its_holder_for_one_lease(desk: Desk) -> None:
    desk.submit()
    desk.lease()
    again = desk.restarted()
    assert again.tasks(again.hello("w2"), "w2") == []
    again.pass_time(9.0)
    again.hear("w2", msg.Beat(1))
    assert len(again.tasks(again.pass_time(1.5), "w2")) == 1


def test_after_a_restart_a_long_lease_does_not_make_a_task_wait_for_a_holder_that_is_gone(desk: Desk) -> None:
    """A batch is leased for minutes. With its learner killed in the same moment, the whole run would stand still."""
    options = msgspec.structs.replace(OPTIONS, train=StageOptions(ttl_s=120.0), reconnect_s=5.0)
    desk.submit("batch", "train")
    desk.lease("w1", "train")
    again = desk.restarted(options)
    assert again.tasks(again.hello("w2", stage="train"), "w2") == []
    again.pass_time(4.0)
    assert again.tasks(again.hear("w2", msg.Beat(1)), "w2") == []
    assert len(again.tasks(again.pass_time(1.1), "w2")) == 1


def test_after_a_restart_running_work_is_adopted(desk: Desk) -> None:
    desk.submit()
    task = desk.lease()
    again = desk.restarted()
    welcome = again.said(again.hello("w1", held=[task.lease_id, "1.9:compile:gone"]), "w1")[0]
    assert isinstance(welcome, msg.Welcome)
    assert welcome.adopted == [task.lease_id]
    assert again.result("w1", task).accepted


def test_after_a_restart_a_result_is_accepted_before_its_worker_said_hello(desk: Desk) -> None:
    desk.submit()
    task = desk.lease()
    again = desk.restarted()
    assert again.result("w1", task).accepted
    assert again.stage_of() == "bench"


def test_a_restart_counts_no_loss(desk: Desk) -> None:
    desk.submit()
    desk.lease()
    again = desk.restarted()
    again.pass_time(11.0)
    assert again.lease("w2").attempt == 1


def test_after_a_restart_a_worker_that_only_beats_is_told_to_say_hello(desk: Desk) -> None:
    desk.hello("w1")
    assert desk.restarted().said(desk.restarted().hear("w1", msg.Beat(1, epoch=1)), "w1") == [msg.Beat(0)]


def test_losses_survive_a_restart(desk: Desk) -> None:
    desk.submit()
    desk.lease()
    desk.do(ev.PeerLost(b"w1"))
    assert desk.restarted().lease("w2").attempt == 2


def test_the_order_of_a_queue_survives_a_restart(desk: Desk) -> None:
    for name in ("c", "a", "b"):
        desk.submit(name)
    assert list(desk.restarted().ledger.tasks.queues["compile"]) == ["c", "a", "b"]


# ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_draining_ledger_gives_nothing_out_but_takes_results(desk: Desk) -> None:
    desk.submit()
    task = desk.lease()
    assert desk.said(desk.do(ev.StartDrain("stop")), "w1") == [msg.Drain("stop")]
    assert isinstance(desk.submit("t2"), msg.Busy)
    assert desk.result("w1", task).accepted
    assert desk.tasks(desk.hello("b1", stage="bench"), "b1") == []


def test_stats_add_up(desk: Desk) -> None:
    for name in ("a", "b", "c"):
        desk.submit(name)
    desk.result("w1", desk.lease("w1"), next_stage="")
    desk.now = 7.0
    stats = desk.ledger.stats(desk.now)
    assert stats["queues"]["compile"] == 1  # type: ignore[index]
    assert stats["in_flight"]["compile"] == 1  # type: ignore[index]
    assert stats["oldest_s"]["compile"] == 7.0  # type: ignore[index]
    assert stats["counters"]["submitted"] == stats["counters"]["finished"] + 2  # type: ignore[index]
    assert stats["workers"]["w1"]["leases"] == 1  # type: ignore[index]
