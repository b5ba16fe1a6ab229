"""The features of the ledger, one by one."""

from __future__ import annotations

import pytest

from protocols import events as ev
from protocols import messages as msg
from protocols.ledger import Ledger, LedgerOptions, StageOptions
from protocols.messages import Status

OPTIONS = LedgerOptions(
    heartbeat_s=1.0,
    compile=StageOptions(ttl_s=10.0, queue_limit=3),
    train=StageOptions(ttl_s=10.0),
    finished_limit=3,
)


class Desk:
    """A ledger with a clock, workers named by their route, and a journal of rows."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger(OPTIONS)
        self.now = 0.0
        self.rows: dict[int, ev.TaskRow] = {}

    def do(self, event: ev.Event) -> list[ev.Action]:
        actions = self.ledger.handle(event, self.now)
        for action in actions:
            if isinstance(action, ev.Store | ev.Append | ev.Update | ev.Finish):
                self.rows[action.row.seq] = action.row
            elif isinstance(action, ev.Forget):
                del self.rows[action.seq]
        return actions

    def submit(self, task_id: str = "t1", stage: str = "compile", group: str = "", lag: int = -1) -> msg.Message:
        return self.replies(self.do(ev.FromProducer(b"p", msg.Submit(task_id, stage, group, lag))))[0]

    def replies(self, actions: list[ev.Action]) -> list[msg.Message]:
        return [action.message for action in actions if isinstance(action, ev.ToProducer)]

    def said(self, actions: list[ev.Action], worker: str) -> list[msg.Message]:
        """What a worker hears, tasks included."""
        out: list[msg.Message] = []
        for action in actions:
            if isinstance(action, ev.ToWorker) and action.route == worker.encode():
                out.append(action.message)
            elif isinstance(action, ev.Dispatch) and action.route == worker.encode():
                out.append(action.task)
        return out

    def tasks(self, actions: list[ev.Action], worker: str) -> list[msg.Task]:
        return [message for message in self.said(actions, worker) if isinstance(message, msg.Task)]

    def hear(self, worker: str, message: msg.Message) -> list[ev.Action]:
        return self.do(ev.FromWorker(worker.encode(), message))

    def hello(
        self, worker: str, slots: int = 1, stage: str = "compile", held: list[str] | None = None, incarnation: str = "a"
    ) -> list[ev.Action]:
        return self.hear(worker, msg.Hello(worker, incarnation, [stage], slots, held or []))

    def lease(self, worker: str = "w1", stage: str = "compile", slots: int = 1) -> msg.Task:
        return self.tasks(self.hello(worker, slots, stage), worker)[0]

    def result(self, worker: str, task: msg.Task, next_stage: str = "bench", version: int = -1) -> msg.Ack:
        actions = self.hear(worker, msg.Result(task.task_id, task.lease_id, next_stage, version))
        return next(message for message in self.said(actions, worker) if isinstance(message, msg.Ack))

    def pass_time(self, seconds: float) -> list[ev.Action]:
        self.now += seconds
        return self.do(ev.Tick())

    def restarted(self) -> Desk:
        ledger = Ledger(OPTIONS, self.ledger.epoch + 1)
        ledger.restore(ev.Snapshot(list(self.rows.values()), 0, self.ledger.counters), self.now)
        other = Desk(ledger)
        other.now, other.rows = self.now, self.rows
        return other

    def count(self, name: str) -> int:
        return self.ledger.counters[name]

    def stage_of(self, task_id: str = "t1") -> str:
        return self.ledger.tasks.live[task_id].stage


@pytest.fixture
def desk() -> Desk:
    return Desk()


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


# ── leasing ───────────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── losses ────────────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── restarts ──────────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── workers that come back, and the end ───────────────────────────────────────────────────────────────────────────


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
