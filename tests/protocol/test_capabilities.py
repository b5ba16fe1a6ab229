"""Who is offered what: needs of tasks, backends of workers, and what becomes of a task that nobody can do."""

from __future__ import annotations

import msgspec
import pytest

from protocols import events as ev
from protocols import messages as msg
from protocols.ledger import Ledger, LedgerOptions, StageOptions
from protocols.messages import BACKENDS, Status
from tests.protocol.desk import Desk

OPTIONS = LedgerOptions(heartbeat_s=1.0, no_worker_s=20.0, compile=StageOptions(ttl_s=10.0, queue_limit=40))


@pytest.fixture
def desk() -> Desk:
    return Desk(Ledger(OPTIONS))


def submit(desk: Desk, task_id: str, needs: str) -> list[ev.Action]:
    return desk.do(ev.FromProducer(b"p", msg.Submit(task_id, "compile", needs=needs)))


def hello(desk: Desk, worker: str, backends: str | None, slots: int = 1) -> list[str]:
    """Ids of the tasks that the worker is given at once."""
    caps = {} if backends is None else {BACKENDS: backends}
    actions = desk.hear(worker, msg.Hello(worker, "a", ["compile"], slots, caps=caps))
    return [task.task_id for task in desk.tasks(actions, worker)]


def test_a_task_goes_to_a_worker_that_offers_its_backend(desk: Desk) -> None:
    submit(desk, "t1", "triton")
    assert hello(desk, "w1", "c") == []
    assert hello(desk, "w2", "c, triton") == ["t1"]


def test_a_worker_that_says_nothing_of_backends_takes_anything(desk: Desk) -> None:
    submit(desk, "t1", "triton")
    assert hello(desk, "w1", None) == ["t1"]


def test_a_worker_that_can_build_nothing_gets_only_what_needs_nothing(desk: Desk) -> None:
    submit(desk, "t1", "triton")
    submit(desk, "t2", "")
    assert hello(desk, "w1", "", slots=2) == ["t2"]


def test_what_nobody_can_do_holds_nothing_else_up(desk: Desk) -> None:
    for number in range(40):
        submit(desk, f"cuda{number}", "cuda")
    submit(desk, "t1", "c")
    assert hello(desk, "w1", "c", slots=4) == ["t1"]


def test_a_queue_that_is_full_of_one_backend_takes_tasks_of_another(desk: Desk) -> None:
    for number in range(40):
        submit(desk, f"cuda{number}", "cuda")
    assert desk.replies(submit(desk, "cuda40", "cuda")) == [msg.Busy("cuda40", 0.5)]
    assert desk.replies(submit(desk, "t1", "c")) == [msg.SubmitAck("t1")]


def test_tasks_of_several_backends_go_out_in_the_order_they_came(desk: Desk) -> None:
    for task_id, needs in (("t1", "c"), ("t2", "triton"), ("t3", "c")):
        submit(desk, task_id, needs)
    assert hello(desk, "w1", "c,triton", slots=3) == ["t1", "t2", "t3"]


def test_the_need_goes_with_the_task_through_all_stages(desk: Desk) -> None:
    submit(desk, "t1", "triton")
    actions = desk.hear("w1", msg.Hello("w1", "a", ["compile"], 1))
    desk.result("w1", desk.tasks(actions, "w1")[0], next_stage="bench")
    bench = msg.Hello("b1", "a", ["bench"], 1, caps={BACKENDS: "c"})
    assert desk.tasks(desk.hear("b1", bench), "b1") == []
    assert desk.ledger.tasks.live["t1"].needs == "triton"


def test_the_need_survives_a_loss_and_a_restart_of_the_broker(desk: Desk) -> None:
    submit(desk, "t1", "triton")
    assert hello(desk, "w1", "triton") == ["t1"]
    desk.do(ev.PeerLost(b"w1"))
    assert hello(desk, "w2", "c") == []
    again = desk.restarted()
    assert hello(again, "w2", "c") == []
    assert hello(again, "w3", "triton") == ["t1"]


def test_a_journal_of_before_needs_is_read(desk: Desk) -> None:
    row = msgspec.to_builtins(ev.TaskRow(1, "t1", "compile"))
    del row["needs"]
    assert msgspec.convert(row, ev.TaskRow).needs == ""


def test_a_task_that_nobody_can_do_ends_as_no_worker_after_its_deadline(desk: Desk) -> None:
    submit(desk, "t1", "cuda")
    hello(desk, "w1", "c")
    for _ in range(19):
        desk.hear("w1", msg.Beat(1))
        desk.pass_time(1.0)
    assert desk.stage_of() == "compile"
    assert desk.ledger.stats(desk.now)["unserved"] == [{"stage": "compile", "needs": "cuda", "tasks": 1, "for_s": 18.0}]
    for _ in range(2):
        desk.hear("w1", msg.Beat(1))
        desk.pass_time(1.0)
    assert (desk.stage_of(), desk.ledger.tasks.live["t1"].status) == ("score", Status.NO_WORKER)
    assert desk.count("unserved") == 1


def test_a_task_waits_without_end_while_no_worker_of_its_stage_has_come(desk: Desk) -> None:
    submit(desk, "t1", "cuda")
    for _ in range(40):
        desk.pass_time(1.0)
    assert desk.stage_of() == "compile"


def test_a_worker_that_can_do_it_comes_in_time(desk: Desk) -> None:
    submit(desk, "t1", "cuda")
    hello(desk, "w1", "c")
    desk.pass_time(15.0)
    assert hello(desk, "w2", "cuda") == ["t1"]
    desk.pass_time(1.0)
    assert desk.ledger.unserved == {}


def test_a_refusal_goes_to_another_able_worker_and_not_to_an_unable_one(desk: Desk) -> None:
    submit(desk, "t1", "cuda")
    task = desk.tasks(desk.hear("w1", msg.Hello("w1", "a", ["compile"], 1, caps={BACKENDS: "cuda"})), "w1")[0]
    hello(desk, "w2", "c")
    actions = desk.hear("w1", msg.Nack(task.lease_id, "no space left"))
    assert desk.tasks(actions, "w2") == []
    assert [again.task_id for again in desk.tasks(actions, "w1")] == ["t1"], "nobody else can do it"
