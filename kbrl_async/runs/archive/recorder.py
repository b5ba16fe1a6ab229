"""What an actor puts into the run's archive, and when; `archive.keep` of the configuration says how much.

Order of a scored turn: archive, then journal, then the broker's acknowledgement. So every score in the journal has its
record in the archive; a turn that a crash catches in between is delivered and scored again, and adding it twice is
adding it once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kbrl_async.evaluation import heldout
from kbrl_async.rollouts.buffer.events import BatchMade, Closed
from kbrl_async.rollouts.scoring import ScoredTurn
from kbrl_async.rollouts.turns import turn_id
from kbrl_async.runs.archive.archive import FILE, ArchiveWriter, GroupEnd, TurnOutcome, UpdateRow, make_row
from kbrl_async.runs.archive.rows import AFTER, BEFORE
from kbrl_async.runs.settings import Archive
from protocols.messages import Task
from protocols.records import TrainGroup, UpdateReport
from protocols.rollout import Record

PURPOSES = {heldout.BEFORE: BEFORE, heldout.AFTER: AFTER}
"""Of those groups whose rows are neither training nor plain evaluation."""


class RolloutRecorder:
    """`all` records, only the `best` ones (rows of all), or `none` at all. Each call returns when it is on disk."""

    def __init__(self, settings: Archive, run_dir: Path) -> None:
        self._keep = settings.keep
        self._writer = None if settings.keep == "none" else ArchiveWriter(run_dir / FILE, settings.max_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    async def scored(
        self,
        task: Task,
        frames: list[bytes],
        record: Record,
        scored: ScoredTurn | None,
        clock: float,
        *,
        is_best: bool = False,
    ) -> None:
        """One turn. `scored` is None where infrastructure failed."""
        if self._writer is None:
            return
        row = make_row(
            task.task_id,
            record,
            at=time.time(),
            clock=clock,
            purpose=PURPOSES.get(task.group_id, ""),
            reward=scored.sample.reward if scored else None,
        )
        kept = frames[: 1 + len(record.work)] if self._keep == "all" or is_best else []
        await asyncio.wrap_future(self._writer.add(row, kept, keep=is_best))

    async def batch(self, batch: BatchMade, groups: Sequence[TrainGroup]) -> None:
        """What a batch is made of; called when it is submitted, and again after a restart."""
        if self._writer is not None:
            await asyncio.wrap_future(self._writer.outcomes(outcomes_of(batch, groups)))

    async def ended(self, closed: Sequence[Closed], clock: float) -> None:
        """Groups that ended; those that are known already keep their end."""
        if self._writer is not None and closed:
            ends = [GroupEnd(g.group_id, g.problem_id, g.outcome, g.reason, clock) for g in closed]
            await asyncio.wrap_future(self._writer.ended(ends))

    async def updated(self, report: UpdateReport) -> None:
        """The learner's report."""
        if self._writer is not None:
            update = UpdateRow(
                report.batch_id, report.policy_version, report.metrics, report.started_at, report.finished_at
            )
            await asyncio.wrap_future(self._writer.updated(update))


def outcomes_of(batch: BatchMade, groups: Sequence[TrainGroup]) -> list[TurnOutcome]:
    """What became of the turns of a batch."""
    return [
        TurnOutcome(turn_id(s.rollout_id, s.turn), batch.batch_id, batch.index, s.reward, s.advantage)
        for group in groups
        for s in group.samples
    ]
