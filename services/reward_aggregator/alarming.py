"""What the aggregator does when an update raises an alarm: say it, keep the batch, stop where that was asked for.

Pausing admission and lowering the staleness are the campaign's: it asks its alarms whenever it is asked for room.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.errors import RunError
from kbrl_async.learning import kept
from kbrl_async.rollouts.alarms import NON_FINITE, AlarmChange, Alarms
from kbrl_async.runs.config import Config
from protocols.records import TrainBatch, UpdateReport
from services.reward_aggregator.run_state import Watched

GIVE_UP = 3
"""Batches in a row without a finite loss after which a run stops whatever it was told: it would go on so for ever."""


def watched(report: UpdateReport, alarms: Alarms, now: float) -> Watched:
    """What the journal keeps of a report, so that a restart and a replay see the same alarms."""
    values = {name: value for name, value in report.metrics.items() if name in alarms.metrics}
    return Watched(report.policy_version, values | {NON_FINITE: float(bool(report.failure))}, now)


class AlarmAction:
    """`respond(…)` after the journal has the update; raises `RunError` where an alarm stops the run."""

    def __init__(self, config: Config, run_dir: Path, log: Any) -> None:
        self._run_dir, self._log = run_dir, log
        self._max_bytes = config.alarms.batches_max_bytes

    def respond(
        self, changes: Sequence[AlarmChange], alarms: Alarms, report: UpdateReport, frames: Sequence[bytes]
    ) -> None:
        for change in changes:
            say = self._log.warning if change.level else self._log.info
            say("alarm", alarm=change.name, severity=change.level, action=change.rule.action, found=change.in_words())
        if alarms.any_raised and self._max_bytes:
            self._keep(alarms, report, frames)
        fatal = [c for c in changes if c.level and (c.rule.action == "stop" or _is_hopeless(c))]
        if fatal:
            raise RunError(*_reason(fatal[0], report, self._run_dir))

    def _keep(self, alarms: Alarms, report: UpdateReport, frames: Sequence[bytes]) -> None:
        index = msgspec.msgpack.decode(frames[0], type=TrainBatch).index
        reason = report.failure or f"alarm: {', '.join(alarms.any_raised)}"
        about = kept.About(report.batch_id, index, reason, report.metrics)
        kept.keep(self._run_dir, frames, about, self._max_bytes)


def _is_hopeless(change: AlarmChange) -> bool:
    return change.name == NON_FINITE and change.level >= GIVE_UP


def _reason(change: AlarmChange, report: UpdateReport, run_dir: Path) -> tuple[str, str]:
    again = f"see it with 'kbrl replay {report.batch_id} --run {run_dir}'"
    if change.name == NON_FINITE:
        cause = f"{report.batch_id} has no finite loss: {report.failure}; the weights are those before it"
        return cause, f"Look at the batch ({again}), then continue; alarms.nonfinite_action=warn goes on without it"
    cause = f"the alarm {change.name} stops the run: {change.in_words()}"
    return cause, f"Look at the batch ({again}), then continue with a lower learning rate or max_staleness"
