"""How far a run is: its phase, the share of it that is done, and what is left of it. One small file in the run folder.

::

    learner (the policy is made) ──┐
    reward_aggregator, evaluator ──┴─ Reporter ─▶ metrics/progress.json ─▶ status line of `kbrl train`, `kbrl top`
                                          └─▶ a log line at a change of phase, and every `LOG_S`

Invariants
* A picture that can't be written is lost, and nothing else.
* What is left is estimated from what this process has seen itself: a continued run does not reckon with its pause.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

MAKING = "making the policy"
BEFORE = "evaluation before training"
TRAINING = "training"
AFTER = "evaluation after training"
EVALUATION = "evaluation"

WRITE_S = 0.5
LOG_S = 30.0
SEEN_SHARE = 0.02
"""Of a phase; from less of it nothing is estimated."""
_FILE = "metrics/progress.json"


class Progress(msgspec.Struct, frozen=True):
    """How things stood at `at`."""

    phase: str
    note: str
    """How much of how much, in words."""
    share: float
    """Of the phase, 0 … 1."""
    at: float
    """Epoch seconds."""
    eta_s: float | None = None
    """Until the phase ends; None while nothing is known."""

    def left_s(self, now: float) -> float | None:
        """`eta_s`, seen from `now`; None where it is over and the phase is not."""
        left = None if self.eta_s is None else self.eta_s - max(0.0, now - self.at)
        return left if left is not None and left > 0 else None


_DECODER = msgspec.json.Decoder(Progress)


def read(run_dir: Path) -> Progress | None:
    """None where nobody has written one yet."""
    try:
        return _DECODER.decode((run_dir / _FILE).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


def forget(run_dir: Path) -> None:
    """Before a start: how things stood when a run was stopped says nothing of its next part."""
    with contextlib.suppress(OSError):
        (run_dir / _FILE).unlink(missing_ok=True)


class PhasePace:
    """How long what is left of a phase takes, by what was seen of it."""

    def __init__(self, now: float, share: float) -> None:
        self._first = self._last = (now, share)
        """Where it began and where it moved last."""

    def left_s(self, now: float, share: float) -> float | None:
        """None while too little was seen."""
        if share != self._last[1]:
            self._last = (now, share)
        (begun, at_first), (moved, at_last) = self._first, self._last
        if at_last - at_first < SEEN_SHARE:
            return None
        return max(0.0, (1.0 - at_last) * (moved - begun) / (at_last - at_first) - (now - moved))


class Reporter:
    """One process's part of it. Call `tell` as often as you like.

    :param log: the service's logger.
    """

    def __init__(self, run_dir: Path, log: Any, clock: Callable[[], float] = time.time) -> None:
        self._path = run_dir / _FILE
        self._log, self._clock = log, clock
        self._phase, self._pace = "", PhasePace(0.0, 0.0)
        self._written_at = self._logged_at = float("-inf")

    def tell(self, phase: str, note: str, share: float, limit_s: float | None = None) -> None:
        """:param limit_s: seconds after which the phase ends, whatever its share is."""
        now = self._clock()
        if is_new := phase != self._phase:
            self._phase, self._pace = phase, PhasePace(now, share)
        known = [left for left in (self._pace.left_s(now, share), limit_s) if left is not None]
        if is_new or now - self._written_at >= WRITE_S:
            self._written_at = now
            eta_s = round(max(0.0, min(known)), 1) if known else None
            self._write(Progress(phase, note, round(share, 4), now, eta_s), is_new=is_new)

    def _write(self, progress: Progress, *, is_new: bool) -> None:
        if is_new or progress.at - self._logged_at >= LOG_S:
            self._logged_at = progress.at
            facts = {} if progress.eta_s is None else {"eta_s": round(progress.eta_s)}
            self._log.info("progress", phase=progress.phase, done=f"{progress.share:.0%}", now=progress.note, **facts)
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            fresh.write_bytes(msgspec.json.encode(progress))
            fresh.replace(self._path)
