"""Versions straight from the learner, where the run sends them so; whatever goes wrong, the files are there.

::

    policies/meeting.json ─ join ─▶ Line ─ newest > served ─ ask ─▶ Offer ─▶ engine.receive
                               ▲                 │ learner gone, no progress for weights.stalled_s
                               └── RETRY_S later ┴─▶ files, until then
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kbrl_async.errors import InfraError
from kbrl_async.sampling.engine import Engine, TakesWeights
from kbrl_async.weights import MEETING
from kbrl_async.weights.direct import Line
from kbrl_async.weights.groups import Meeting
from services.runtime.service import Service

RETRY_S = 30.0


class LearnerLine:
    """One sampler's; all methods belong to its event loop, one at a time."""

    def __init__(self, service: Service, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._service, self._clock = service, clock
        self._engine = engine if isinstance(engine, TakesWeights) and service.config.sends_weights else None
        self._line: Line | None = None
        self._again_at = 0.0

    async def load_newer(self, than: int) -> bool:
        """Whether the engine serves a version above `than` now that came this way."""
        if self._engine is None or self._clock() < self._again_at:
            return False
        try:
            line = await self._joined(self._engine)
            if line is None or await asyncio.to_thread(line.newest) <= than:
                return False
            begun = self._clock()
            offer = await asyncio.to_thread(line.ask)
            await self._engine.receive(offer)
        except InfraError as error:
            self._line, self._again_at = None, self._clock() + RETRY_S
            self._service.log.warning("weights not received", reason=str(error))
            return False
        seconds = round(self._clock() - begun, 3)
        self._service.log.debug("received", policy_version=offer.manifest.version, seconds=seconds)
        return True

    async def _joined(self, engine: TakesWeights) -> Line | None:
        """The line to the learner that is there now; None while there is none."""
        meeting = _meeting(self._service.policies / MEETING)
        if meeting is None:
            return None
        if self._line is None or self._line.meeting != meeting:
            patience_s = self._service.config.weights.stalled_s
            self._line = None
            line = await asyncio.to_thread(Line, meeting, self._service.worker_id, engine.workers, patience_s)
            await engine.meet(meeting, line.link, patience_s)
            self._line = line
        return self._line


def _meeting(path: Path) -> Meeting | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Meeting)
    except (OSError, msgspec.DecodeError):
        return None
