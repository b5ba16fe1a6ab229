"""The child that waits for its candidate, without a GPU."""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, cast
from unittest.mock import Mock

import pytest

from kbrl_async.errors import InfraError
from kbrl_async.kernels import settings as sections
from kbrl_async.kernels.sandbox import Limits
from kbrl_async.kernels.verify.cuda import device
from kbrl_async.kernels.verify.cuda.prewarmed import PrewarmedChildren
from kbrl_async.kernels.verify.options import bench_options, no_tick


class Waiting:
    """A child."""

    def __init__(self) -> None:
        self.channel, self._theirs = socket.socketpair()
        self.is_dead = self.is_closed = False

    def has_ended(self) -> bool:
        return self.is_dead

    def signal(self, number: int) -> None:
        self.is_dead = True

    def close(self) -> None:
        self.is_closed = True
        self.channel.close()
        self._theirs.close()


class Zygote:
    """Spawns until it is told to refuse."""

    def __init__(self) -> None:
        self.generation = 1
        self.children: list[Waiting] = []
        self.refuses = False

    def spawn(self, *_: Any) -> Waiting:
        if self.refuses:
            raise InfraError("no more processes")
        self.children.append(Waiting())
        return self.children[-1]


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    for child in made.children:
        child.close()


def spares(zygote: Zygote) -> PrewarmedChildren:
    return PrewarmedChildren(cast(Any, zygote), Limits(), "cuda:0")


def test_the_waiting_child_is_taken_once_and_replaced(zygote: Zygote) -> None:
    waiting = spares(zygote)
    for _ in range(2):
        waiting.refill()
    assert len(zygote.children) == 1
    assert cast(Any, waiting.take()) is zygote.children[0]
    assert cast(Any, waiting.take()) is zygote.children[1]
    waiting.refill()
    assert cast(Any, waiting.take()) is zygote.children[2]
    assert not any(child.is_closed for child in zygote.children)


@pytest.mark.parametrize("refills", [False, True])
@pytest.mark.parametrize("has_new_zygote", [False, True])
def test_the_dead_and_those_of_another_zygote_are_not_taken(
    zygote: Zygote, refills: bool, has_new_zygote: bool
) -> None:
    waiting = spares(zygote)
    waiting.refill()
    if has_new_zygote:
        zygote.generation += 1
    else:
        zygote.children[0].is_dead = True
    if refills:
        waiting.refill()
    assert cast(Any, waiting.take()) is zygote.children[1]
    assert [child.is_closed for child in zygote.children] == [True, False]


def test_who_rests_is_taken_first_and_at_most_two_rest(zygote: Zygote) -> None:
    homes = spares(zygote)
    taken = [homes.take() for _ in range(3)]
    for child in taken:
        homes.give(child)
    assert [child.is_dead for child in zygote.children] == [True, False, False]
    assert homes.take() is taken[2]
    assert homes.take() is taken[1]
    assert len(zygote.children) == 3
    homes.take()
    assert len(zygote.children) == 4


def test_two_may_wait_and_who_waits_for_longest_is_taken_first(zygote: Zygote) -> None:
    waiting = PrewarmedChildren(cast(Any, zygote), Limits(), "cuda:0", count=2)
    waiting.refill()
    first = waiting.take()
    waiting.refill()
    assert cast(Any, first) is zygote.children[0]
    assert cast(Any, waiting.take()) is zygote.children[1]
    assert len(zygote.children) == 3


def test_who_died_while_it_rested_serves_nobody(zygote: Zygote) -> None:
    homes = spares(zygote)
    homes.give(homes.take())
    zygote.children[0].is_dead = True
    assert cast(Any, homes.take()) is zygote.children[1]
    homes.give(cast(Any, zygote.children[1]))
    homes.close()
    assert zygote.children[1].is_closed


def test_a_zygote_that_refuses_is_met_when_a_child_is_needed(zygote: Zygote) -> None:
    waiting = spares(zygote)
    zygote.refuses = True
    waiting.refill()
    with pytest.raises(InfraError):
        waiting.take()


def test_settling_waits_for_the_context(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = spares(zygote)
    waiting.refill()
    seen: list[Any] = []
    monkeypatch.setattr("select.select", lambda channels, *_: seen.extend(channels))
    waiting.settle()
    assert seen == [zygote.children[0].channel]


def test_memory_of_who_rests_is_waited_for_once_and_nobody_who_starts(
    zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes, seen = spares(zygote), list[Any]()
    monkeypatch.setattr("select.select", lambda channels, *_: seen.extend(channels))
    rests = homes.take()
    homes.refill()
    homes.give(rests)
    for _ in range(2):
        homes.clear()
        assert seen == [rests.channel]
    homes.give(homes.take())
    homes.take()
    homes.clear()
    assert seen == [rests.channel], "whoever took it waits for its answer"


def test_closing_ends_the_waiting_child(zygote: Zygote) -> None:
    waiting = spares(zygote)
    waiting.refill()
    waiting.close()
    assert zygote.children[0].is_closed


def made_beside(monkeypatch: pytest.MonkeyPatch, sizes: list[int], references: int, room: float = 0.0) -> Any:
    """The device, what it keeps, and all that it kept before, after another reference of the first one's size."""
    options = bench_options(sections.TimingBench(), "cuda:0", references=references)
    families = OrderedDict[str, Any]((str(place), Mock(device_bytes=size)) for place, size in enumerate(sizes))
    before = list(families.values())
    monkeypatch.setattr(device, "make_room", Mock())
    monkeypatch.setattr(device, "CudaReference", Mock(return_value=Mock(device_bytes=sizes[0] if sizes else 0)))
    monkeypatch.setattr(device, "room_kept", lambda options: room)
    made = device.CudaDevice("cuda:0")
    made.homes, made.spares, made.replays = (cast(Any, Mock()) for _ in range(3))
    made.reference(cast(Any, None), cast(Any, None), options, cast(Any, None), families, no_tick)
    return made, list(families.values()), before


@pytest.mark.parametrize(("kept", "started"), [(0, 2), (1, 1), (2, 1)])
def test_no_home_is_started_where_one_comes_free(monkeypatch: pytest.MonkeyPatch, kept: int, started: int) -> None:
    """Whoever makes room for the next one does so before that is made, and leaves it its process."""
    made, left, before = made_beside(monkeypatch, [0] * kept, references=2)
    assert made.homes.refill.call_count == started
    assert left == before[-1:]
    assert [one.retire.called for one in before] == [False] * kept if kept < 2 else [True, False]


@pytest.mark.parametrize(("kept", "stay", "started"), [(1, 1, 2), (2, 2, 1), (3, 2, 1)])
def test_who_has_to_go_for_want_of_room_goes_before_and_leaves_its_process(
    monkeypatch: pytest.MonkeyPatch, kept: int, stay: int, started: int
) -> None:
    made, left, before = made_beside(monkeypatch, [5] * kept, references=8, room=17.0)
    assert (left, made.homes.refill.call_count) == (before[-stay:], started)
    assert [one.retire.called for one in before] == [one not in left for one in before]
