"""The lanes of `benchmarks.verification verdicts`: what ends one is told, and a fault of the host ends none."""

from __future__ import annotations

import contextlib
import math
import multiprocessing as mp
import os
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.verification import lanes
from benchmarks.verification.lane_rows import summary
from kbrl_async.errors import InfraError
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import bench_options
from kbrl_async.kernels.verify.hoarding import NoMemory
from protocols.records import BenchReport, BuildReport, Candidate, Fault, Problem, Verdict


def _lane(folder: str, number: int) -> None:
    raise ValueError(f"no memory in {folder}")


def _killed(folder: str, number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _silent(folder: str, number: int) -> None:
    time.sleep(30)


def said(what: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(lanes, "PATIENCE_S", 20 if what is not _silent else 1)
    context = mp.get_context("fork")
    done = context.Queue()
    process = context.Process(
        target=lanes.reporting_failure, args=(done, what, ("here", 3)), name="lane 3", daemon=True
    )
    process.start()
    with pytest.raises(lanes.LaneError) as raised:
        lanes.next_said(done, [process])
    process.kill()
    process.join()
    return str(raised.value)


def test_a_lane_that_fails_is_named_with_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was "a lane has failed, or gives no verdict"."""
    text = said(_lane, monkeypatch)
    assert text.startswith("lane 3 has failed: no memory in here")
    assert "in _lane" in text


def test_one_that_is_killed_or_silent_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(_killed, monkeypatch) == "lane 3 ended with -9, and said nothing"
    assert said(_silent, monkeypatch) == "no verdict for 1 s; at work: lane 3"


PROBLEM = Problem("L1/01_x", 1, "x", "")
ASKED = lanes.Asked((1,), "cpu", (1.0,), 1, True, 2, "", 0, "", 0, 1, "c")
FAULTS: dict[str, Exception] = {
    "full": NoMemory("the reference of L1/01_x failed while it was used: 1024 bytes", "End the others"),
    "full too": NoMemory("the reference of L1/01_x failed while it was used: 88 bytes", "End the others"),
    "lost": InfraError("a sandbox was killed"),
    "torch": RuntimeError("CUDA out of memory. Tried to allocate 3.5 GiB"),
}


class FailingJudge:
    """Has a verdict for all but what `FAULTS` names."""

    def __init__(self) -> None:
        self.bench = SimpleNamespace(options=bench_options(TimingBench()), _device=None)

    def judge(self, problem: Problem, candidate: Candidate, *_: object, **__: object) -> BenchReport:
        if candidate.source in FAULTS:
            raise FAULTS[candidate.source]
        if candidate.source == "a mistake of ours":
            raise ValueError(candidate.source)
        return BenchReport(Verdict(Fault.OK))


def through(sources: list[str], monkeypatch: pytest.MonkeyPatch) -> queue.Queue[Any]:
    """What a lane says of these candidates."""

    @contextlib.contextmanager
    def judging(*_: object) -> Iterator[tuple[FailingJudge, Any]]:
        turns = SimpleNamespace(working=contextlib.nullcontext, breathe=lambda: None)
        yield FailingJudge(), SimpleNamespace(seconds={}, turns=turns)

    monkeypatch.setattr(lanes, "judging", judging)
    monkeypatch.setattr(lanes, "SETBACK_S", 0.0)
    work, done = queue.Queue[Any](), queue.Queue[Any]()
    work.put((PROBLEM, [lanes.Item(Candidate(source, "c"), BuildReport(Fault.OK), ()) for source in sources]))
    work.put(None)
    lanes.lane(Path(), 0, ASKED, [], [work], None, done, SimpleNamespace(value=-1))
    assert done.get() == "lane 0 is warm"
    return done


def test_a_lane_counts_what_the_host_fails_at_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that others filled, one answer ended its lane, and the measurement."""
    done = through(["right", *FAULTS, "right too"], monkeypatch)
    rows, faults = lanes.phase_rows(done, [], 1, math.inf, lambda: None)
    found = summary(rows, faults)
    assert (found["verdicts"], found["faults"]) == (2, {Fault.OK: 2})
    assert found["host_faults"] == {
        "NoMemory: the reference of a problem failed while it was used: … bytes. End the others": 2,
        "InfraError: a sandbox was killed": 1,
        "RuntimeError: CUDA out of memory. Tried to allocate … GiB": 1,
    }


def test_a_phase_without_a_verdict_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    found = summary(*lanes.phase_rows(through(["lost"], monkeypatch), [], 1, math.inf, lambda: None))
    assert found == {"verdicts": 0, "host_faults": {"InfraError: a sandbox was killed": 1}}


def test_a_mistake_of_ours_ends_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a mistake of ours"):
        through(["a mistake of ours"], monkeypatch)
