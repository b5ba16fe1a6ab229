"""Time as the ledger counts it: what passes while the broker itself stands still is held against nobody.

A stopped process, a host that others load, a disk that takes seconds for a commit: who works on the same host has stood
still with the broker, could not beat meanwhile, and would lose its lease to the broker's first look at the clock.
"""

from __future__ import annotations

from collections.abc import Callable


class AwakeClock:
    """Between two looks at most `most_s` pass. So it is asked at least as often while all is well."""

    def __init__(self, clock: Callable[[], float], most_s: float) -> None:
        self._clock, self.most_s = clock, most_s
        self._told = self._looked_at = clock()

    def __call__(self) -> float:
        now = self._clock()
        self._told += min(now - self._looked_at, self.most_s)
        self._looked_at = now
        return self._told
