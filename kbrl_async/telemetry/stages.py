"""How long each step of the funnel took, and how it ended: a list of `StageReport` that grows by one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

from protocols.records import Fault, StageReport


class StageClock:
    """Each stage begins where the one before it ended::

    clock = StageClock()
    report = check(candidate)
    clock.ends("static", report.fault)
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._mark = now()
        self._reports: list[StageReport] = []

    def ends(self, name: str, fault: Fault = Fault.OK, detail: str = "") -> None:
        mark = self._now()
        self._reports.append(StageReport(name, fault, mark - self._mark, detail))
        self._mark = mark

    def has(self, name: str) -> bool:
        return any(report.name == name for report in self._reports)

    @property
    def reports(self) -> tuple[StageReport, ...]:
        return tuple(self._reports)
