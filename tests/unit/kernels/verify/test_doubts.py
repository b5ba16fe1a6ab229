"""Who is asked again about a verdict that an earlier candidate may have made; the judges are stand-ins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kbrl_async.kernels.verify import doubts
from protocols.records import Fault, Verdict

WRONG, RIGHT = Fault.INCORRECT, Fault.OK


class Device:
    """`says`: what a second process, or a fresh one, writes down is the same."""

    def __init__(self, says: bool) -> None:
        self.says, self.asked, self.is_elsewhere, self.contradicted = says, list[bool](), False, 0

    def is_repeated(self, is_right: bool, is_alone: bool) -> bool:
        self.asked.append(is_alone)
        return self.says

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        self.is_elsewhere = True
        yield
        self.is_elsewhere = False

    def contradict(self, is_right: bool) -> None:
        self.contradicted += 1


def settled(device: Device, found: dict[str, Fault], share: float, drawn: float) -> tuple[Fault, list[str]]:
    """The verdict, and who judged: `found` is what the first, the second and a fresh process would say."""
    judges = list[str]()
    checker = SimpleNamespace(is_shared=True, is_in_doubt=lambda fault: fault is not Fault.OK)

    def judged(is_alone: bool) -> tuple[Any, Verdict, None]:
        judges.append("fresh" if is_alone else "second" if device.is_elsewhere else "first")
        return checker, Verdict(found[judges[-1]]), None

    verdict, _ = doubts.settled(judged, device.is_repeated, cast(Any, device), share, lambda: drawn)
    return verdict.fault, judges


@pytest.mark.parametrize(("drawn", "asks_alone"), [(0.9, False), (0.1, True)])
def test_the_same_work_written_down_again_is_not_done_again(drawn: float, asks_alone: bool) -> None:
    device = Device(says=True)
    assert settled(device, {"first": WRONG}, 0.125, drawn) == (WRONG, ["first"])
    assert device.asked == [asks_alone]


@pytest.mark.parametrize("share", [0.125, 1.0])
def test_a_right_one_that_is_drawn_is_compared_with_a_fresh_process(share: float) -> None:
    """Who spoils both that serve others could make what comes after slower, with both writing down the same."""
    device = Device(says=False)
    assert settled(device, {"first": RIGHT, "fresh": RIGHT}, share, 0.1) == (RIGHT, ["first", "fresh"])
    assert device.asked == [True]
    device = Device(says=True)
    assert settled(device, {"first": RIGHT}, 0.125, 0.9) == (RIGHT, ["first"])
    assert device.asked == []


def test_what_a_second_process_finds_too_holds() -> None:
    device = Device(says=False)
    assert settled(device, {"first": WRONG, "second": WRONG}, 0.125, 0.9) == (WRONG, ["first", "second"])
    found = settled(device, {"first": WRONG, "second": RIGHT, "fresh": RIGHT}, 0.125, 0.9)
    assert found == (RIGHT, ["first", "second", "fresh"])
    assert device.contradicted == 1, "who was spoilt is found out"


def test_a_fresh_process_that_writes_something_else_is_believed() -> None:
    device = Device(says=False)
    assert settled(device, {"first": WRONG, "fresh": RIGHT}, 0.125, 0.1) == (RIGHT, ["first", "fresh"])
    assert device.contradicted == 1


def test_where_all_doubts_are_decided_alone_nobody_else_is_asked() -> None:
    device = Device(says=True)
    assert settled(device, {"first": WRONG, "fresh": WRONG}, 1.0, 0.5) == (WRONG, ["first", "fresh"])
    assert device.asked == []
