"""The lanes of `benchmarks.verification verdicts`: what ends one is told."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from typing import Any

import pytest

from benchmarks.verification import lanes


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
