"""Who gets which task, and what becomes of it where a worker is late, lost, or comes back."""

from __future__ import annotations

from protocols import events as ev
from protocols import messages as msg
from protocols.messages import Status
from tests.protocol.desk import Desk

# ── leasing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tasks_go_out_in_the_order_of_their_submission(desk: Desk) -> None:
    for name in ("a", "b", "c"):
        desk.submit(name)
    assert [task.task_id for task in desk.tasks(desk.hello("w1", slots=3), "w1")] == ["a", "b", "c"]


def test_a_worker_never_gets_more_than_its_slots(desk: Desk) -> None:
    for name in ("a", "b", "c"):
        desk.submit(name)
    assert len(desk.tasks(desk.hello("w1", slots=2), "w1")) == 2


def test_a_worker_with_less_credit_than_slots_gets_no_more_than_its_credit(desk: Desk) -> None:
    desk.hello("w1", slots=3)
    desk.hear("w1", msg.Beat(1))
    desk.submit("a")
    desk.submit("b")
    assert len(desk.ledger.pool.by_id["w1"].leases) == 1


def test_work_is_shared_in_turn(desk: Desk) -> None:
    desk.hello("w1", slots=8)
    desk.hello("w2", slots=8)
    for number in range(3):
        desk.submit(f"t{number}")
    for number in range(3, 6):
        desk.submit(f"t{number}")
    assert [len(worker.leases) for worker in desk.ledger.pool.by_id.values()] == [3, 3]


def test_beats_keep_a_lease_alive_beyond_its_ttl(desk: Desk) -> None:
    desk.submit()
    task = desk.lease()
    for _ in range(20):
        desk.pass_time(1.0)
        desk.hear("w1", msg.Beat(1, [task.lease_id]))
    assert desk.count("expired") == 0


def test_a_lease_that_its_worker_does_not_name_expires(desk: Desk) -> None:
    desk.submit()
    desk.lease()
    for _ in range(11):
        desk.pass_time(1.0)
        desk.hear("w1", msg.Beat(0))
    assert desk.count("expired") == 1
    assert "t1" in desk.ledger.tasks.queues["compile"]


def test_an_expired_task_goes_to_the_front(desk: Desk) -> None:
    desk.submit("first")
    desk.lease()
    desk.submit("second")
    desk.pass_time(11.0)
    assert list(desk.ledger.tasks.queues["compile"]) == ["first", "second"]


def test_a_worker_that_missed_three_beats_gets_nothing_new_but_keeps_its_lease(desk: Desk) -> None:
    desk.submit()
    desk.lease(slots=2)
    desk.pass_time(3.5)
    desk.submit("t2")
    worker = desk.ledger.pool.by_id["w1"]
    assert worker.suspect
    assert len(worker.leases) == 1


def test_a_suspect_that_beats_again_gets_work_again(desk: Desk) -> None:
    desk.hello("w1")
    desk.pass_time(3.5)
    desk.submit()
    assert len(desk.tasks(desk.hear("w1", msg.Beat(1)), "w1")) == 1


def test_a_worker_that_does_not_read_is_suspected(desk: Desk) -> None:
    desk.hello("w1")
    desk.do(ev.PeerFull(b"w1"))
    desk.submit()
    assert "t1" in desk.ledger.tasks.queues["compile"]


def test_a_lost_peer_gives_its_work_back_at_once(desk: Desk) -> None:
    desk.submit()
    desk.lease()
    desk.hello("w2")
    assert desk.tasks(desk.do(ev.PeerLost(b"w1")), "w2")[0].attempt == 2


def test_a_worker_that_is_long_silent_and_holds_nothing_is_forgotten(desk: Desk) -> None:
    desk.hello("w1")
    desk.pass_time(61.0)
    assert not desk.ledger.pool.by_id


# ── losses ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_third_loss_sends_a_task_to_score_as_worker_lost(desk: Desk) -> None:
    desk.submit()
    for number in range(3):
        desk.lease(f"w{number}")
        desk.do(ev.PeerLost(f"w{number}".encode()))
    task = desk.lease("aggregator", "score")
    assert (task.task_id, task.status) == ("t1", Status.WORKER_LOST)


def test_a_batch_that_kills_the_learner_three_times_goes_to_trained(desk: Desk) -> None:
    desk.submit("batch", "train")
    for number in range(3):
        desk.lease(f"w{number}", "train")
        desk.do(ev.PeerLost(f"w{number}".encode()))
    assert desk.stage_of("batch") == "trained"


def test_score_is_tried_for_ever(desk: Desk) -> None:
    desk.submit(stage="score")
    for number in range(10):
        desk.lease(f"w{number}", "score")
        desk.do(ev.PeerLost(f"w{number}".encode()))
    assert desk.count("poisoned") == 0
    assert desk.stage_of() == "score"


def test_losses_of_one_stage_do_not_count_at_the_next(desk: Desk) -> None:
    desk.submit()
    for number in range(2):
        desk.lease(f"w{number}")
        desk.do(ev.PeerLost(f"w{number}".encode()))
    desk.result("w9", desk.lease("w9"))
    assert desk.lease("b1", "bench").attempt == 1


def test_a_refused_task_goes_to_another_worker(desk: Desk) -> None:
    desk.submit()
    task = desk.lease("w1")
    desk.hello("w2")
    actions = desk.hear("w1", msg.Nack(task.lease_id, "gpu gone"))
    assert (len(desk.tasks(actions, "w1")), len(desk.tasks(actions, "w2"))) == (0, 1)


def test_a_refused_task_waits_for_another_worker_that_is_busy(desk: Desk) -> None:
    desk.submit("busy")
    desk.lease("w2")
    desk.submit()
    task = desk.lease("w1")
    assert desk.tasks(desk.hear("w1", msg.Nack(task.lease_id, "gpu gone")), "w1") == []


def test_a_refused_task_does_not_block_the_one_behind_it(desk: Desk) -> None:
    desk.submit("busy")
    desk.lease("w2")
    desk.submit()
    task = desk.lease("w1")
    desk.submit("behind")
    actions = desk.hear("w1", msg.Nack(task.lease_id, "gpu gone"))
    assert [task.task_id for task in desk.tasks(actions, "w1")] == ["behind"]


def test_a_refused_task_returns_to_the_only_worker_there_is(desk: Desk) -> None:
    desk.submit()
    task = desk.lease("w1")
    assert len(desk.tasks(desk.hear("w1", msg.Nack(task.lease_id, "gpu gone")), "w1")) == 1


def test_a_worker_that_says_bye_gives_back_without_a_loss(desk: Desk) -> None:
    desk.submit()
    desk.lease()
    desk.hear("w1", msg.Bye())
    assert desk.lease("w2").attempt == 1


# ── workers that come back ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_reconnects_keeps_what_it_holds_and_returns_what_never_arrived(desk: Desk) -> None:
    desk.submit("arrived")
    desk.submit("lost")
    arrived, lost = desk.tasks(desk.hello("w1", slots=2), "w1")
    desk.now = 1.5
    said = desk.said(desk.hello("w1", slots=2, held=[arrived.lease_id]), "w1")
    assert msg.Revoke(lost.lease_id, "not held") in said
    assert [task.task_id for task in said if isinstance(task, msg.Task)] == ["lost"]


def test_a_task_that_crosses_a_repeated_hello_on_its_way_stays_leased(desk: Desk) -> None:
    desk.submit()
    desk.lease()
    (welcome,) = desk.said(desk.hello("w1"), "w1")
    assert isinstance(welcome, msg.Welcome)
    assert len(desk.ledger.pool.by_id["w1"].leases) == 1


def test_a_worker_can_not_claim_more_than_its_slots(desk: Desk) -> None:
    for name in ("a", "b"):
        desk.submit(name)
    tasks = desk.tasks(desk.hello("w1", slots=2), "w1")
    again = desk.restarted()
    again.hello("w1", slots=1, held=[task.lease_id for task in tasks])
    assert len(again.ledger.pool.by_id["w1"].leases) == 1


def test_a_lease_that_is_gone_is_revoked_at_the_next_beat(desk: Desk) -> None:
    desk.hello("w1")
    actions = desk.hear("w1", msg.Beat(1, ["1.1:compile:gone"]))
    assert desk.said(actions, "w1") == [msg.Revoke("1.1:compile:gone", "no longer leased")]


def test_a_wedged_worker_that_wakes_up_in_time_keeps_its_work(desk: Desk) -> None:
    desk.submit()
    task = desk.lease()
    desk.pass_time(11.0)
    desk.hear("w1", msg.Beat(1, [task.lease_id]))
    assert list(desk.ledger.pool.by_id["w1"].leases) == [task.lease_id]


def test_the_broker_beats_so_that_workers_see_it_live(desk: Desk) -> None:
    desk.hello("w1")
    assert desk.said(desk.pass_time(1.0), "w1") == [msg.Beat(0, epoch=1)]
