"""Versions straight from the learner, where the run sends them so; whatever goes wrong, the files are there.

::

    policies/meeting.json ─ join ─▶ Line ─ newest > served ─ ask ─▶ Offer ─▶ engine.receive
                               ▲                 │ learner gone, no progress for weights.stalled_s
                               └── RETRY_S later ┴─▶ files, until then
                                   at once where the meeting is another: the learner's next process

Invariant: nobody waits for a learner that has left the meeting: whatever is asked of it ends with the meeting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from kbrl_async.errors import InfraError
from kbrl_async.sampling.engine import Engine, TakesWeights
from kbrl_async.weights import MEETING
from kbrl_async.weights.direct import Line
from kbrl_async.weights.groups import Meeting
from services.runtime.service import Service

RETRY_S = 30.0
FOLLOW_S = 0.5
"""How often who waits for the learner looks whether it sends from elsewhere now."""

T = TypeVar("T")


class LearnerLine:
    """One sampler's; all methods belong to its event loop, one at a time."""

    def __init__(self, service: Service, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._service, self._clock = service, clock
        self._engine = engine if isinstance(engine, TakesWeights) and service.config.sends_weights else None
        self._line: Line | None = None
        self._left: Meeting | None = None
        """The meeting that was given up last, until `_again_at`."""
        self._again_at = 0.0

    async def load_newer(self, than: int) -> bool:
        """Whether the engine serves a version above `than` now that came this way."""
        meeting = _meeting(self._service.policies / MEETING)
        if self._engine is None or meeting is None or (meeting == self._left and self._clock() < self._again_at):
            return False
        try:
            line = await self._joined(self._engine, meeting)
            if await self._asked(meeting, line.newest) <= than:
                return False
            begun = self._clock()
            offer = await self._asked(meeting, line.ask)
            await self._engine.receive(offer)
        except InfraError as error:
            self._line, self._left, self._again_at = None, meeting, self._clock() + RETRY_S
            self._service.log.warning("weights not received", reason=str(error))
            return False
        seconds = round(self._clock() - begun, 3)
        self._service.log.debug("received", policy_version=offer.manifest.version, seconds=seconds)
        return True

    async def _joined(self, engine: TakesWeights, meeting: Meeting) -> Line:
        """The line to the learner that is there now."""
        if self._line is None or self._line.meeting != meeting:
            patience_s = self._service.config.weights.stalled_s
            self._line = None
            name, workers = self._service.worker_id, engine.workers
            line = await self._asked(meeting, lambda: Line(meeting, name, workers, patience_s))
            await engine.meet(meeting, line.link, patience_s)
            self._line = line
        return self._line

    async def _asked(self, meeting: Meeting, question: Callable[[], T]) -> T:
        """The learner's answer. InfraError as soon as it is found elsewhere: who has gone there never answers here."""
        asked = asyncio.ensure_future(asyncio.to_thread(question))
        while not (await asyncio.wait({asked}, timeout=FOLLOW_S))[0]:
            if _meeting(self._service.policies / MEETING) != meeting:
                asked.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody waits for it
                raise InfraError("the learner sends from elsewhere now", "It is met there")
        return asked.result()


def _meeting(path: Path) -> Meeting | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Meeting)
    except (OSError, msgspec.DecodeError):
        return None
