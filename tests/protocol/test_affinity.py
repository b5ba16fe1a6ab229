"""Tasks of a group go to the bench that has its reference, as long as nobody waits for it."""

from __future__ import annotations

from collections import Counter

import pytest

from protocols import events as ev
from protocols import messages as msg
from protocols.affinity import KEPT, PATIENCE, Affinity
from protocols.leases import LiveTask
from protocols.ledger import Ledger, LedgerOptions
from protocols.messages import HARDWARE
from tests.protocol.desk import Desk

GROUPS, SIZE = 6, 8


def task(group: str, number: int) -> LiveTask:
    return LiveTask(number, f"{group}.r{number}", "bench", group, -1, order=number)


@pytest.fixture
def desk() -> Desk:
    return Desk(Ledger(LedgerOptions()))


def submit_groups(desk: Desk, count: int = GROUPS) -> None:
    for group in range(count):
        for number in range(SIZE):
            desk.submit(f"g{group}.r{number}", "bench", f"g{group}")


def play(desk: Desk, benches: list[str], slots: int = 2) -> dict[str, Counter[str]]:
    """Benches that end their tasks in turn: how many of each group each one got."""
    held: dict[str, list[msg.Task]] = {bench: [] for bench in benches}
    got: dict[str, Counter[str]] = {bench: Counter() for bench in benches}

    def take(actions: list[ev.Action]) -> None:
        for bench in benches:
            for one in desk.tasks(actions, bench):
                held[bench].append(one)
                got[bench][one.group_id] += 1

    for bench in benches:
        take(desk.hello(bench, slots, "bench"))
    while any(held.values()):
        for bench in benches:
            if held[bench]:
                done = held[bench].pop(0)
                take(desk.hear(bench, msg.Result(done.task_id, done.lease_id, "")))
    return got


def test_each_group_stays_at_one_bench_but_for_the_last(desk: Desk) -> None:
    submit_groups(desk)
    got = play(desk, ["b1", "b2", "b3"])
    assert sum(sum(counts.values()) for counts in got.values()) == GROUPS * SIZE
    references = sum(len(counts) for counts in got.values())
    assert references <= GROUPS + 3, "in order of age alone it would be three each"
    assert max(sum(counts.values()) for counts in got.values()) <= GROUPS * SIZE / 3 + SIZE


def test_benches_without_a_group_of_their_own_help_with_those_of_others(desk: Desk) -> None:
    submit_groups(desk, 1)
    got = play(desk, ["b1", "b2", "b3"])
    assert all(counts["g0"] >= 2 for counts in got.values())


def test_one_bench_gets_everything_in_order(desk: Desk) -> None:
    submit_groups(desk, 3)
    taken = desk.tasks(desk.hello("b1", 24, "bench"), "b1")
    assert [one.task_id for one in taken] == [f"g{group}.r{number}" for group in range(3) for number in range(SIZE)]


def test_another_stage_keeps_its_order(desk: Desk) -> None:
    for number in range(4):
        desk.submit(f"g{number % 2}.r{number}", "compile", f"g{number % 2}")
    assert [desk.lease(f"w{number}").task_id for number in range(4)] == ["g0.r0", "g1.r1", "g0.r2", "g1.r3"]


def test_the_oldest_task_is_passed_over_a_bounded_number_of_times() -> None:
    affinity = Affinity()
    affinity.served("slow", "old")
    affinity.served("fast", "new")
    oldest, others = task("old", 0), [task("new", number) for number in range(1, 3)]
    chosen = [affinity.choose(oldest, others, "fast") for _ in range(PATIENCE + 1)]
    assert all(one is others[0] for one in chosen[:-1])
    assert chosen[-1] is oldest


def test_two_that_are_oldest_in_turn_are_each_passed_over_a_bounded_number_of_times() -> None:
    affinity = Affinity()
    affinity.served("slow", "old")
    affinity.served("fast", "new")
    heads, others = [task("old", 0), task("old", 1)], [task("new", 2)]
    for _ in range(PATIENCE):
        assert all(affinity.choose(head, others, "fast") is others[0] for head in heads)
    assert [affinity.choose(head, others, "fast") for head in heads] == heads


def test_groups_of_a_bench_that_is_gone_are_free_again() -> None:
    affinity = Affinity()
    affinity.served("b1", "g1")
    assert affinity.choose(task("g1", 0), [task("g2", 1)], "b2").group_id == "g2"
    affinity.gone("b1")
    assert affinity.choose(task("g1", 0), [task("g2", 1)], "b2").group_id == "g1"
    assert not affinity._homes


def test_only_the_newest_groups_of_a_bench_are_remembered() -> None:
    affinity = Affinity()
    for number in range(100):
        affinity.served("b1", f"g{number}")
    assert list(affinity._groups["b1"]) == [f"g{number}" for number in range(100 - KEPT, 100)]
    assert set(affinity._homes) == set(affinity._groups["b1"])


def test_a_bench_that_refused_a_task_does_not_get_it_for_its_group(desk: Desk) -> None:
    submit_groups(desk, 2)
    first = desk.lease("b1", "bench")
    desk.lease("b2", "bench")
    given = desk.tasks(desk.hear("b1", msg.Nack(first.lease_id, "no")), "b1")
    assert given[0].task_id != first.task_id
    assert given[0].group_id == first.group_id


def test_a_group_pinned_to_other_hardware_is_nobodys_choice_there(desk: Desk) -> None:
    submit_groups(desk, 2)
    hopper = msg.Hello("b1", "a", ["bench"], 1, [], {HARDWARE: "h200"})
    ampere = msg.Hello("b2", "a", ["bench"], 16, [], {HARDWARE: "a100"})
    (held,) = desk.tasks(desk.hear("b1", hopper), "b1")
    others = desk.tasks(desk.hear("b2", ampere), "b2")
    assert {one.group_id for one in others} == {"g1"} != {held.group_id}
