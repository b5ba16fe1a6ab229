"""Turns on a device: several stand for processes, because a lock belongs to who opened the file."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kbrl_async.kernels.timing import turns
from kbrl_async.kernels.timing.turns import DeviceTurns

PATIENCE_S = 60.0


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[DeviceTurns, DeviceTurns]]:
    with (
        contextlib.closing(DeviceTurns(tmp_path / "gpu0")) as one,
        contextlib.closing(DeviceTurns(tmp_path / "gpu0")) as other,
    ):
        yield one, other


def test_many_work_at_once(two: tuple[DeviceTurns, DeviceTurns]) -> None:
    one, other = two
    with one.working(), other.working():
        one.breathe()
        assert not other.is_wanted


def test_whoever_times_waits_for_the_end_of_a_step_and_is_alone(two: tuple[DeviceTurns, DeviceTurns]) -> None:
    one, other = two
    seen: list[str] = []
    with one.working():
        timing = threading.Thread(target=lambda: _time(other, seen))
        timing.start()
        _until(lambda: one.is_wanted)
        seen.append("a step ends")
        one.breathe()
        seen.append("the next one begins")
        timing.join()
    assert seen == ["a step ends", "alone", "no more", "the next one begins"]


def _time(turns: DeviceTurns, seen: list[str], for_s: float = 0.05) -> None:
    with turns.working(), turns.alone():
        seen.append("alone")
        time.sleep(for_s)
        seen.append("no more")


class Child:
    """Says what was asked of it."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def freeze(self) -> bool:
        self.seen.append("frozen")
        return True

    def thaw(self) -> None:
        self.seen.append("thawed")


def test_who_waits_for_a_child_lets_another_time_and_the_child_stands_still(
    two: tuple[DeviceTurns, DeviceTurns], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    seen: list[str] = []
    ours, theirs = socket.socketpair()
    now = [0.0]
    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def answer() -> None:
        with other.working(), other.alone():
            seen.append("alone")
            now[0] += 1000.0
            seen.append("no more")
        time.sleep(0.05)
        theirs.send(b"done")

    with ours, theirs, one.working():
        timing = threading.Thread(target=answer)
        timing.start()
        assert DeviceTurns.answers(ours, 30.0, Child(seen)), "its time stands still, too"
        timing.join()
    assert seen == ["frozen", "alone", "no more", "thawed"]


def test_a_child_that_is_silent_is_waited_for_as_long_as_was_said(two: tuple[DeviceTurns, DeviceTurns]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        begun = time.monotonic()
        assert not DeviceTurns.answers(ours, 0.05, None)
        with two[0].working():
            assert not DeviceTurns.answers(ours, 0.05, None)
        assert 0.1 <= time.monotonic() - begun < PATIENCE_S


def _until(is_true: object) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_true():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.001)


def test_two_who_time_are_alone_one_after_the_other(two: tuple[DeviceTurns, DeviceTurns]) -> None:
    inside, most = [0], [0]

    def run(turns: DeviceTurns) -> None:
        for _ in range(20):
            with turns.working():
                turns.breathe()
                with turns.alone():
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    time.sleep(0.001)
                    inside[0] -= 1

    threads = [threading.Thread(target=run, args=(turns,)) for turns in two]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert most == [1]


def test_what_a_killed_process_held_is_free(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with DeviceTurns(tmp_path / "gpu0").alone():
            (tmp_path / "in").touch()
            time.sleep(60)
    _until((tmp_path / "in").exists)
    with contextlib.closing(DeviceTurns(tmp_path / "gpu0")) as turns:
        assert turns.is_wanted
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with turns.working():
            assert not turns.is_wanted
