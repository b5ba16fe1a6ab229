"""What an actor puts into the run's archive for each scored turn; `archive.keep` of the configuration says how much."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from kbrl_async.runs.archive.archive import FILE, ArchiveWriter, make_row
from kbrl_async.runs.config import Config
from protocols.messages import Task
from protocols.rollout import Record
from services.rollouts.scoring import Scored


class TurnArchive:
    """`all` records, only the `best` ones (rows of all), or `none` at all.

    `purposes` names those groups whose rows are neither training nor plain evaluation.
    """

    def __init__(self, config: Config, run_dir: Path, purposes: Mapping[str, str] | None = None) -> None:
        self._keep, self._purposes = config.archive.keep, purposes or {}
        self._writer = None if self._keep == "none" else ArchiveWriter(run_dir / FILE, config.archive.max_bytes)

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
        scored: Scored | None,
        clock: float,
        *,
        is_best: bool = False,
    ) -> None:
        """Returns when the turn is on disk. `scored` is None where infrastructure failed."""
        if self._writer is None:
            return
        row = make_row(
            task.task_id,
            record,
            at=time.time(),
            clock=clock,
            purpose=self._purposes.get(task.group_id, ""),
            reward=scored.sample.reward if scored else None,
        )
        kept = frames[: 1 + len(record.work)] if self._keep == "all" or is_best else []
        await asyncio.wrap_future(self._writer.add(row, kept, keep=is_best))
