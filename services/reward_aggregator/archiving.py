"""What the aggregator puts into the run's archive, and when.

Order of a scored turn: archive, then journal, then the broker's acknowledgement. So every score in the journal has its
record in the archive; a turn that a crash catches in between is delivered and scored again, and adding it twice is
adding it once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from kbrl_async.rollouts.buffer.events import BatchMade, Closed
from kbrl_async.rollouts.turns import turn_id
from kbrl_async.runs.archive.archive import GroupEnd, TurnOutcome, Update
from kbrl_async.runs.archive.rows import AFTER as ROW_AFTER
from kbrl_async.runs.archive.rows import BEFORE as ROW_BEFORE
from kbrl_async.runs.config import Config
from protocols.records import TrainGroup, UpdateReport
from services.reward_aggregator.run_state import AFTER, BEFORE
from services.rollouts.archiving import TurnArchive

PURPOSES = {BEFORE: ROW_BEFORE, AFTER: ROW_AFTER}


class Archiving(TurnArchive):
    """Also what becomes of the turns: groups, batches and updates."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        super().__init__(config, run_dir, PURPOSES)

    async def batch(self, batch: BatchMade, groups: Sequence[TrainGroup]) -> None:
        """What a batch is made of; called when it is submitted, and again after a restart."""
        outcomes = [
            TurnOutcome(turn_id(s.rollout_id, s.turn), batch.batch_id, batch.index, s.reward, s.advantage)
            for group in groups
            for s in group.samples
        ]
        if self._writer is not None:
            await asyncio.wrap_future(self._writer.outcomes(outcomes))

    async def ended(self, closed: Sequence[Closed], clock: float) -> None:
        """Groups that ended; those that are known already keep their end."""
        if self._writer is not None and closed:
            ends = [GroupEnd(g.group_id, g.problem_id, g.outcome, g.reason, clock) for g in closed]
            await asyncio.wrap_future(self._writer.ended(ends))

    async def updated(self, report: UpdateReport) -> None:
        """Returns when the learner's report is on disk."""
        if self._writer is not None:
            update = Update(
                report.batch_id, report.policy_version, report.metrics, report.started_at, report.finished_at
            )
            await asyncio.wrap_future(self._writer.updated(update))
