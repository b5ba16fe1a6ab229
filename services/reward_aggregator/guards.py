"""What ends a run, or is said, when it goes wrong: groups that all fail, or teach nothing; alarms on updates.

Pausing admission and lowering the staleness are the state's own: its alarms are asked whenever it is asked for room.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.errors import RunError
from kbrl_async.learning import kept
from kbrl_async.rollouts.alarms import NON_FINITE, AlarmChange
from kbrl_async.rollouts.buffer.buffer import RUN_ENDED
from kbrl_async.rollouts.buffer.events import Closed
from kbrl_async.runs.config import Config
from protocols.records import GroupOutcome, TrainBatch, UpdateReport

MOST = 64
"""Groups in a row."""


ADVICE = "All rewards of a group were equal: look with 'kbrl inspect'; easier problems, a better policy or sft.steps"


class FailureGuard:
    """A run in which every group fails through the infrastructure ends: it would open group after group for nothing.
    One in which no group teaches anything, because all of its rewards are equal, goes on and says so. What the end of
    training closes is counted as failed, too, all at once, and is not meant.

    Counts since this process began: whoever has mended the cause starts the run again and gets as many tries."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._row = self._untaught = 0

    def note(self, closed: Sequence[Closed]) -> int:
        """Groups in a row of which none was trained on, each time that `most` more have come; else 0. Raises
        `RunError` where too many in a row have failed.
        """
        said = 0
        for group in closed:
            if group.reason == RUN_ENDED:
                continue
            self._untaught = 0 if group.outcome is GroupOutcome.TRAINED else self._untaught + 1
            if self._untaught and self._untaught % self._most == 0:
                said = self._untaught
            self._row = self._row + 1 if group.outcome is GroupOutcome.FAILED else 0
            if self._row >= self._most:
                cause = f"the last {self._row} groups all failed, and not through their candidates ({group.reason})"
                cure = "Look for errors of samplers, farms and benches with 'kbrl logs'; the same command goes on then"
                raise RunError(cause, cure)
        return said


GIVE_UP = 3
"""Batches in a row without a finite loss after which a run stops whatever it was told: it would go on so for ever."""


class AlarmResponder:
    """`respond(…)` after the journal has the update; raises `RunError` where an alarm stops the run."""

    def __init__(self, config: Config, run_dir: Path, log: Any) -> None:
        self._run_dir, self._log = run_dir, log
        self._max_bytes = config.alarms.batches_max_bytes

    def respond(
        self, changes: Sequence[AlarmChange], raised: Sequence[str], report: UpdateReport, frames: Sequence[bytes]
    ) -> None:
        for change in changes:
            say = self._log.warning if change.level else self._log.info
            say("alarm", alarm=change.name, severity=change.level, action=change.rule.action, found=change.in_words())
        if raised and self._max_bytes:
            self._keep(raised, report, frames)
        fatal = [c for c in changes if c.level and (c.rule.action == "stop" or _is_hopeless(c))]
        if fatal:
            raise RunError(*_reason(fatal[0], report, self._run_dir))

    def _keep(self, raised: Sequence[str], report: UpdateReport, frames: Sequence[bytes]) -> None:
        index = msgspec.msgpack.decode(frames[0], type=TrainBatch).index
        reason = report.failure or f"alarm: {', '.join(raised)}"
        about = kept.About(report.batch_id, index, reason, report.metrics)
        kept.keep(self._run_dir, frames, about, self._max_bytes)


def _is_hopeless(change: AlarmChange) -> bool:
    return change.name == NON_FINITE and change.level >= GIVE_UP


def _reason(change: AlarmChange, report: UpdateReport, run_dir: Path) -> tuple[str, str]:
    again = f"see it with 'kbrl replay {run_dir} {report.batch_id}'"
    if change.name == NON_FINITE:
        cause = f"{report.batch_id} has no finite loss: {report.failure}; the weights are those before it"
        return cause, f"Look at the batch ({again}), then continue; alarms.nonfinite_action=warn goes on without it"
    cause = f"the alarm {change.name} stops the run: {change.in_words()}"
    return cause, f"Look at the batch ({again}), then continue with a lower learning rate or max_staleness"
