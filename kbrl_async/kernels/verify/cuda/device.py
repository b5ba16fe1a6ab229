"""A GPU of NVIDIA's, as verifying needs it."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from kbrl_async.errors import InfraError, MissingTool
from kbrl_async.kernels.backends import preloads
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.stages import span
from kbrl_async.kernels.verify import fused, proof
from kbrl_async.kernels.verify.cuda.health import GpuHealth
from kbrl_async.kernels.verify.cuda.passes import Passes
from kbrl_async.kernels.verify.cuda.prewarmed import LIFE_S, PrewarmedChildren
from kbrl_async.kernels.verify.cuda.reference import CudaReference, DoesNotFit, make_room, retire, room_kept, staying
from kbrl_async.kernels.verify.cuda.replay.candidates import Replays
from kbrl_async.kernels.verify.cuda.replay.host import ShortOfMemory, Unreplayable
from kbrl_async.kernels.verify.cuda.session import CudaSession
from kbrl_async.kernels.verify.device import Device
from kbrl_async.kernels.verify.hoarding import WAITED, Crowded, NoMemory
from kbrl_async.kernels.verify.options import BenchOptions, Tick, compiling_s
from kbrl_async.kernels.verify.reference import Reference
from kbrl_async.kernels.verify.reservations import Other, Reservations
from kbrl_async.kernels.verify.session import CandidateFault, Judged, Session, Submission
from kbrl_async.kernels.verify.sets import Inconstant
from protocols.affinity import KEPT
from protocols.records import Candidate, Problem

if TYPE_CHECKING:
    from kbrl_async.kernels.verify.checks import Checker
    from kbrl_async.kernels.verify.cuda.stopwatch import CudaStopwatch
    from kbrl_async.kernels.verify.family import Family

PRELOAD = (
    *("torch", "numpy.random", "kbrl_async.kernels.verify.cuda.runner"),
    "kbrl_async.kernels.verify.cuda.record.child",
    "kbrl_async.kernels.verify.cuda.replay.player",
)
_CANDIDATE_S, _CALL_S, _FIRST_S = 15.0, 2.0, 10.0
_HOST_BYTES = 8 << 30
_SCRATCH_BYTES = 256 << 20
"""For compiled kernels: of one that is tuned over a hundred configurations, each leaves some 300 kB."""
_KEPT_BESIDE_OTHERS = 1 / 16
"""Of a GPU, what references may keep from one candidate to the next where other verifiers are on it."""
_DIVIDED = 0.5
"""A bench that may plan with no more than this is one of several, whose shares come to no more than all: what it keeps
within its own is in nobody's way."""
_EMPTY = 3 / 4
"""Of what a bench may plan with: where less is free, beside all that was given back, others hold enough to be in the
way."""
_UNPLANNED_S = 10.0
"""To wait for others where nobody knows how much is missing."""
_ALL_S = 60.0
"""To wait for all of it: an idle verifier gives nothing back, and who waits keeps everybody from planning with more."""


def reservations_on(device: torch.device) -> Reservations:
    """Of all verifiers of this user on one GPU of this host."""
    properties = torch.cuda.get_device_properties(device)
    folder = Path(tempfile.gettempdir()) / f"kbrl-memory-{os.getuid()}-{properties.uuid}"
    return Reservations(folder, properties.total_memory)


class CudaDevice(Device):
    """See `verify.device`."""

    tools = "gpu-tool"
    references = KEPT

    def __init__(self, name: str) -> None:
        super().__init__(f"cuda:{torch.device(name).index or 0}")  # torch takes no other name in most places
        self._health: GpuHealth | None = None
        self.spares: PrewarmedChildren | None = None
        self.homes: PrewarmedChildren | None = None
        """Of references."""
        self.replays: Replays | None = None
        self.reservations: Reservations | None = None
        """None where the system's temporary folder can't tell of other verifiers."""
        self.kept_share = _KEPT_BESIDE_OTHERS
        self.memory_share = 1.0
        self._always_short: set[str] = set()
        """Problems whose reference found too little memory though nobody else had any."""
        self._has_given_way = self._has_all = False
        """For the candidate that is being judged: others were waited for; and for all of the memory, until they had
        left it or the time for that was over."""

    @property
    def health(self) -> GpuHealth:
        assert self._health is not None, "a device is opened before it is used"
        return self._health

    def zygote(self, modules: tuple[str, ...]) -> Zygote:
        return Zygote((*PRELOAD, *preloads("cuda"), *modules), profile="gpu")

    def fitted(self, options: BenchOptions) -> BenchOptions:
        """A first call loads libraries and device code, and a fault takes the driver seconds to clear away."""
        limits = options.limits
        memory, scratch = max(limits.memory_bytes, _HOST_BYTES), max(limits.scratch_bytes, _SCRATCH_BYTES)
        return msgspec.structs.replace(
            options,
            device=self.name,
            deadline_s=max(options.deadline_s, _CANDIDATE_S),
            call_floor_s=max(options.call_floor_s, _CALL_S),
            first_call_s=max(options.first_call_s, _FIRST_S),
            limits=msgspec.structs.replace(limits, memory_bytes=memory, scratch_bytes=scratch),
        )

    def open(self, memory_share: float) -> None:
        where = torch.device(self.name)
        if not torch.cuda.is_available() or where.index >= torch.cuda.device_count():
            raise MissingTool(f"there is no GPU {self.name} on this host", "Choose `device=cpu`, or see `nvidia-smi`")
        torch.cuda.set_per_process_memory_fraction(memory_share, where)  # a plan that fails is ours, not a neighbour's
        self._health, self.memory_share = GpuHealth(where), memory_share
        if memory_share <= _DIVIDED:
            self.kept_share = memory_share
        with contextlib.suppress(OSError):
            self.reservations = reservations_on(where)
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
        if self.spares is None or self.homes is None:
            self.spares = PrewarmedChildren(zygote, options.limits, options.device)
            lasting = msgspec.structs.replace(options.limits, cpu_s=LIFE_S)
            self.homes = PrewarmedChildren(zygote, lasting, options.device)
        most, room = max(0, options.references - 1), room_kept(options)
        sizes = [family.device_bytes for family in reversed(kept.values())]
        retire(kept, staying(sizes, most, room), self.homes)
        self.homes.refill()
        self._replays_for(zygote, options).refill()  # they start while the reference is made
        if not make_room(kept, options, self.homes):
            self.give_back(keeps_processes=True)
        made = self._made(zygote, problem, options, rng, kept, tick)
        sizes = [made.device_bytes, *(family.device_bytes for family in reversed(kept.values()))]
        if staying(sizes, most, room) == len(sizes):  # else the one that goes for the next one leaves it its process
            self.homes.refill()
        return made

    def _made(
        self,
        zygote: Zygote,
        problem: Problem,
        options: BenchOptions,
        rng: random.Random,
        kept: OrderedDict[str, Family],
        tick: Tick,
    ) -> CudaReference:
        """As often as more memory is asked for than others leave; where it ran out, or one that was short of it gave
        two answers, once more.

        :raises DoesNotFit: nobody else has any, even once this verifier has given way.
        :raises NoMemory: others have it.
        """
        assert self.spares is not None
        assert self.homes is not None
        has_run_out = is_doubted = False
        while True:
            failed: tuple[str, str] | None = None
            claim = self.claim_beside(kept)
            wanted, is_random = 0, False
            try:
                return CudaReference(
                    zygote, problem, options, rng, self.homes, self.spares, tick, claim, lambda: self.has_neighbours
                )
            except DoesNotFit as error:
                failed = error.cause, error.cure
            except Inconstant as error:  # with too little memory its library goes another way
                if is_doubted or not (error.is_short and self.is_crowded):
                    raise
                is_doubted = is_random = True
            except Crowded as crowded:
                wanted = crowded.size
            while kept:  # by now the error's frames, which hold what there was of it, are gone
                kept.popitem(last=False)[1].close()
            self.give_back(keeps_processes=wanted > 0 and self._is_room_beside(wanted))
            if failed and has_run_out:
                raise self._for_want_of_memory(*failed)
            has_run_out = has_run_out or failed is not None
            with span(WAITED):
                if is_random:
                    self._wait_for_all(tick)
                else:
                    self.wait_for(wanted, tick)

    def _is_room_beside(self, wanted: int = 0) -> bool:
        """For processes that wait, beside what is wanted here or elsewhere."""
        return self.reservations is None or self.reservations.is_room_beside(wanted)

    def _for_want_of_memory(self, cause: str, cure: str) -> DoesNotFit | NoMemory:
        """Whose it is, once all that was ours is given back."""
        if not self._others or (self._has_given_way and not self._is_held_by_others):
            return DoesNotFit(cause, cure)
        return NoMemory(f"{cause}, much of which others hold", "End them, or give each a timing_bench.memory_share")

    @property
    def _is_held_by_others(self) -> bool:
        free, reservations = self.free(), self.reservations
        return free is not None and reservations is not None and free < _EMPTY * self.memory_share * reservations.total

    @property
    def has_neighbours(self) -> bool:
        return bool(self._others)

    @property
    def verifiers(self) -> int:
        return 1 + len(self._others)

    @property
    def is_crowded(self) -> bool:
        return any(max(other.held, other.wanted) > 0 for other in self._others)

    @property
    def _others(self) -> list[Other]:
        return [] if self.reservations is None else self.reservations.others

    def claim_beside(self, kept: OrderedDict[str, Family]) -> Callable[[int], None]:
        """Asked for beside the references that are kept; where others leave too little for that, these go, and then
        what the last candidates were recorded and replayed in. Processes stay: making one takes longer.
        """

        def claim(size: int) -> None:
            if self.may_use(size + sum(family.device_bytes for family in kept.values())):
                return
            if self.homes is not None:
                retire(kept, 0, self.homes)
                gc.collect()
                torch.cuda.empty_cache()
            if self.may_use(size):
                return
            if self.replays is not None:
                self.replays.shrink()
            if self.reservations is not None and not self.reservations.take(size + self._arenas):
                raise Crowded(size + self._arenas)

        return claim

    def may_use(self, size: int) -> bool:
        return self._may_have(size + self._arenas)

    def may_grow(self, size: int) -> bool:
        return self.reservations is None or self._may_have(self.reservations.held + size)

    def _may_have(self, size: int) -> bool:
        """One of several keeps to its share where it can, so that the others need not wait for what is theirs."""
        if (reservations := self.reservations) is None:
            return True
        is_within = self.memory_share > _DIVIDED or size <= self.memory_share * reservations.whole
        return (is_within or not reservations.is_concern(size)) and reservations.take(size)

    @property
    def _arenas(self) -> int:
        """Bytes in which candidates are recorded and replayed."""
        return 0 if self.replays is None else self.replays.device_bytes

    def give_way(self, tick: Tick, is_last: bool = False) -> None:
        self.give_back()
        if is_last:
            self._wait_for_all(tick)
        else:
            self.wait_for(0, tick)
        self._has_given_way, self._has_all = True, is_last

    def wait_for(self, size: int, tick: Tick) -> None:
        """Until other verifiers leave so much of the GPU. 0: memory ran out before anything was planned; then until
        they do with what they keep between candidates, for a while.
        """
        reservations = self.reservations
        if reservations is None or not (others := self._others):
            return
        reservations.hold(0)
        if size:
            reservations.wait_for(size, tick)
            return
        share = max(_KEPT_BESIDE_OTHERS, 1 - len(others) * _KEPT_BESIDE_OTHERS)
        with contextlib.suppress(InfraError):  # it is tried all the same, and told with its bytes
            reservations.wait_for(int(share * reservations.total), tick, _UNPLANNED_S)

    def _wait_for_all(self, tick: Tick) -> None:
        if (reservations := self.reservations) is None or not self._others:
            return
        reservations.hold(0)
        with contextlib.suppress(InfraError):  # it is tried all the same
            reservations.wait_for(reservations.total, tick, _ALL_S)

    def rest(self, kept: int) -> bool:
        reservations, self._has_given_way, self._has_all = self.reservations, False, False
        if reservations is None:
            return True
        held = max(kept, reservations.held - self._arenas)
        if reservations.is_concern(held + self._arenas) and (others := reservations.others):
            is_asked = held > self.kept_share * reservations.whole or any(other.wanted for other in others)
            if kept and is_asked:
                return False
            if is_asked:
                self.give_back(keeps_processes=self._is_room_beside())
        reservations.hold(kept + self._arenas)
        return True

    def give_back(self, keeps_processes: bool = False) -> None:
        """All memory that can be had again, which ends all processes that wait; or all that is in anybody's plan."""
        if keeps_processes:
            self._clear_processes()
        else:
            self._end_processes()
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
        made: Judged
        try:
            wanted = options.outputs == "kept", options.check_s > 0
            limit_s = options.deadline_s + compiling_s(options, code.source)
            made = replays.open(reference, code, limit_s, rng, is_alone, *wanted)
        except Unreplayable as refusal:
            if isinstance(refusal, ShortOfMemory) and not self._has_given_way:
                raise NoMemory(str(refusal)) from refusal
            self._refuse_short(reference)
            made = super().judged(reference, zygote, code, options, rng, is_alone)
            was_recorded = not (is_alone or reference.offloaded.inputs)
            made.trust_reason, made.is_shared = str(refusal), was_recorded and replays.is_shared
            return made
        try:
            self._refuse_short(reference)
        except NoMemory:
            made.close()
            raise
        return made

    def _refuse_short(self, reference: CudaReference) -> None:
        """:raises NoMemory: it would be timed the slower for memory that others have. Once all of it was waited for
        it is timed as it is: others may keep some, and it may need more than there is.
        """
        if not reference.session.is_short or not self.has_neighbours or reference.problem.source in self._always_short:
            return
        if self._has_all and not any(other.held for other in self._others):
            self._always_short.add(reference.problem.source)
        if not self._has_all:
            raise NoMemory("the library found too little memory for the reference's usual way")

    def is_repeated(
        self, reference: Reference, code: Submission, options: BenchOptions, is_right: bool, is_alone: bool
    ) -> bool:
        assert isinstance(reference, CudaReference)
        found = self.replays
        return found is not None and found.is_repeated(reference, code, options.deadline_s, is_right, is_alone)

    def elsewhere(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.replays is None else self.replays.by_the_second()

    def contradict(self, is_right: bool) -> None:
        if self.replays is not None:
            self.replays.contradict(is_right)

    def _replays_for(self, zygote: Zygote, options: BenchOptions) -> Replays:
        if self.replays is None:
            self.replays = Replays(zygote, options.limits, options.device, options.memory_share, self.may_grow)
        return self.replays

    def room(self, options: BenchOptions) -> float:
        return room_kept(options)

    def free(self) -> int | None:
        return self.health.free()

    def held(self, pid: int) -> int | None:
        return self.health.nvml.memory_of(pid) if self.health.nvml else None

    def stopwatch(
        self, checker: Checker, twin: Session, options: BenchOptions, rng: random.Random, tick: Tick
    ) -> CudaStopwatch:
        from kbrl_async.kernels.verify.cuda.stopwatch import CudaStopwatch

        return CudaStopwatch(checker, twin, options, rng, tick, self.health.nvml, self.health.calibration)

    def prove(
        self, checker: Checker, candidate: Candidate, options: BenchOptions, rng: random.Random, tick: Tick
    ) -> None:
        with self._unproven_without_memory(checker):
            self.stopwatch(checker, checker.reference.session, options, rng, tick).prove(candidate)
        self.refuse_short(checker)

    def refuse_short(self, checker: Checker) -> None:
        """What has a fault by now is not timed. A candidate can ask for what no GPU has: it is waited for once."""
        assert isinstance(checker.reference, CudaReference)
        if checker.fault is not None:
            return
        self._refuse_short(checker.reference)
        is_short = checker.session is not None and checker.session.is_short
        if is_short and self.is_crowded and not self._has_given_way:
            raise NoMemory("the library found too little memory for the candidate's usual way")

    def prove_last(self, checker: Checker) -> None:
        """Of who is watched."""
        from kbrl_async.kernels.verify.cuda.own_kernels import CapturedKernels
        from kbrl_async.kernels.verify.cuda.sides import Sides

        if checker.fault is not None or not (checker.is_untrusted and checker.is_proven):
            return
        if not isinstance(checker.session, CudaSession):
            return
        sides = Sides(checker, checker.reference.session, random.SystemRandom())
        with self._unproven_without_memory(checker):
            try:
                may_lack = self.is_crowded and not self._has_given_way
                checker.refuse(CapturedKernels(checker, sides).of_watched(may_lack))
            except CandidateFault as fault:
                checker.accuse(fault)

    @contextlib.contextmanager
    def _unproven_without_memory(self, checker: Checker) -> Iterator[None]:
        """Where there is none for a proof nothing is proven, once others have given way."""
        try:
            yield
        except NoMemory as short:
            if not self._has_given_way:
                raise
            checker.refuse(proof.unseen(short.cause))

    def ended(self, fault: CandidateFault, pid: int, zygote: Zygote) -> None:
        self.health.check(pid)

    def settle(self) -> None:
        for started in (self.spares, self.homes, self.replays):
            if started is not None:
                started.settle()

    def restart(self) -> None:
        self.give_back()
        if self.reservations is not None:
            self.reservations.hold(0)

    def close(self) -> None:
        self._end_processes()
        if self.reservations is not None:
            self.reservations.close()
        self.reservations = None

    def _clear_processes(self) -> None:
        if self.replays is not None:
            self.replays.shrink()
        for waiting in (self.homes, self.spares):
            if waiting is not None:
                waiting.clear()

    def _end_processes(self) -> None:
        for started in (self.spares, self.homes, self.replays):
            if started is not None:
                started.close()
