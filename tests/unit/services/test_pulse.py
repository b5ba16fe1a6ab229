"""When a nanny takes its child to be wedged: with a clock that the test turns, and processor time that it invents."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from services.runtime import pulse as module
from services.runtime.pulse import PULSE, STARTING_S, STUCK_S, Pulse

LIMIT_S = 10.0


class Nanny:
    """Looks once a second at a child whose processor time the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ticks = 0.0, 0
        monkeypatch.setattr(module, "cpu_ticks", lambda pid: self.ticks)
        self.pulse = Pulse(lambda: self.now, LIMIT_S)

    def looks(self, seconds: float, *, computing: bool = False, beat: bytes = b"") -> str:
        """What it says last, of looks over so much time."""
        said = ""
        for _ in range(int(seconds)):
            self.now += 1
            self.ticks += computing
            if beat:
                os.write(self.pulse.writer, beat)
            said = self.pulse.look(1)
        return said


@pytest.fixture
def nanny(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nanny]:
    made = Nanny(monkeypatch)
    with made.pulse:
        yield made


def test_a_child_that_served_and_is_silent_and_idle_must_go(nanny: Nanny) -> None:
    assert nanny.looks(5, beat=b"!") == ""
    assert nanny.looks(LIMIT_S) == ""
    assert nanny.looks(2).startswith("no sign of life for 1")


def test_one_that_beats_may_idle_for_ever(nanny: Nanny) -> None:
    assert nanny.looks(10 * STUCK_S, beat=b"!") == ""


def test_one_that_computes_may_be_silent_for_long_but_not_for_ever(nanny: Nanny) -> None:
    nanny.looks(1, beat=b"!")
    assert nanny.looks(STUCK_S - 1, computing=True) == ""
    assert nanny.looks(2, computing=True).startswith("its loop has not turned")


def test_one_that_has_not_served_yet_may_wait_longer(nanny: Nanny) -> None:
    nanny.looks(1, beat=b".")
    assert nanny.looks(STARTING_S - 2) == ""
    assert nanny.looks(4) != ""


CHILD = """
import asyncio
from services.runtime.pulse import begin_pulse, serving
begin_pulse(asyncio.new_event_loop())  # it never turns: nothing is written but at once
print("starts", flush=True)
input()
serving()
print("serves", flush=True)
"""


def test_a_child_that_stands_still_right_after_it_began_to_serve_is_not_taken_for_one_that_starts(
    nanny: Nanny,
) -> None:
    writer, pipe = nanny.pulse.writer, subprocess.PIPE
    environment = {**os.environ, PULSE: str(writer)}
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, env=environment, pass_fds=[writer], stdin=pipe, stdout=pipe) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"starts\n"
        assert nanny.looks(STARTING_S / 2) == ""
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"serves\n"
    assert nanny.looks(LIMIT_S) == ""
    assert nanny.looks(2).startswith("no sign of life")


def test_time_in_which_the_nanny_itself_stood_still_does_not_count(nanny: Nanny) -> None:
    nanny.looks(5, beat=b"!")
    nanny.now += 10 * STUCK_S
    assert nanny.looks(3) == ""


def test_a_limit_of_zero_lets_a_debugger_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Nanny(monkeypatch)
    with Pulse(lambda: made.now, 0.0) as made.pulse:
        assert made.looks(10 * STUCK_S) == ""
