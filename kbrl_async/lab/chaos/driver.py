"""Carries a plan out against a run: begins each fault in its time, ends it, and measures how the broker comes back.

::

    step(now): due faults begin ─▶ open wounds end at their time ─▶ a broker that was killed is watched until it works

A pure loop over an injected clock, injuries and status; `step` is called some twenty times a second. Time stands still
until the run is at work, so that plans need not know how long a start takes.

Invariants
* Faults begin in the order of the plan, each once; one whose target is not there waits, at most `PATIENCE_S`.
* `finish` ends everything that is open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import msgspec

from kbrl_async.lab.chaos.faults import JOURNAL, FaultKind, PlannedFault
from kbrl_async.lab.chaos.injuries import Absent, Wound
from protocols.messages import StatusReport

PATIENCE_S = 120.0
"""How long a fault waits for its target; a service that starts again needs its time."""
WEDGE_S = 90.0
"""By then somebody must have replaced a process that does nothing."""
STILL_S = 240.0
"""A run whose counters do not change for so long has come to a standstill."""
START_S = 900.0
"""The same for one that is not at work yet: it may have to make its policy first."""

LOAD_S = 5.0
LOAD_PAUSE_S = 1.0
"""A run is under load where, in the last `LOAD_S`, no two results were further apart than this."""


class Hands(Protocol):
    """What does the harm: `Injuries`, or a test's."""

    def begin(self, fault: PlannedFault) -> Wound: ...
    def end(self, wound: Wound) -> None: ...
    def is_over(self, wound: Wound) -> bool: ...
    def release(self, wound: Wound) -> None: ...


class Happened(msgspec.Struct, omit_defaults=True):
    """A fault of the plan, and what came of it."""

    fault: PlannedFault
    began_s: float = -1.0
    """When, after the run was at work; -1: it never did."""
    ended_s: float = -1.0
    pids: list[int] = []
    note: str = ""
    answered_s: float | None = None
    """Of a broker that was killed: seconds until it answered again …"""
    working_s: float | None = None
    """… and until it had taken the next result."""
    pause_s: float | None = None
    """The longest time without a result in the seconds before it was killed."""
    failed: str = ""
    """Why it was not done, or what did not come back."""

    @property
    def under_load(self) -> bool:
        """Whether results came until the broker was killed; where those who make them stand still, none can follow."""
        return self.pause_s is not None and self.pause_s <= LOAD_PAUSE_S

    @property
    def done(self) -> bool:
        return self.began_s >= 0 and not self.failed


class _Recovery(msgspec.Struct):
    happened: Happened
    killed_at: float
    epoch: int
    results: int | None = None


class FaultDriver:
    """See the module's docstring. `ask` returns the broker's report, or None where it does not answer now."""

    def __init__(
        self,
        plan: Sequence[PlannedFault],
        hands: Hands,
        ask: Callable[[], StatusReport | None],
        clock: Callable[[], float],
        say: Callable[[Happened], None] = lambda happened: None,
    ) -> None:
        self.happened = [Happened(fault) for fault in plan]
        self._hands, self._ask, self._clock, self._say = hands, ask, clock, say
        self._waiting = list(self.happened)
        self._open: list[tuple[float, Wound, Happened]] = []
        self._recovering: _Recovery | None = None
        self._working_since: float | None = None
        self._last: StatusReport | None = None
        self._marks = (0, 0, 0)
        self._moved_at = clock()
        self._results_at: deque[float] = deque()

    @property
    def is_done(self) -> bool:
        """Nothing is left to begin, to end or to watch."""
        return not (self._waiting or self._open or self._recovering)

    @property
    def stands_still(self) -> bool:
        """Nothing in the run has moved for too long."""
        limit_s = STILL_S if self._working_since is not None else START_S
        return self._clock() - self._moved_at > limit_s

    def step(self) -> None:
        report = self._ask()
        now = self._clock()
        if report is not None:
            self._look(report, now)
        if self._working_since is not None:
            self._end_due(now)
            self._begin_due(now)

    def rest(self) -> None:
        """The run is being started again: what is away is not asked about, and nothing begins."""
        self._moved_at = self._clock()

    def finish(self) -> None:
        """End what is open; what has not begun never will."""
        for _, wound, happened in self._open:
            self._hands.end(wound)
            self._hands.release(wound)
            if wound.fault.kind is FaultKind.WEDGE and not self._hands.is_over(wound):
                happened.failed = "the run ended before it was noticed"
            happened.ended_s = self._now()
        self._open.clear()
        for happened in self._waiting:
            happened.failed = happened.failed or "the run ended before its time"
        self._waiting.clear()
        if self._recovering is not None:
            self._recovering.happened.note = "the run ended before its next result"
            self._recovering = None

    def _now(self) -> float:
        return round(self._clock() - (self._working_since or self._clock()), 3)

    # ── watching ────────────────────────────────────────────────────────────────────────────────────────────────

    def _look(self, report: StatusReport, now: float) -> None:
        counters = report.counters
        marks = (counters.get("results", 0), counters.get("submitted", 0), report.policy_version)
        if self._working_since is None and marks[0] > 0:
            self._working_since = now
        if marks[0] > self._marks[0]:
            self._results_at.append(now)
        if marks != self._marks:
            self._marks, self._moved_at = marks, now
        if self._recovering is not None:
            self._recover(self._recovering, report, now)
        self._last = report

    def _recover(self, recovery: _Recovery, report: StatusReport, now: float) -> None:
        if report.epoch <= recovery.epoch:
            return
        results = report.counters.get("results", 0)
        happened = recovery.happened
        if recovery.results is None:
            recovery.results = results
            happened.answered_s = round(now - recovery.killed_at, 3)
        if results > recovery.results:
            happened.working_s = round(now - recovery.killed_at, 3)
            self._recovering = None

    # ── beginning and ending ────────────────────────────────────────────────────────────────────────────────────

    def _begin_due(self, now: float) -> None:
        assert self._working_since is not None
        version = self._last.policy_version if self._last is not None else 0
        for happened in list(self._waiting):
            fault = happened.fault
            due = fault.after_update <= version if fault.after_update >= 0 else True
            late_s = now - self._working_since - fault.at_s
            if not due or late_s < 0:
                continue
            self._begin(happened, now, late_s)

    def _begin(self, happened: Happened, now: float, late_s: float) -> None:
        fault = happened.fault
        if self._recovering is not None and (fault.target in ("broker", JOURNAL) or fault.ends_run):
            return  # one death of the broker is measured at a time
        try:
            if fault.kind is FaultKind.WEDGE and not self._serves(fault.target):
                raise Absent(fault.target)  # one that starts is given much longer by its nanny, and rightly
            wound = self._hands.begin(fault)
        except Absent:
            if fault.after_update < 0 and late_s > PATIENCE_S:
                happened.failed = "its target was never there"
                self._waiting.remove(happened)
            return
        self._waiting.remove(happened)
        happened.began_s, happened.pids, happened.note = self._now(), wound.pids, wound.note
        if fault.kind is FaultKind.WEDGE:
            self._open.append((now + max(fault.for_s, WEDGE_S), wound, happened))
        elif fault.for_s > 0:
            self._open.append((now + fault.for_s, wound, happened))
        if (fault.kind is FaultKind.KILL and fault.target == "broker") or fault.target == JOURNAL:
            self._recovering = _Recovery(happened, now, self._last.epoch if self._last else 0)
            happened.pause_s = self._pause_s(now)
        self._say(happened)

    def _pause_s(self, now: float) -> float:
        while self._results_at and self._results_at[0] < now - LOAD_S:
            self._results_at.popleft()
        return round(max(end - start for start, end in pairwise((now - LOAD_S, *self._results_at, now))), 3)

    def _serves(self, target: str) -> bool:
        """Whether a process that a fault names is at work, as the broker says."""
        if target == "broker" or self._last is None:
            return self._last is not None
        names = [worker.worker_id for worker in self._last.workers if not worker.suspect]
        return any(target in (name, name.rpartition(".")[0]) for name in names)

    def _end_due(self, now: float) -> None:
        for item in list(self._open):
            until, wound, happened = item
            noticed = wound.fault.kind is FaultKind.WEDGE and self._hands.is_over(wound)
            if now < until and not noticed:
                continue
            self._open.remove(item)
            self._hands.end(wound)
            happened.ended_s = self._now()
            if wound.fault.kind is FaultKind.WEDGE and not noticed:
                happened.failed = f"nobody replaced it in {WEDGE_S:.0f} s"
                self._hands.release(wound)
