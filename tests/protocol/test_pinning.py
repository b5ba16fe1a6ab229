"""A group's timings come from one kind of hardware, or it says that they can't."""

from __future__ import annotations

import msgspec

from protocols import events as ev
from protocols import messages as msg
from protocols.ledger import Ledger, LedgerOptions
from protocols.messages import HARDWARE

WAIT_S = LedgerOptions().hardware_wait_s


class Site:
    def __init__(self) -> None:
        self.ledger = Ledger()
        self.now = 0.0

    def submit(self, *task_ids: str, group: str = "g1") -> None:
        for task_id in task_ids:
            self.ledger.handle(ev.FromProducer(b"p", msg.Submit(task_id, "bench", group)), self.now)

    def joins(self, name: str, hardware: str, slots: int = 1) -> None:
        caps = {HARDWARE: hardware} if hardware else {}
        self.hears(name, msg.Hello(name, "a", ["bench"], slots, [], caps))

    def hears(self, name: str, message: msg.Message) -> list[ev.Action]:
        return self.ledger.handle(ev.FromWorker(name.encode(), message), self.now)

    def leases(self, name: str) -> list[str]:
        return sorted(lease.task.task_id for lease in self.ledger.pool.by_id[name].leases.values())

    def finishes(self, name: str, task_id: str) -> None:
        lease = self.ledger.tasks.live[task_id].lease
        assert lease is not None
        self.hears(name, msg.Result(task_id, lease.lease_id, "score"))

    def passes(self, seconds: float, *alive: str) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            for name in alive:
                held = list(self.ledger.pool.by_id[name].leases)
                self.hears(name, msg.Beat(self.ledger.pool.by_id[name].slots, held))
            self.ledger.handle(ev.Tick(), self.now)

    def stage(self, task_id: str) -> str:
        return self.ledger.tasks.live[task_id].stage


def test_a_group_stays_with_the_hardware_of_its_first_lease() -> None:
    site = Site()
    site.joins("h100", "H100")
    site.joins("l4", "L4", slots=4)
    site.submit("t1", "t2", "t3")
    assert site.leases("h100") == ["t1"]
    assert site.leases("l4") == []
    site.finishes("h100", "t1")
    assert site.leases("h100") == ["t2"]


def test_tasks_that_waited_before_the_first_lease_follow_it_in_their_order() -> None:
    site = Site()
    site.submit("a1", "b1", group="g1")
    site.submit("c1", group="g2")
    site.joins("h100", "H100")
    site.joins("l4", "L4", slots=4)
    assert (site.leases("h100"), site.leases("l4")) == (["a1"], ["c1"])
    site.finishes("h100", "a1")
    assert site.leases("h100") == ["b1"]


def test_groups_of_different_hardware_do_not_hold_each_other_up() -> None:
    site = Site()
    site.joins("h100", "H100")
    site.submit("a1", "a2", "a3", group="g1")
    site.submit("b1", group="g2")
    site.joins("l4", "L4")
    assert site.leases("l4") == ["b1"]


def test_a_bench_that_declares_nothing_gets_no_pinned_task_and_pins_none() -> None:
    site = Site()
    site.joins("h100", "H100")
    site.submit("a1", "a2", group="g1")
    site.joins("old", "", slots=4)
    site.submit("b1", group="g2")
    assert site.leases("old") == ["b1"]
    assert site.ledger.tasks.pins.of("g2") == ""


def test_tasks_without_a_group_are_not_pinned() -> None:
    site = Site()
    site.joins("h100", "H100")
    site.joins("l4", "L4")
    site.submit("a", "b", group="")
    assert site.leases("h100") + site.leases("l4") == ["a", "b"]


def test_a_group_that_was_timed_ends_declared_when_its_hardware_is_gone() -> None:
    site = Site()
    site.joins("h100", "H100")
    site.joins("l4", "L4")
    site.submit("t1", "t2")
    site.finishes("h100", "t1")
    site.hears("h100", msg.Bye())
    site.passes(WAIT_S - 2, "l4")
    assert site.stage("t2") == "bench"
    assert ("bench", " on H100") in site.ledger.unserved
    site.passes(4, "l4")
    assert site.stage("t2") == "score"
    assert site.ledger.tasks.live["t2"].status == msg.Status.NO_WORKER


def test_a_group_that_was_not_timed_yet_starts_anew_on_other_hardware() -> None:
    site = Site()
    site.joins("h100", "H100")
    site.joins("l4", "L4", slots=2)
    site.submit("t1", "t2")
    site.hears("h100", msg.Bye())
    site.passes(WAIT_S + 2, "l4")
    assert site.leases("l4") == ["t1", "t2"]


def test_a_late_result_of_other_hardware_is_not_needed() -> None:
    site = Site()
    site.joins("h100", "H100")
    site.joins("l4", "L4", slots=2)
    site.submit("t1")
    lease = site.ledger.tasks.live["t1"].lease
    assert lease is not None
    late = msg.Result("t1", lease.lease_id, "score")
    site.hears("h100", msg.Bye())
    site.passes(WAIT_S + 2, "l4")
    site.joins("h100", "H100")
    (ack,) = [a.message for a in site.hears("h100", late) if isinstance(a, ev.ToWorker)]
    assert isinstance(ack, msg.Ack)
    assert not ack.accepted
    assert "other hardware" in ack.reason


def test_a_timed_task_is_scored_by_whoever_scores() -> None:
    site = Site()
    site.joins("h100", "H100")
    site.submit("t1")
    site.finishes("h100", "t1")
    site.hears("agg", msg.Hello("agg", "a", ["score"], 1))
    assert site.leases("agg") == ["t1"]


def test_pins_survive_a_restart_of_the_broker() -> None:
    site = Site()
    site.joins("h100", "H100")
    site.submit("t1", "t2")
    rows = [msgspec.structs.replace(task.row(), leased=False) for task in site.ledger.tasks]
    site.ledger = Ledger(epoch=2)
    site.ledger.restore(ev.Snapshot(rows), 0.0)
    site.joins("l4", "L4", slots=4)
    assert site.leases("l4") == []


def test_a_retired_group_leaves_no_pin() -> None:
    site = Site()
    site.joins("h100", "H100")
    site.submit("t1")
    site.ledger.handle(ev.FromProducer(b"p", msg.Retire("g1")), 1.0)
    assert len(site.ledger.tasks.pins) == 0


def test_a_timing_is_scored_by_a_process_that_has_no_hardware() -> None:
    site = Site()
    site.joins("h100", "H100")
    site.hears("aggregator", msg.Hello("aggregator", "a", ["score"], 4))
    site.submit("t1")
    site.finishes("h100", "t1")
    assert site.leases("aggregator") == ["t1"]
