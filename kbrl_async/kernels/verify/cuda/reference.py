"""A reference on a GPU: its weights, draws, inputs and expected outputs live in device memory, and it times as well.

One child serves every candidate of a problem, for checking and for timing, and then the next problem: unlike on a CPU,
a process's age does not show in its kernels' times (A against A: under 0.2 % from 20 µs on), and a fresh child costs a
quarter of a second, in which the driver makes no other's context. It is not done again by a player, as candidates are:
whatever has its memory mapped could let a candidate's kernels read what is expected of them; and it draws inputs and
computes in fp64, which is nothing that a recording has.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import psutil
import torch

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.backends import backend
from kbrl_async.kernels.cuda_driver import CudaError, driver
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.stages import span
from kbrl_async.kernels.verify import values, wire
from kbrl_async.kernels.verify.cuda.arena import DeviceArena
from kbrl_async.kernels.verify.cuda.prewarmed import PrewarmedChildren
from kbrl_async.kernels.verify.cuda.record.session import Recorders
from kbrl_async.kernels.verify.cuda.session import CudaSession, TimedSide
from kbrl_async.kernels.verify.known import Draws, Held, Offloaded, Redrawn, Sizes, outlines, size_of
from kbrl_async.kernels.verify.options import BenchOptions, Tick, no_tick
from kbrl_async.kernels.verify.reference import Reference
from kbrl_async.kernels.verify.session import CandidateFault, Judged, Session, Submission
from kbrl_async.kernels.verify.sets import Inconstant
from protocols.records import Fault, Problem

if TYPE_CHECKING:
    from kbrl_async.kernels.verify.family import Family

ARENA_BYTES = 64 << 20
"""At least, of a reference's arena: what fits is mapped once, and not three times."""
MOST_INSIDE = 256 << 20
"""Weights up to this many bytes lie in a recorder's arena; larger ones are mapped beside it."""
_PAGE = 2 << 20
BATCH_NS = 600_000
"""A timed batch lasts at least about this long: below it, the events' own noise and the wall clock's would show."""
MAX_BATCH = 16
_ARENA_SHARE = 0.06
"""Of the bench's memory, for one arena with more slots than the checks need."""
_BRIEF_BYTES = 1 << 30
"""The same where no careful measurement is asked for, beyond the slots that are checked: what reads and writes so much
takes a quarter of a millisecond. Every slot stands in four arenas, in memory that another bench could work in."""
_ROOM_SHARE = 0.4
"""As much as this of the bench's memory must be free before another reference is made; less, where benches share it."""
_SETTINGS = re.compile(r"\b(backends|environ|set_\w+|use_deterministic_algorithms)\b")
"""A problem whose text changes settings of its process has that process to itself."""
RECORDED_SHARE = 0.25
"""Of what a verifier may plan with, for one arena that a candidate is recorded or replayed in."""
_HOST_SHARE = 0.5
"""Of the host's memory that is free, what one reference may pin."""
_KEPT_SHARE = 0.25
"""Of the bench's memory, for all references kept: an engine or learner that starts anew needs its own again."""


class DoesNotFit(ProblemError):  # noqa: N818 - an answer as long as memory can be given back
    """The GPU has no memory for a reference, at least not now."""


class ReferencePlan(msgspec.Struct, frozen=True):
    """How a problem is run: `slots` places for inputs, `batch` forwards in one timed graph."""

    slots: int
    batch: int


def plan(elapsed_ns: float, bytes_a_slot: int, memory: int, slots: int, is_brief: bool = False) -> ReferencePlan:
    """Enough forwards for a batch, as far as memory goes. `is_brief`: not for a careful measurement.

    >>> plan(10_000.0, 1 << 20, 80 << 30, 3)
    ReferencePlan(slots=16, batch=16)
    >>> plan(3e6, 1 << 28, 80 << 30, 3)
    ReferencePlan(slots=3, batch=1)
    >>> plan(6e4, 1 << 28, 80 << 30, 3), plan(6e4, 1 << 28, 80 << 30, 3, is_brief=True)
    (ReferencePlan(slots=10, batch=10), ReferencePlan(slots=4, batch=4))
    """
    room = max(1, int(memory * _ARENA_SHARE) // max(1, bytes_a_slot))
    timed = min(room, max(slots, _BRIEF_BYTES // max(1, bytes_a_slot))) if is_brief else room
    batch = min(MAX_BATCH, timed, max(1, math.ceil(BATCH_NS / max(elapsed_ns, 1.0))))
    return ReferencePlan(max(batch, min(slots, max(room, 2))), batch)


class CudaReference(Reference):
    records, lends, frees = False, True, True

    def __init__(
        self,
        zygote: Zygote,
        problem: Problem,
        options: BenchOptions,
        rng: random.Random,
        homes: PrewarmedChildren,
        spares: PrewarmedChildren,
        tick: Tick = no_tick,
        claim: Callable[[int], None] = lambda size: None,
        has_neighbours: Callable[[], bool] = lambda: False,
    ) -> None:
        """`homes`: processes for references; `spares`: for candidates that are watched. `claim` is told how much memory
        is planned with as soon as that is known, and raises where it has to be waited for. `has_neighbours`: whether
        other verifiers are on the GPU.
        """
        self._claim, self.has_neighbours = claim, has_neighbours
        self._homes, self.spares = homes, spares
        self._where = torch.device(options.device)
        self._zygote = zygote
        self._weights: DeviceArena | None = None
        self.offloaded = Offloaded()
        self._drawn: list[DeviceArena] = []
        self._outs: list[wire.TensorMeta] = []
        self.plan, self.forward_ns = ReferencePlan(options.slots, 1), 0.0
        try:
            super().__init__(zygote, problem, options, rng, tick)
        except (torch.OutOfMemoryError, CudaError) as error:
            raise DoesNotFit(f"{problem.problem_id} does not fit on this GPU ({error})"[:300]) from error

    def _begin(self, zygote: Zygote) -> Session:
        options = self._options
        self.copies = True
        setup = wire.Setup(self.problem.source, "Model", self.seed, device=options.device)
        with span("a reference's process"):
            session = CudaSession(zygote, setup, (), options.limits, options.reference_deadline_s, self._homes)
            metas = [*session.ready.init_tensors, *(meta for _, meta in session.ready.weights)]
            try:
                self._weights = session.fetch(metas, options.reference_deadline_s) if metas else None
            except BaseException:
                session.close()
                raise
        return session

    def retire(self) -> None:
        assert isinstance(self.session, CudaSession)
        if not (_SETTINGS.search(self.problem.source) or self.session.is_short):  # its library keeps the way it took
            self.session.rest()
        self.close()

    def close(self) -> None:
        self.session.close()
        for arena in (*self._drawn, *((self._weights,) if self._weights else ())):
            arena.close()
        self._drawn, self._weights = [], None

    def setup(self, code: Submission) -> wire.Setup:
        made = super().setup(code)
        return msgspec.structs.replace(made, device=self._options.device, weights_bytes=self.weights_bytes)

    def open(self, zygote: Zygote, code: Submission, deadline_s: float) -> CudaSession:
        """The weights are copied for each child: it can write to what it is given."""
        with self._copied_weights() as fds:
            return CudaSession(zygote, self.setup(code), fds, self._options.limits, deadline_s, self.spares)

    def record(
        self,
        recorders: Recorders,
        code: Submission,
        slots: list[list[wire.TensorMeta]],
        start: int,
        deadline_s: float,
        is_brief: bool = False,
    ) -> bytes:
        """What a candidate's forward does over inputs at these places of the recorders' arena, as an encoded
        `Recording`; its own memory begins at `start`. What lies at those places are examples, no secrets. `is_brief`:
        as in `wire.RecordForward`, for languages whose kernels are not tuned at their first call.
        """

        place = (recorders.arena.size - self.inside_bytes) // _PAGE * _PAGE if self.inside_bytes else 0

        def fill(arena: DeviceArena) -> None:
            if place and self._weights is not None:
                arena.raw[place : place + self._weights.size].copy_(self._weights.raw)
            for places in slots:
                for meta, example in zip(places, self.examples, strict=True):
                    arena.view(meta).zero_() if example.is_meta else arena.view(meta).copy_(example)

        is_brief = is_brief and not backend(code.backend).may_tune
        order = wire.RecordForward(self.setup(code), self.tree, slots, start, place, is_brief)
        with contextlib.nullcontext(()) if place else self._copied_weights() as fds:
            return recorders.record(order, fds, deadline_s, fill)

    @contextlib.contextmanager
    def _copied_weights(self) -> Iterator[tuple[int, ...]]:
        """The descriptor of a copy of the weights, where there are any."""
        if self._weights is None:
            yield ()
            return
        copied = DeviceArena.new(self._weights.size, self._where, self._weights.is_on_host)
        copied.raw.copy_(self._weights.raw)
        torch.cuda.synchronize()
        fd = copied.export()
        try:
            yield (fd,)
        finally:
            os.close(fd)
            copied.close()

    def capture_refused(self) -> str:
        """Why it can't be timed as a graph, or an empty string: then what is replayed would have no equal."""
        assert isinstance(self.session, CudaSession)
        known = self.session.captured or self.session.capture(self.plan.batch, self._options.reference_deadline_s)
        return known.refused

    def attach(self, session: Judged) -> None:
        assert isinstance(session, TimedSide)
        assert isinstance(self.session, CudaSession)
        if self.offloaded.inputs:
            self.session.move(to_host=True)
        session.attach(self.tree, self.examples, self.plan.slots, outs=self._outs)
        if isinstance(session, CudaSession) and session is not self.session:
            self.spares.refill()  # the next one gets ready while this one is being checked

    def twin(self, zygote: Zygote, is_replayed: bool = False) -> Session:
        return self.session

    def release(self, twin: Session) -> None:
        """Kept for the next candidate."""

    def refresh(self) -> None:
        try:
            super().refresh()
        except Inconstant as error:
            error.is_short = self.session.is_short
            raise
        except (torch.OutOfMemoryError, CudaError) as error:
            raise DoesNotFit(f"{self.problem.problem_id} does not fit on this GPU ({error})"[:300]) from error
        self.session.call(wire.OP_FREE, 0, self._options.reference_deadline_s)
        torch.cuda.empty_cache()

    def _failed(self, fault: CandidateFault) -> ProblemError:
        """Memory that its process does not find may be others'."""
        if fault.kind is Fault.OUT_OF_MEMORY:
            return DoesNotFit(f"{self.problem.problem_id} does not fit on this GPU ({fault.text})"[:300])
        return super()._failed(fault)

    def _prepare(self) -> None:
        """What is drawn first has its place among others' plans already."""
        self._close_drawn()
        (inputs, outputs), memory = self.ready.outline, self.plannable_bytes()
        draws, slots = self._options.pool, self._options.slots
        self.offloaded = Offloaded()
        self._look_at_host()
        sizes = self._placed(Sizes(inputs, outputs, self.state_bytes, frees=self.frees), memory)
        sizes.refuse(self.problem.problem_id, memory)
        is_kept, widens = sizes.are_kept(memory, draws, slots), sizes.widened <= memory
        planned = sizes.peak(is_kept, widens, draws, slots) if outputs else 0
        # the first draw goes to the host right away, where the arena lies there
        first = sizes if self.offloaded.inputs else msgspec.structs.replace(sizes, drawn=inputs)
        self._claim(max(planned, first.made))
        super()._prepare()

    def _fitting(self, sizes: Sizes, memory: int) -> Sizes:
        inside = max(self.inside, 2 * self.inside - sizes.outputs)
        is_replayable = 3 * sizes.inputs + 2 * sizes.outputs <= RECORDED_SHARE * memory
        return sizes.placed(memory, inside, self._host_room, is_replayable)

    def _look_at_host(self) -> None:
        """What it has there already is its own."""
        has_any = driver().has_host_memory(self._where.index or 0)
        room = psutil.virtual_memory().available + self._pinned_bytes
        self._host_room = int(_HOST_SHARE * room) if has_any else 0

    def _placed(self, sizes: Sizes, memory: int) -> Sizes:
        """What was on the host once stays there until the next secrets are drawn. What has room for all sets at once
        lies on the GPU, whatever forward needs inside: it is replayed there.
        """
        is_kept = sizes.are_kept(memory, self._options.pool, self._options.slots)
        found = Offloaded() if is_kept else self._fitting(sizes, memory).offloaded
        self.offloaded = Offloaded(self.offloaded.inputs or found.inputs, self.offloaded.weights or found.weights)
        assert isinstance(self.session, CudaSession)
        self.session.is_far = self.offloaded.inputs
        if self._weights is not None:
            self._weights.move(to_host=self.offloaded.weights)
            if not self.offloaded.weights:
                self._weights.let_go()
        return msgspec.structs.replace(sizes, offloaded=self.offloaded)

    def _close_drawn(self) -> None:
        while self._drawn:
            self._drawn.pop().close()

    def _draw(self, seed: int) -> list[torch.Tensor]:
        """Where draws are not kept, in memory of torch's: an arena has to be held as long as anything lies in it."""
        if not self.keeps_sets:
            return self.own(self._lend(seed))
        assert isinstance(self.session, CudaSession)
        with span("a reference's first draw"):
            self.tree, tensors, arena = self.session.drawn(seed, self._options.reference_deadline_s)
        self._drawn.append(arena)
        self.examples = tensors
        return [values.flat(tensor) for tensor in tensors]

    def _lend(self, seed: int) -> list[torch.Tensor]:
        """Where the reference finds its inputs; in memory of torch's where no such place is there."""
        assert isinstance(self.session, CudaSession)
        self.tree, tensors, arena = self.session.lent(seed, self._options.reference_deadline_s)
        self.examples = outlines(tensors)
        if arena is None:
            return [values.flat(tensor) for tensor in tensors]
        copies = [values.flat(tensor).clone() for tensor in tensors]
        del tensors
        arena.close()
        return copies

    def own(self, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
        lent = {place.data_ptr() for places in self.session.slots[:1] for place in places}
        return [block.clone() if block.data_ptr() in lent else block for block in blocks]

    def held(self, blocks: list[torch.Tensor]) -> Held:
        """Where sets are not kept, what is expected stays in the reference's arena, and what was lent does, too."""
        if self.keeps_sets:
            return super().held(blocks)
        session, outcome = self.session, self._run(wire.OP_RUN, blocks)
        assert isinstance(session, CudaSession)
        uses = session.uses
        return Held(blocks, [session.look(meta) for meta in outcome.tensors], lambda: session.uses == uses)

    def _more_draws(self, seeds: list[int]) -> Draws:
        """All at once: memory that two processes share costs each of them milliseconds, however little it is."""
        if not self.examples:
            return super()._more_draws(seeds)
        assert isinstance(self.session, CudaSession)
        self.tick()
        deadline = self._options.reference_deadline_s
        with span("a reference's more draws"):
            _, tensors, arena = self.session.drawn(seeds[0], deadline, tuple(seeds[1:]))
        self._drawn.append(arena)
        flat, count = [values.flat(tensor) for tensor in tensors], len(self.examples)
        return [flat[begin : begin + count] for begin in range(0, len(seeds) * count, count)]

    def plannable_bytes(self) -> int:
        return memory_of(self._options)

    @property
    def drawn_beside(self) -> int:
        assert isinstance(self.session, CudaSession)
        known = self.session.drawn_beside
        return super().drawn_beside if known is None else known

    @property
    def kept_draws(self) -> int:
        return sum(arena.device_bytes for arena in self._drawn)

    def _planned(self, outputs: list[torch.Tensor], mutated: bool = False) -> tuple[bool, bool]:
        """What forward needs inside it needs on one side after the other, and on both where they are captured to be
        timed, when no output but that is held; as far as this bench may plan with it.
        """
        planned = super()._planned(outputs, mutated)
        inside = max(self.inside, 2 * self.inside - size_of(outputs))
        self._claim(max(self.needed, min(self.needed + inside, self.plannable_bytes())))
        return planned

    def forget_outputs(self) -> None:
        self.session.call(wire.OP_FREE, 0, self._options.reference_deadline_s)
        torch.cuda.empty_cache()

    def _attach_own(self, draws: Draws) -> None:
        """Twice: first to see the outputs and the time, then with as many slots as that asks for."""
        session, deadline = self.session, self._options.reference_deadline_s
        assert isinstance(session, CudaSession)
        if not self.keeps_sets:
            self._close_drawn()
        least = ARENA_BYTES
        session.attach(self.tree, self.examples, 1, least_bytes=least)
        self._fill(draws)
        answered = session.call(wire.OP_RUN, 0, deadline)
        self._outs = [_plain(meta) for meta in answered.tensors]
        self.inside = max(0, answered.inside - sum(map(values.size_of_meta, self._outs)))
        self._planned(
            [torch.empty(meta.shape, dtype=values.dtype_of(meta.dtype), device="meta") for meta in self._outs]
        )
        session.is_widened = self.widens
        session.attach(self.tree, self.examples, 1, outs=self._outs, least_bytes=least)
        self._fill(draws)
        elapsed = min(session.event(0, deadline).elapsed_ns for _ in range(3))
        self.forward_ns = elapsed
        if self.keeps_sets:
            options = self._options
            is_brief = options.recipe.enough_below > 0
            self.plan = plan(elapsed, self.slot_bytes, memory_of(options), options.slots, is_brief)
            session.attach(self.tree, self.examples, self.plan.slots, outs=self._outs, least_bytes=least)
        else:
            self.plan = ReferencePlan(1, 1)  # it is attached so

    def _fill(self, draws: Draws) -> None:
        """Its slot, with the first of these."""
        first = draws.lent(0) if isinstance(draws, Redrawn) else draws[0]
        for place, block in zip(self.session.slots[0], first, strict=True):
            if place.data_ptr() != block.data_ptr():
                place.copy_(block)

    @property
    def slot_bytes(self) -> int:
        """Of the inputs and outputs of one call."""
        return size_of(self.examples) + sum(map(values.size_of_meta, self._outs))

    @property
    def weights_bytes(self) -> int:
        return self._weights.size if self._weights else 0

    @property
    def inside_bytes(self) -> int:
        """Of the weights, what lies in a recorder's arena."""
        return self.weights_bytes if self.weights_bytes <= MOST_INSIDE else 0

    @property
    def device_bytes(self) -> int:
        return sum(arena.device_bytes for arena in self._arenas) + sum(size_of(one.known.held) for one in self.sets)

    @property
    def host_bytes(self) -> int:
        return super().host_bytes + self._pinned_bytes

    @property
    def far_bytes(self) -> int:
        return sum(arena.size for arena in self._arenas if arena.is_on_host)

    @property
    def _pinned_bytes(self) -> int:
        return sum(arena.host_bytes for arena in self._arenas)

    @property
    def _arenas(self) -> list[DeviceArena]:
        assert isinstance(self.session, CudaSession)
        return [arena for arena in (*self._drawn, self._weights, self.session.shared) if arena is not None]


def memory_of(options: BenchOptions) -> int:
    """Bytes of the GPU that this bench may plan with."""
    return int(options.memory_share * torch.cuda.get_device_properties(torch.device(options.device)).total_memory)


def room_kept(options: BenchOptions) -> float:
    """Bytes that its references may take together."""
    return _KEPT_SHARE * memory_of(options)


def staying(sizes: Sequence[int], most: int, room: float) -> int:
    """How many references may stay beside another one, if that is as large as the largest of them: `most`, or what
    `room` bytes hold. `sizes`: theirs, the one used last first. Whoever has to go goes before the other one is made,
    and leaves it its process.

    >>> staying([5, 5, 5], 3, 17)
    2
    >>> staying([20], 3, 17)
    0
    """
    largest = max(sizes, default=0)
    return sum(together + largest <= room for together in itertools.accumulate(sizes[:most]))


def make_room(kept: OrderedDict[str, Family], options: BenchOptions, homes: PrewarmedChildren) -> bool:
    """Close the references used longest ago until the GPU has room for another; whether it has."""
    while not (has_room := _is_free(options)) and kept:
        retire(kept, len(kept) - 1, homes)
    return has_room


def retire(kept: OrderedDict[str, Family], count: int, homes: PrewarmedChildren) -> None:
    """Close the references used longest ago until so many are kept, and return when their memory is there again."""
    if len(kept) <= count:
        return
    while len(kept) > count:
        kept.popitem(last=False)[1].retire()
    homes.clear()  # until then the driver has its memory


def _is_free(options: BenchOptions) -> bool:
    torch.cuda.empty_cache()
    wanted = options.memory_share * _ROOM_SHARE * memory_of(options)  # others take of what is free, too
    return torch.cuda.mem_get_info(torch.device(options.device))[0] >= wanted


def _plain(meta: wire.TensorMeta) -> wire.TensorMeta:
    return msgspec.structs.replace(meta, kind="Tensor")
