"""Plans: equal seeds give equal plans, no nanny is driven to give up, and a file says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.errors import UserError
from kbrl_async.lab.chaos.faults import (
    CRASH_WINDOW_S,
    DISK,
    LASTS,
    MOST_CRASHES,
    SERVICES,
    TARGETS,
    FaultKind,
    PlannedFault,
    RandomOptions,
    checked,
    random_plan,
    read_plan,
)

TOML = """
[[fault]]
at_s = 5
kind = "kill"
target = "broker"

[[fault]]
after_update = 2
kind = "partition"
target = "compile_farm.2"
for_s = 4
"""


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    options = RandomOptions(60, 7, may_end_run=True)
    assert random_plan(options) == random_plan(options)
    assert random_plan(options) != random_plan(RandomOptions(60, 8, may_end_run=True))


def test_a_plan_has_its_count_in_ascending_time_and_only_what_can_be_done() -> None:
    plan = random_plan(RandomOptions(200, 1, may_end_run=True))
    assert len(plan) == 200
    assert [fault.at_s for fault in plan] == sorted(fault.at_s for fault in plan)
    assert [checked(fault) for fault in plan] == plan
    assert {fault.kind for fault in plan} == set(FaultKind)
    assert all((fault.for_s > 0) == (fault.kind in LASTS) for fault in plan)


def test_no_service_crashes_so_often_that_its_nanny_gives_it_up() -> None:
    plan = random_plan(RandomOptions(300, 3, every_s=0.5, may_end_run=True))
    for fault in plan:
        near = [f for f in plan if 0 <= fault.at_s - f.at_s < CRASH_WINDOW_S]
        for service in SERVICES:
            assert sum(f.crashes == service for f in near) <= MOST_CRASHES
        assert sum(f.ends_run for f in near) <= 1


def test_a_run_that_nobody_continues_keeps_its_nannies() -> None:
    assert not any(fault.ends_run for fault in random_plan(RandomOptions(300, 3)))


def test_a_random_plan_never_fills_a_disk_of_others() -> None:
    assert DISK in TARGETS[FaultKind.DISK_FULL]
    assert all(fault.target != DISK for fault in random_plan(RandomOptions(300, 5, may_end_run=True)))


@pytest.mark.parametrize("name", ["plan.toml", "plan.yaml"])
def test_a_file_is_read_in_its_order(tmp_path: Path, name: str) -> None:
    text = (
        TOML
        if name.endswith("toml")
        else "fault:\n- {at_s: 5, kind: kill, target: broker}\n"
        + ("- {after_update: 2, kind: partition, target: compile_farm.2, for_s: 4}\n")
    )
    (tmp_path / name).write_text(text)
    assert read_plan(tmp_path / name) == [
        PlannedFault(FaultKind.KILL, "broker", at_s=5),
        PlannedFault(FaultKind.PARTITION, "compile_farm.2", after_update=2, for_s=4),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[fault]]\nkind = "melt"\ntarget = "broker"', "melt"),
        ('[[fault]]\nkind = "kill"\ntarget = "brokker"', "can't be done to 'brokker'"),
        ('[[fault]]\nkind = "partition"\ntarget = "broker"\nfor_s = 3', "can't be done to 'broker'"),
        ('[[fault]]\nkind = "stop"\ntarget = "broker"', "has no length"),
        ('[[fault]]\nkind = "kill"\ntarget = "broker"\nat_s = -1', "below 0"),
        ('[[fault]]\nkind = "kill"\ntarget = "broker"\nwhen = 1', "when"),
        ("[[fault", "is no plan"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(UserError, match=words):
        read_plan(tmp_path / "plan.toml")
