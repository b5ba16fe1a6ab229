"""The driver, with a clock that the test turns and hands that only write down what they are asked to do."""

from __future__ import annotations

import pytest

from kbrl_async.lab.chaos.driver import PATIENCE_S, START_S, STILL_S, WEDGE_S, FaultDriver
from kbrl_async.lab.chaos.faults import FaultKind, PlannedFault
from kbrl_async.lab.chaos.injuries import Absent, Wound
from protocols.messages import StatusReport, WorkerStanding


class World:
    """A run that answers, and hands that harm nobody."""

    def __init__(self, *plan: PlannedFault) -> None:
        self.now = 100.0
        self.report: StatusReport | None = StatusReport(epoch=1, counters={"results": 0})
        self.done: list[str] = []
        self.absent: set[str] = set()
        self.noticed = False
        self.workers = [WorkerStanding("learner.1", ["train"])]
        self.driver = FaultDriver(plan, self, lambda: self.report, lambda: self.now)

    def begin(self, fault: PlannedFault) -> Wound:
        if fault.target in self.absent:
            raise Absent(fault.target)
        self.done.append(f"{fault.kind} {fault.target}")
        return Wound(fault, [1])

    def end(self, wound: Wound) -> None:
        self.done.append(f"end {wound.fault.kind}")

    def is_over(self, wound: Wound) -> bool:
        return self.noticed

    def release(self, wound: Wound) -> None:
        self.done.append("release")

    def after(self, seconds: float, *, results: int = 1, epoch: int = 1, version: int = 0) -> None:
        self.now += seconds
        self.report = StatusReport(
            epoch=epoch, policy_version=version, counters={"results": results}, workers=self.workers
        )
        self.driver.step()


def test_nothing_begins_before_the_run_is_at_work() -> None:
    world = World(PlannedFault(FaultKind.KILL, "learner"))
    world.after(50, results=0)
    assert world.done == []
    world.after(1, results=1)
    assert world.done == ["kill learner"]


def test_a_fault_begins_at_its_time_and_is_undone_at_its_end() -> None:
    world = World(PlannedFault(FaultKind.STOP, "learner", at_s=5, for_s=2))
    world.after(0)
    world.after(4.9)
    assert world.done == []
    world.after(0.2)
    assert world.done == ["stop learner"]
    world.after(2.1)
    assert world.done == ["stop learner", "end stop"]
    assert world.driver.is_done


def test_a_fault_may_wait_for_an_update() -> None:
    world = World(PlannedFault(FaultKind.KILL, "sampler", after_update=2))
    world.after(0, version=1)
    assert world.done == []
    world.after(1, version=2)
    assert world.done == ["kill sampler"]


def test_a_target_that_is_not_there_is_waited_for_and_then_reported() -> None:
    world = World(PlannedFault(FaultKind.KILL, "candidate"))
    world.absent = {"candidate"}
    world.after(0)
    world.after(PATIENCE_S - 1)
    assert not world.driver.happened[0].failed
    world.after(2)
    assert world.driver.happened[0].failed == "its target was never there"
    assert not world.driver.happened[0].done


def test_the_broker_is_back_with_its_next_result_not_with_its_first_answer() -> None:
    world = World(PlannedFault(FaultKind.KILL, "broker"))
    world.after(0, results=10)
    world.report = None
    world.now += 0.5
    world.driver.step()
    world.after(0.5, results=11, epoch=2)
    assert (world.driver.happened[0].answered_s, world.driver.happened[0].working_s) == (1.0, None)
    world.after(0.75, results=12, epoch=2)
    assert world.driver.happened[0].working_s == 1.75


def test_a_broker_is_under_load_where_results_came_until_it_was_killed() -> None:
    steady, stood_still = (
        World(PlannedFault(FaultKind.KILL, "broker", at_s=6)),
        World(PlannedFault(FaultKind.KILL, "broker", at_s=6)),
    )
    for world in (steady, stood_still):
        world.after(0)
        for tenth in range(1, 61):
            world.after(0.1, results=min(tenth, 60 if world is steady else 40))
        world.after(0.1, results=61 if world is steady else 40)
        assert world.done == ["kill broker"]
    assert steady.driver.happened[0].under_load
    assert not stood_still.driver.happened[0].under_load
    assert stood_still.driver.happened[0].pause_s == pytest.approx(2.1, abs=0.11)


def test_a_report_of_the_dead_broker_is_no_recovery() -> None:
    world = World(PlannedFault(FaultKind.KILL, "broker"))
    world.after(0, results=10)
    world.after(0.1, results=20, epoch=1)
    assert world.driver.happened[0].answered_s is None
    assert not world.driver.is_done


def test_one_death_of_the_broker_is_measured_at_a_time() -> None:
    world = World(PlannedFault(FaultKind.KILL, "broker"), PlannedFault(FaultKind.KILL, "broker"))
    world.after(0, results=10)
    assert world.done == ["kill broker"]
    world.after(1, results=11, epoch=2)
    world.after(1, results=12, epoch=2)
    assert world.done == ["kill broker", "kill broker"]


def test_a_wedge_is_over_when_somebody_has_replaced_the_process() -> None:
    world = World(PlannedFault(FaultKind.WEDGE, "learner", for_s=1))
    world.after(0)
    world.after(20)
    assert not world.driver.is_done
    world.noticed = True
    world.after(1)
    assert world.driver.happened[0].done
    assert world.driver.is_done


def test_a_process_that_only_starts_is_not_wedged_yet() -> None:
    world = World(PlannedFault(FaultKind.WEDGE, "learner", for_s=1))
    world.workers, serving = [], world.workers
    world.after(0)
    assert world.done == []
    world.workers = serving
    world.after(1)
    assert world.done == ["wedge learner"]


def test_a_wedge_that_nobody_notices_is_a_failure_and_is_let_go() -> None:
    world = World(PlannedFault(FaultKind.WEDGE, "learner", for_s=1))
    world.after(0)
    world.after(WEDGE_S + 1)
    assert "nobody replaced it" in world.driver.happened[0].failed
    assert world.done[-1] == "release"


def test_at_the_end_everything_open_is_undone_and_what_never_began_is_said() -> None:
    world = World(
        PlannedFault(FaultKind.PARTITION, "learner", for_s=60), PlannedFault(FaultKind.KILL, "broker", at_s=500)
    )
    world.after(0)
    world.driver.finish()
    assert "end partition" in world.done
    assert world.driver.happened[0].done
    assert world.driver.happened[1].failed == "the run ended before its time"


def test_a_run_in_which_nothing_moves_stands_still_and_has_longer_to_start() -> None:
    world = World()
    world.after(STILL_S + 1, results=0)
    assert not world.driver.stands_still
    world.after(1, results=1)
    world.after(STILL_S + 1, results=1)
    assert world.driver.stands_still
    world.after(1, results=2)
    assert not world.driver.stands_still
    assert START_S > STILL_S
