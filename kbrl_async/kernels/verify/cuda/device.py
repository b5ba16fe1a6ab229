"""A GPU of NVIDIA's, as verifying needs it."""

from __future__ import annotations

import contextlib
import gc
import random
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec
import torch

from kbrl_async.errors import MissingTool
from kbrl_async.kernels.backends import preloads
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.verify import fused
from kbrl_async.kernels.verify.cuda.health import GpuHealth
from kbrl_async.kernels.verify.cuda.passes import Passes
from kbrl_async.kernels.verify.cuda.prewarmed import LIFE_S, Spares
from kbrl_async.kernels.verify.cuda.reference import CudaReference, DoesNotFit, make_room, room_kept
from kbrl_async.kernels.verify.cuda.replay.candidates import Replays
from kbrl_async.kernels.verify.cuda.replay.host import Unreplayable
from kbrl_async.kernels.verify.device import Device
from kbrl_async.kernels.verify.options import BenchOptions, Tick
from kbrl_async.kernels.verify.reference import Reference
from kbrl_async.kernels.verify.session import CandidateFault, Judged, Session, Submission
from protocols.records import Candidate, Problem

if TYPE_CHECKING:
    from kbrl_async.kernels.verify.checks import Checker
    from kbrl_async.kernels.verify.cuda.stopwatch import CudaStopwatch
    from kbrl_async.kernels.verify.family import Family

PRELOAD = (
    *("torch", "numpy", "kbrl_async.kernels.verify.cuda.runner"),
    "kbrl_async.kernels.verify.cuda.record.child",
    "kbrl_async.kernels.verify.cuda.replay.player",
)
_CANDIDATE_S, _CALL_S, _FIRST_S = 15.0, 2.0, 10.0
_HOST_BYTES = 8 << 30


class CudaDevice(Device):
    """See `verify.device`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._health: GpuHealth | None = None
        self._spares: Spares | None = None
        self._homes: Spares | None = None
        """Of references."""
        self._replays: Replays | None = None

    @property
    def health(self) -> GpuHealth:
        assert self._health is not None, "a device is opened before it is used"
        return self._health

    def zygote(self, modules: tuple[str, ...]) -> Zygote:
        return Zygote((*PRELOAD, *preloads("cuda"), *modules), profile="gpu")

    def fitted(self, options: BenchOptions) -> BenchOptions:
        """A first call loads libraries and device code, and a fault takes the driver seconds to clear away."""
        memory = max(options.limits.memory_bytes, _HOST_BYTES)
        return msgspec.structs.replace(
            options,
            deadline_s=max(options.deadline_s, _CANDIDATE_S),
            call_floor_s=max(options.call_floor_s, _CALL_S),
            first_call_s=max(options.first_call_s, _FIRST_S),
            limits=msgspec.structs.replace(options.limits, memory_bytes=memory),
        )

    def open(self, memory_share: float) -> None:
        where = torch.device(self.name)
        if not torch.cuda.is_available() or (where.index or 0) >= torch.cuda.device_count():
            raise MissingTool(f"there is no GPU {self.name} on this host", "Choose `device=cpu`, or see `nvidia-smi`")
        where = torch.device("cuda", where.index or 0)
        torch.cuda.set_per_process_memory_fraction(memory_share, where)  # a plan that fails is ours, not a neighbour's
        self._health = GpuHealth(where)
        with contextlib.suppress(MissingTool):
            fused.use(where, Passes(where))

    def enter(self) -> None:
        self.health.enter()

    def reference(
        self,
        zygote: Zygote,
        problem: Problem,
        options: BenchOptions,
        rng: random.Random,
        kept: OrderedDict[str, Family],
        tick: Tick,
    ) -> Reference:
        if self._spares is None or self._homes is None:
            self._spares = Spares(zygote, options.limits, options.device)
            lasting = msgspec.structs.replace(options.limits, cpu_s=LIFE_S)
            self._homes = Spares(zygote, lasting, options.device)
        self._homes.refill()
        self._replays_for(zygote, options).refill()  # they start while the reference is made
        if not make_room(kept, options, self._homes):
            self._give_back()
        made: CudaReference | None
        given = zygote, problem, options, rng, self._homes, self._spares, tick
        try:
            made = CudaReference(*given)
        except DoesNotFit:
            made = None  # the error's frames hold what there is of it
        if made is None:
            while kept:
                kept.popitem(last=False)[1].close()
            self._give_back()
            made = CudaReference(*given)
        self._homes.refill()  # for the next problem
        return made

    def _give_back(self) -> None:
        """All memory that can be had again."""
        if self._replays is not None:
            self._replays.give_back()
        for spares in (self._homes, self._spares):
            if spares is not None:
                spares.settle()
                spares.dying.close()
        gc.collect()
        torch.cuda.empty_cache()

    def judged(
        self,
        reference: Reference,
        zygote: Zygote,
        code: Submission,
        options: BenchOptions,
        rng: random.Random,
        is_alone: bool,
    ) -> Judged:
        """Its recorded work, done again; its own process where that can't be."""
        assert isinstance(reference, CudaReference)
        replays = self._replays_for(zygote, options)
        try:
            return replays.open(reference, code, options.deadline_s, rng, is_alone, options.outputs == "kept")
        except Unreplayable as refusal:
            watched = super().judged(reference, zygote, code, options, rng, is_alone)
            watched.trust_reason, watched.is_shared = str(refusal), not is_alone and replays.is_shared
            return watched

    def is_repeated(
        self, reference: Reference, code: Submission, options: BenchOptions, is_right: bool, is_alone: bool
    ) -> bool:
        assert isinstance(reference, CudaReference)
        found = self._replays
        return found is not None and found.is_repeated(reference, code, options.deadline_s, is_right, is_alone)

    def elsewhere(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._replays is None else self._replays.by_the_second()

    def contradict(self, is_right: bool) -> None:
        if self._replays is not None:
            self._replays.contradict(is_right)

    def _replays_for(self, zygote: Zygote, options: BenchOptions) -> Replays:
        if self._replays is None:
            self._replays = Replays(zygote, options.limits, options.device, options.memory_share)
        return self._replays

    def room(self, options: BenchOptions) -> float:
        return room_kept(options)

    def free(self) -> int | None:
        return self.health.free()

    def stopwatch(
        self, checker: Checker, twin: Session, options: BenchOptions, rng: random.Random, tick: Tick
    ) -> CudaStopwatch:
        from kbrl_async.kernels.verify.cuda.stopwatch import CudaStopwatch

        return CudaStopwatch(checker, twin, options, rng, tick, self.health.nvml, self.health.calibration)

    def prove(
        self, checker: Checker, candidate: Candidate, options: BenchOptions, rng: random.Random, tick: Tick
    ) -> None:
        self.stopwatch(checker, checker.reference.session, options, rng, tick).prove(candidate)

    def ended(self, fault: CandidateFault, pid: int, zygote: Zygote) -> None:
        self.health.check(pid)

    def settle(self) -> None:
        for started in (self._spares, self._homes, self._replays):
            if started is not None:
                started.settle()

    def close(self) -> None:
        for started in (self._spares, self._homes, self._replays):
            if started is not None:
                started.close()
