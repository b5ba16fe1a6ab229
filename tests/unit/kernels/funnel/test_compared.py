"""Baselines besides eager in a run's bench: the report gets them, and the bench shows life while it compiles."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kbrl_async.kernels.funnel import compared
from kbrl_async.kernels.funnel.compared import Compared, ticking
from protocols.records import BenchReport, Fault, Problem, Timing, Verdict
from tests.records import timing

PROBLEM = Problem("L1/1_a", 1, "1_a", "")
RIGHT = BenchReport(Verdict(Fault.OK), timing(2.0))


class Fake:
    def __init__(self, _bench: Any) -> None:
        self.closed = False

    def beside(self, _problem: Problem, timing: Timing, names: tuple[str, ...]) -> tuple[Timing, dict[str, str]]:
        return msgspec.structs.replace(timing, baselines=dict.fromkeys(names, (1.1, 1.0, 1.2))), {}

    def close(self) -> None:
        self.closed = True


def made(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> Compared:
    monkeypatch.setattr(compared, "Baselines", Fake)
    return Compared(SimpleNamespace(), names)  # type: ignore[arg-type]


def test_a_correct_kernel_gets_its_speedups_over_the_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    report = made(monkeypatch, ["compile"]).add(PROBLEM, RIGHT, lambda: None)
    assert report.timing is not None
    assert report.timing.baselines == {"compile": (1.1, 1.0, 1.2)}


def test_what_was_not_timed_and_what_nobody_asked_for_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = BenchReport(Verdict(Fault.INCORRECT))
    assert made(monkeypatch, ["compile"]).add(PROBLEM, wrong, lambda: None) is wrong
    assert made(monkeypatch, []).add(PROBLEM, RIGHT, lambda: None) is RIGHT


def test_long_work_shows_life_and_stops_doing_so() -> None:
    ticked = threading.Event()
    with ticking(ticked.set, period_s=0.001):
        assert ticked.wait(30)
    assert not any(thread.name == "ticking" for thread in threading.enumerate())
