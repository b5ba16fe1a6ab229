"""What lies in a quiet window, in which others stand still, and what does not."""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.stages import StageClock
from kbrl_async.kernels.verify import Bench, bench_options
from kbrl_async.kernels.verify import bench as module
from kbrl_async.kernels.verify.cpu.device import CpuDevice


class Told:
    """Stands for a checker, its reference and a stopwatch, and notes what is asked of it."""

    generation = 0

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.reference = self

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.heard.append(name)

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        self.heard.append("window opens")
        yield
        self.heard.append("window closes")


def test_what_is_imported_is_imported_before_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    bench = Bench(cast(Any, told), bench_options(TimingBench()), quiet=told.window)
    bench.references = cast(Any, told)
    monkeypatch.setattr(CpuDevice, "stopwatch", lambda *_: told)
    monkeypatch.setattr(module, "ready", lambda: told.heard.append("imports"))
    clock = StageClock(itertools.count().__next__)
    bench.measure(cast(Any, told), lambda: None, clock)
    clock.ends("timing")
    assert told.heard == ["twin", "imports", "prepare", "window opens", "run", "window closes", "close", "release"]
    parts = re.sub(r" [\d.]+ s", "", clock.reports[0].detail)
    assert parts == "a twin of the reference; preparing; until all is quiet; measuring"


def test_what_the_first_interval_needs_can_be_imported_before() -> None:
    """It takes longer than a window lasts: the first timing of each bench went on after its end."""
    found = """
import sys
from kbrl_async.kernels.timing import median_interval, ready
ready()
before = set(sys.modules)
median_interval([1.0 + n / 100 for n in range(30)])
print(sorted(set(sys.modules) - before))
"""
    assert subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True).stdout == "[]\n"
