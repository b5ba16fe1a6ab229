"""Speedups over torch.compile beside those over eager, where a run asks for them (`timing_bench.baselines`).

A reference is compiled once a process and problem, which takes from seconds to minutes; meanwhile `tick` is called, so
that the broker does not take a compiling bench for a hanging one. The compiler has a deadline of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kbrl_async.kernels.verify import Bench
from kbrl_async.kernels.verify.baselines import Baselines
from protocols.records import BenchReport, Problem

TICK_S = 5.0


class Compared:
    """Made beside a bench, closed before it."""

    def __init__(self, bench: Bench, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._baselines = Baselines(bench) if self._names else None

    def close(self) -> None:
        if self._baselines is not None:
            self._baselines.close()

    def add(self, problem: Problem, report: BenchReport, tick: Callable[[], None]) -> BenchReport:
        """The report of a correct, timed kernel with its speedups over the baselines; those that failed are missing."""
        if self._baselines is None or report.timing is None:
            return report
        with ticking(tick):
            timing, _ = self._baselines.beside(problem, report.timing, self._names)
        return msgspec.structs.replace(report, timing=timing)


@contextlib.contextmanager
def ticking(tick: Callable[[], None], period_s: float = TICK_S) -> Iterator[None]:
    """Calls `tick` now and then from another thread while the body runs."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(period_s):
            tick()

    thread = threading.Thread(target=beat, name="ticking", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
