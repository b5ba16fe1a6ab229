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


def test_only_the_newest_groups_of_a_bench_are_remembered() -> None:
    affinity = Affinity()
    for number in range(100):
        affinity.served("b1", f"g{number}")
    newest, forgotten = f"g{100 - KEPT}", f"g{99 - KEPT}"
    assert affinity.choose(task(forgotten, 0), [task(newest, 1)], "b1").group_id == newest
    assert affinity.choose(task(newest, 0), [task(forgotten, 1)], "b2").group_id == forgotten, "it is nobody's now"


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


def chances(desk: Desk, given: dict[str, float], group: str = "g0") -> None:
    """Each is built by a farm, which foretells this of it, and waits for a bench."""
    for name in given:
        desk.submit(name, "compile", group)
    held = desk.tasks(desk.hello("farm", len(given)), "farm")
    for one in held:
        desk.hear("farm", msg.Result(one.task_id, one.lease_id, "bench", chance=given[one.task_id]))


def order_of(desk: Desk, count: int) -> list[str]:
    """In which one bench judges them."""
    (one,) = desk.tasks(desk.hello("b1", 1, "bench"), "b1")
    order = [one.task_id]
    while len(order) < count:
        (one,) = desk.tasks(desk.hear("b1", msg.Result(one.task_id, one.lease_id, "")), "b1")
        order.append(one.task_id)
    return order


def test_likely_ones_go_first_only_where_it_is_asked_for() -> None:
    given = {"a": 0.1, "b": 0.9, "c": 0.5, "d": 0.9}
    for likely_first, expected in ((True, "bdca"), (False, "abcd")):
        desk = Desk(Ledger(LedgerOptions(likely_first=likely_first)))
        chances(desk, given)
        assert "".join(order_of(desk, 4)) == expected


@pytest.mark.parametrize("chance", [float("nan"), float("inf"), -1.0, 2.0])
def test_a_chance_that_is_none_counts_as_unknown(chance: float) -> None:
    desk = Desk(Ledger(LedgerOptions(likely_first=True)))
    chances(desk, {"a": chance, "b": 0.1, "c": chance})
    assert order_of(desk, 3) == ["b", "a", "c"]


def test_the_unlikely_wait_for_a_bounded_number_of_younger_ones() -> None:
    """The worst that can be: a likely one comes for each that is judged."""
    affinity = Affinity()
    affinity.served("b1", "g")
    waiting = [task("g", number) for number in range(5)]
    younger: Counter[int] = Counter()
    judged = 0
    for number in range(5, 200):
        waiting.append(task("g", number))
        waiting[-1].chance = 0.9
        chosen = affinity.choose(waiting[0], waiting[1:], "b1", True)
        waiting.remove(chosen)
        judged += chosen.order < 5
        for one in waiting:
            younger[one.order] += chosen.order > one.order
    assert judged == 5, "the unlikely ones, too"
    assert max(younger.values()) == PATIENCE


def test_a_reference_counts_more_than_a_chance() -> None:
    affinity = Affinity()
    affinity.served("b1", "mine")
    mine, other = task("mine", 1), task("other", 0)
    other.chance = 0.9
    assert affinity.choose(other, [mine], "b1", True) is mine
