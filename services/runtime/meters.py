"""What a process knows of itself: share of time at work, loop lag, memory, CPU, GPU, counts. One `Load` per beat."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import psutil

from protocols.messages import Load
from services.runtime.usage import CpuMeter, GpuMeter

MAX_FACTS = 32
"""Figures of its own that a process may add to its load; more would bloat every heartbeat."""


class LoadMeter:
    """Adds up the time in which at least one piece of work ran; overlapping pieces count once.

    Used from the loop's thread only: work in other threads is entered and left by the coroutine that awaits it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.done = 0
        self.tokens = 0
        self.facts: dict[str, float] = {}
        """What a viewer shows beside the load; whoever has it writes it here."""
        self.gpu = GpuMeter()
        self.last = Load()
        self._cpu = CpuMeter(clock)
        self._clock = clock
        self._process = psutil.Process()
        self._since = self._busy_since = clock()
        self._working = 0
        self._busy_s = 0.0
        self._lag_s = 0.0

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        if self._working == 0:
            self._busy_since = self._clock()
        self._working += 1

    def leave(self) -> None:
        self._working -= 1
        if self._working == 0:
            self._busy_s += self._clock() - self._busy_since

    def saw_lag(self, lag_s: float) -> None:
        self._lag_s = max(self._lag_s, lag_s)

    def take(self, queued: int = 0) -> Load:
        """The load since the last call."""
        now = self._clock()
        if self._working:
            self._busy_s += now - self._busy_since
            self._busy_since = now
        elapsed_s = now - self._since
        busy = min(1.0, self._busy_s / elapsed_s) if elapsed_s > 0 else 0.0
        load = Load(
            round(busy, 4),
            queued,
            round(self._lag_s * 1000, 2),
            round(self._process.memory_info().rss / 2**20, 1),
            self.done,
            self.tokens,
            self._cpu.take(),
            *self.gpu.take(),
            dict(list(self.facts.items())[:MAX_FACTS]),
        )
        self.last = load
        self._since, self._busy_s, self._lag_s = now, 0.0, 0.0
        return load
