"""From a candidate to a session that replays it: recorded, read, loaded, tried once; or why not.

::

    inputs placed ─▶ recorder ─▶ bytes ─ validation ─▶ Recording ─▶ player ─▶ `ReplaySession`
                        └──────────── not recorded, not readable, not loadable: `Unreplayable`
"""

from __future__ import annotations

import random
from pathlib import Path

import torch

from kbrl_async.kernels.cuda_driver import CudaError
from kbrl_async.kernels.sandbox import Limits, Zygote
from kbrl_async.kernels.verify import validation, values
from kbrl_async.kernels.verify.cuda.record.session import Recorders
from kbrl_async.kernels.verify.cuda.reference import CudaReference
from kbrl_async.kernels.verify.cuda.replay.host import ReplayHost, Unreplayable
from kbrl_async.kernels.verify.cuda.replay.images import Unloadable, images
from kbrl_async.kernels.verify.cuda.replay.session import ReplaySession, place_inputs
from kbrl_async.kernels.verify.replies import Malformed
from kbrl_async.kernels.verify.session import CandidateFault

_LEAST_BYTES = 2 << 30
_MOST_SHARE = 0.25
"""Of the GPU's memory, for one arena; there are two, a recorder's and a player's."""
_BESIDE = 512 << 20
_TIMES = 3
"""Outputs of all slots, intermediate results and what a recorder compares, in units of inputs and outputs."""


class Replays:
    """Recorders and players of one bench on its GPU."""

    def __init__(self, zygote: Zygote, limits: Limits, device: str) -> None:
        self._zygote, self._limits, self._device = zygote, limits, device
        self._host = ReplayHost(zygote, limits, device)
        self._recorders: Recorders | None = None
        self._generation = -1

    def open(
        self,
        reference: CudaReference,
        source: str,
        backend: str,
        artifacts: dict[str, str],
        deadline_s: float,
        rng: random.Random,
        is_alone: bool,
    ) -> ReplaySession:
        """`is_alone`: recorded by a process that has served nobody else.

        :raises Unreplayable: it has to be judged another way.
        """
        if refused := reference.capture_refused():
            raise Unreplayable(f"its reference can't be timed as a graph ({refused})")
        try:
            built = images(map(Path, artifacts.values()))
        except Unloadable as refusal:
            raise Unreplayable(str(refusal)) from refusal
        slots = reference.plan.slots
        placed, start = place_inputs(reference.examples, slots, rng)
        recorders = self._recorders_for(start + _TIMES * reference.slot_bytes * slots + reference.weights_bytes)
        if is_alone:
            recorders.forget()
        content = reference.record(recorders, source, artifacts, backend, placed, start, deadline_s)
        bounds = validation.Bounds(recorders.arena.size, frozenset(image.digest for image in built), slots)
        try:
            recording = validation.read(content, bounds)
        except Malformed as error:
            raise Unreplayable(f"its recording says what can't be ({error})") from error
        if recording.refused:
            raise Unreplayable(recording.refused)
        try:
            session = ReplaySession(self._host, recording, built, placed, recorders.arena, rng, self.is_shared)
        except CudaError as error:
            raise Unreplayable(f"there is no memory to replay it in ({error})") from error
        try:
            self._try(session, reference, deadline_s, rng)
        except CandidateFault as fault:
            session.fault = session.fault or fault
        except BaseException:
            session.close()
            raise
        recorders.refill()
        self._host.refill()
        return session

    def _try(self, session: ReplaySession, reference: CudaReference, deadline_s: float, rng: random.Random) -> None:
        """What libraries do at their first call, and what can't be captured here, shows now."""
        reference.pool.mix([session.slots[0]], rng)
        session.run(0, deadline_s)

    def _recorders_for(self, size: int) -> Recorders:
        """:raises Unreplayable: so much memory is not to be had."""
        wanted = max(_LEAST_BYTES, values.padded(size + _BESIDE, _LEAST_BYTES))
        total = torch.cuda.get_device_properties(torch.device(self._device)).total_memory
        if wanted > _MOST_SHARE * total and wanted > _LEAST_BYTES:
            raise Unreplayable("its inputs take too much memory to be held twice more")
        known = self._recorders
        if known is not None and self._generation == self._zygote.generation and wanted <= known.arena.size:
            return known
        try:
            if known is None or self._generation != self._zygote.generation:
                self.give_back()
                known = Recorders(self._zygote, self._limits, self._device, wanted)
            else:
                known.grow(wanted)
        except CudaError as error:
            self.give_back()
            raise Unreplayable(f"there is no memory to record it in ({error})") from error
        self._generation, self._recorders = self._zygote.generation, known
        return known

    @property
    def is_shared(self) -> bool:
        """Whether the last candidate was recorded by a process that had served others."""
        return self._recorders is not None and not self._recorders.is_fresh

    def settle(self) -> None:
        """Returns when nothing that was started for later candidates is still starting."""
        self._host.settle()
        if self._recorders is not None:
            self._recorders.settle()

    def give_back(self) -> None:
        """What memory can be had again; who needs it next makes it anew."""
        if self._recorders is not None:
            self._recorders.close()
            self._recorders = None

    def close(self) -> None:
        self._host.close()
        self.give_back()
