"""The run's own clock (seconds of running, which stops with the run) laid onto the wall's. Pure.

Both are known at every update: the journal has the one, the logs and the archive the other. Between updates the offset
of the next one holds, so a pause between two starts of a run is where it was.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence


class Clock:
    """`Clock([(run, wall), …])(run) -> wall`; without any pair, the run's clock itself."""

    def __init__(self, pairs: Sequence[tuple[float, float]]) -> None:
        ordered = sorted(pairs)
        self._at = [run for run, _ in ordered]
        self._offsets = [wall - run for run, wall in ordered]

    def __call__(self, run: float) -> float:
        if not self._at:
            return run
        return run + self._offsets[min(bisect.bisect_left(self._at, run), len(self._at) - 1)]
