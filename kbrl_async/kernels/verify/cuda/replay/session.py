"""A candidate as data: what `Checker` and `CudaStopwatch` ask of a child, answered by a player that does its recorded
forwards again in memory that the bench holds too.

::

    arena:  [inputs of all slots, gaps of secret sizes] [image: restored before each run] [all else: poisoned]
    call ─▶ restore, poison, wait ─▶ Run ─▶ outputs of this slot are read here; those of others must still be poison

Invariants
* Everything that a verdict stands on is read, written, poisoned and compared here; a player only runs kernels.
* Nothing but inputs, image and what the device keeps in variables of a module is the same at the beginning of two
calls.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch

from kbrl_async.kernels import stages
from kbrl_async.kernels.sandbox import Isolation
from kbrl_async.kernels.verify import allowed, compare, values, wire
from kbrl_async.kernels.verify.cuda.arena import DeviceArena
from kbrl_async.kernels.verify.cuda.replay import orders
from kbrl_async.kernels.verify.cuda.replay.host import ReplayHost, Unreplayable
from kbrl_async.kernels.verify.cuda.replay.images import Image
from kbrl_async.kernels.verify.cuda.replay.reach import own_kernels_behind
from kbrl_async.kernels.verify.cuda.replay.stretches import (
    POISON,
    Span,
    Stretches,
    complement,
    joined,
    stretches_of,
    touches,
)
from kbrl_async.kernels.verify.cuda.session import TimedCall
from kbrl_async.kernels.verify.hoarding import NoMemory
from kbrl_async.kernels.verify.layouts import TensorCheck, are_parts, never
from kbrl_async.kernels.verify.operators import copies
from kbrl_async.kernels.verify.recording import Kernel, Memcpy, Operator, Recording, counted, digest, plain, ways
from kbrl_async.kernels.verify.session import CandidateFault, ForwardOutcome
from kbrl_async.kernels.verify.validation import overlap, span
from protocols.records import REPLAYED, Fault

_ORDERS = 2
_TELLS_NS = 1e6
_MOST_STRETCHES = 64
_BATCHED = "forward over one input also writes the outputs of another: one call did the work of several"
_STRAY = "forward writes to memory that is neither its output nor its own: an index or a pointer is wrong"
_KEPT = "an output returned earlier was overwritten by a later call: allocate a new output in each call"


class ReplaySession:
    """One candidate in a player. Raises `CandidateFault` for what its kernels did, `InfraError` for what the host did.

    `recorded_in`: the arena of its recorder, which holds the image. `inputs`: as `stretches.place_inputs` gave them.

    :raises Unreplayable: its machine code can't be loaded here.
    """

    trust, trust_reason = REPLAYED, ""
    keeps_outputs, reads_in_place, is_trusted = False, True, True
    gives_back = False

    def __init__(
        self,
        host: ReplayHost,
        recording: Recording,
        images: list[Image],
        inputs: list[list[wire.TensorMeta]],
        recorded_in: DeviceArena,
        rng: random.Random,
        is_shared: bool = False,
        may_keep: bool = False,
    ) -> None:
        """`may_keep`: one buffer may hold the outputs of several calls, each until the next."""
        self.is_shared = is_shared
        """Its recorder had served others, who may have spoilt it: what counts against it is found out once more."""
        self._host, self._recording, self._inputs, self._rng = host, recording, inputs, rng
        self.isolation: Isolation = host.isolation
        self._ways = ways(recording.forwards)
        every = [recording.forwards[slots[0]] for slots in self._ways]
        self.kernels = {name: found for forward in reversed(every) for name, found in counted(forward).items()}
        self.plan = digest(every)
        self._image = [recorded_in.raw[begin:end].clone() for begin, end in recording.image]
        self._outputs = [[plain(meta) for meta in forward.outputs] for forward in recording.forwards]
        taken = [*recording.image, *(span(meta) for slot in inputs for meta in slot)]
        self._rest = complement(taken, recording.used)
        self._taken = taken
        self._orders: list[tuple[int, ...]] = []
        self._lacking: list[tuple[int, ...]] = []
        """As timed as the others, but without one of the slots."""
        self._captured = 0
        self._is_new, self._is_tried = True, False
        self.is_proven = False
        self.forward_ns = math.inf
        self._arena = host.reserve(recording.used)
        self._see()
        self.has_operators = host.load(images, recording)
        self._is_warm = not self.has_operators
        found = self._shared_outputs()
        self.is_kept = may_keep and found is not None
        self.fault: CandidateFault | None = None if may_keep else found
        """What is wrong with it before it is called."""

    @property
    def host_pid(self) -> int:
        """No process of the candidate's is left to wait for."""
        return 0

    @property
    def is_short(self) -> bool:
        return self._host.is_short

    @property
    def image(self) -> list[torch.Tensor]:
        """What lasts from call to call, as it is before each."""
        return list(self._image)

    def close(self) -> None:
        for held in (self.slots, self._image, self._seen, self._restored):
            held.clear()
        self._poisoned.clear()
        self._host.unload()

    def attach(
        self,
        tree: wire.Tree,
        tensors: list[torch.Tensor],
        slots: int,
        copies: bool = True,
        outs: list[wire.TensorMeta] | None = None,
    ) -> None:
        """The same addresses in other memory; the first time everything is where it should be already."""
        if self._is_new:
            self._is_new = False
            return
        self._arena = self._host.reserve(self._recording.used, is_new=True)
        self._see()

    def _see(self) -> None:
        raw: torch.Tensor = self._arena.raw
        self.slots = [[values.flat(self._arena.view(meta)) for meta in slot] for slot in self._inputs]
        self._poisoned: dict[int | None, Stretches] = {None: Stretches(raw, self._rest)}
        self._seen = [[self._arena.view(meta) for meta in slot] for slot in self._outputs]
        self._restored = [raw[begin:end] for begin, end in self._recording.image]

    def _shared_outputs(self) -> CandidateFault | None:
        """Outputs of two calls in one place, or in memory that lasts: the later call overwrites the earlier's."""
        inputs = [span(meta) for slot in self._inputs for meta in slot]
        own = [[one for one in map(span, slot) if not touches(one, inputs)] for slot in self._outputs]
        kept = any(touches(one, self._recording.image) for slot in own for one in slot)
        if kept or overlap(one for slot in own for one in joined(slot)):
            return CandidateFault(Fault.INCORRECT, _KEPT, "output_overwritten", self)
        return None

    # ── checking ────────────────────────────────────────────────────────────────────────────────────────────────────

    def poison(self, slots: int | None = None) -> None:
        """Before a run: nothing of an earlier one is left. `slots`: only those up to this number run, outputs of others
        stay as they are.
        """
        if self.is_kept:
            slots = None  # outputs of others are this one's, too
        if slots not in self._poisoned:
            others = [span(meta) for slot in self._outputs[slots:] for meta in slot]
            rest = complement([*self._taken, *others], self._recording.used)
            self._poisoned[slots] = Stretches(self._arena.raw, rest)
        self._poisoned[slots].poison()
        if self._image:
            torch._foreach_copy_(self._restored, self._image)

    def call(self, op: int, slot: int, deadline_s: float) -> ForwardOutcome:
        forward = self._recording.forwards[slot]
        if self.fault is not None:
            raise self.fault
        if op != wire.OP_RUN:
            return ForwardOutcome(0, 0, 0, ["V", None], [])
        elapsed = self.run(slot, deadline_s)
        others = [other for other in range(len(self.slots)) if other != slot]
        if others and not self.is_kept:  # a secret one: whoever writes to all is found at once, and there are ten calls
            self._refuse_writing(slot, self._rng.choice(others), deadline_s)
        return ForwardOutcome(elapsed, 0, 0, forward.tree, self._outputs[slot])

    def run(self, slot: int, deadline_s: float, is_muted: bool = False, left_out: tuple[int, ...] = ()) -> int:
        """One forward over what is written to the slot; nanoseconds until it answered. `left_out`: numbers of nodes."""
        if not self._is_warm:
            self.poison()
            torch.cuda.synchronize()
            self._done(orders.WarmUp(slot), deadline_s)
            self._is_warm = True
        with stages.span("poisoned"):
            self.poison()
            torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        with stages.span("run"):
            self._done(orders.RunForward(slot, is_muted, left_out), deadline_s)
        elapsed = time.perf_counter_ns() - begin
        if not is_muted and not left_out:
            self.forward_ns = min(self.forward_ns, elapsed)
        return elapsed

    def try_once(self, deadline_s: float) -> None:
        """What libraries do at their first call, and what can't be captured here, shows now. Of own kernels only the
        graph is made: they meet nothing new at a first call, and one may take long.
        """
        if self.has_operators:
            self.run(0, deadline_s)
        else:
            self._timed(orders.Time((0,), 0), deadline_s)
        self._is_tried = True

    def _done(self, order: orders.WarmUp | orders.RunForward, deadline_s: float) -> None:
        with self._as_tried():
            self._host.done(order, deadline_s)

    def _timed(self, order: orders.Time, deadline_s: float) -> float:
        with self._as_tried():
            return self._host.timed(order, deadline_s)

    @contextlib.contextmanager
    def _as_tried(self) -> Iterator[None]:
        """What was recorded of one slot could be done again, so that of the others can, unless somebody forged it.

        :raises Unreplayable: it is only being tried.
        """
        try:
            yield
        except Unreplayable as refusal:
            if not self._is_tried:
                raise
            text = f"what was recorded of it can't be done again: {refusal}"
            raise CandidateFault(Fault.RUNTIME_ERROR, text) from refusal

    def _refuse_writing(self, slot: int, other: int, deadline_s: float) -> None:
        """To the outputs of another slot than those that ran. That is an accusation only together with a second fact:
        what lies there is what forward makes of that slot's inputs, and far from what it made of its own.
        """
        outputs = self._outputs[other]
        written = {number: self._copy(meta) for number, meta in enumerate(outputs) if not self._is_poison(meta)}
        if not written:
            return
        own = [self._copy(self._outputs[slot][number]) for number in written]
        self.run(other, deadline_s)
        theirs = [self._copy(outputs[number]) for number in written]
        is_work = all(map(compare.is_roughly, written.values(), theirs))
        if is_work and any(map(compare.is_much_nearer, written.values(), theirs, own)):
            raise CandidateFault(Fault.CHEATING, _BATCHED, "slot_batched")
        raise CandidateFault(Fault.ILLEGAL_ACCESS, _STRAY, "stray_write")

    def _copy(self, meta: wire.TensorMeta) -> torch.Tensor:
        return self._arena.view(meta).clone()

    def _is_poison(self, meta: wire.TensorMeta) -> bool:
        """Of what was poisoned: an output that is an input, as the reference's may be, was not."""
        if any(begin <= meta.place < end for begin, end in self._rest):
            begin, end = span(meta)
            return compare.is_all(self._arena.raw[begin:end], POISON)
        return True

    def again(self, op: int, slot: int, metas: list[wire.TensorMeta], deadline_s: float) -> list[wire.TensorMeta]:
        return metas

    def read(self, meta: wire.TensorMeta) -> torch.Tensor:
        """An output where it lies, as it is until the next call."""
        return self._arena.view(meta)

    look = read

    def disarm(self, artifacts: list[Path], whole: bool = False) -> int:
        return 0

    # ── timing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def capture(self, count: int, deadline_s: float) -> wire.Captured:
        """Secret orders of the first `count` slots, and one without a slot. Their graphs are made now: later others
        stand still.
        """
        if count != self._captured:
            self._captured = count
            self._orders = [self._shuffled(count) for _ in range(_ORDERS if count > 1 else 1)]
            self._lacking = [self._shuffled(count)[1:] for _ in range(_ORDERS if count > 1 else 0)]
            for order in {*self._orders, *self._lacking}:
                self._timed(orders.Time(order, 0), deadline_s)
        return wire.Captured(0, {name: count for name, (count, _) in self.kernels.items()})

    def _shuffled(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.sample(range(count), count))

    def replay(self, times: int, deadline_s: float) -> TimedCall:
        """Over the slots of `capture`, `times` over; the cost of two events where that is 0."""
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        order = orders.Time(self._rng.choice(self._orders), times) if times else orders.Time(())
        elapsed = self._timed(order, deadline_s)
        wall = time.perf_counter_ns() - begin
        return TimedCall(elapsed, wall) if times else TimedCall(0.0, wall, elapsed)

    def leaves_out(self, deadline_s: float) -> None:
        """Timed runs that look like any other, but one slot is not in them: its outputs must stay poison."""
        for order in self._lacking:
            missing = next(slot for slot in range(self._captured) if slot not in order)
            self.poison(self._captured)
            torch.cuda.synchronize()
            self._timed(orders.Time(order), deadline_s)
            self._refuse_writing(order[0], missing, deadline_s)

    def outputs(self, first: int, end: int) -> list[torch.Tensor]:
        slots = self._seen[first:end]
        if len(slots) == 1:
            return [view.unsqueeze(0) for view in slots[0]]
        return [torch.stack([slot[i] for slot in slots]) for i in range(len(slots[0]))]

    def event(self, slot: int, deadline_s: float) -> TimedCall:
        raise NotImplementedError("what was recorded can always be timed as a graph")

    def events(self, times: int, deadline_s: float) -> TimedCall:
        raise NotImplementedError("what was recorded can always be timed as a graph")

    # ── whose kernels ───────────────────────────────────────────────────────────────────────────────────────────────

    def own_kernels(self, source: str) -> list[str]:
        """Names of what was built from the candidate's source."""
        return [name for name, (_, is_own) in self.kernels.items() if is_own]

    def secret_slots(self, count: int, most: int) -> list[int]:
        """Of the first `count` slots one of each way that forward goes, and more up to `most` where there are so many:
        a forward may know its inputs by their place, and a kernel, too.
        """
        timed = [[slot for slot in slots if slot < count] for slots in self._ways]
        chosen = [self._rng.choice(slots) for slots in timed if slots]
        others = [slot for slot in range(count) if slot not in chosen]
        chosen += self._rng.sample(others, max(0, min(most - len(chosen), len(others))))
        return self._rng.sample(chosen, len(chosen))

    @property
    def bare_trace(self) -> wire.Trace | None:
        """What forward consists of over inputs for which it has no own kernel; None where it always has one."""
        for slots in self._ways:
            found = counted(self._recording.forwards[slots[0]])
            if not any(is_own for _, is_own in found.values()):
                return wire.Trace({}, {allowed.base_of(name): (count, 0) for name, (count, _) in found.items()})
        return None

    def muted(
        self, kernels: list[str], deadline_s: float, renew: Callable[[], None], slot: int = 0
    ) -> tuple[float, float]:
        """Nanoseconds of a forward over this slot, and of one without own kernels, whose outputs then lie there.
        `renew` comes before the last run: those that were timed may have changed their inputs.
        """
        nothing = self._timed(orders.Time(()), deadline_s)
        whole = self._least(slot, False, deadline_s)
        try:
            self.poison()
            left = self._least(slot, True, deadline_s)
            renew()
            self.run(slot, deadline_s, is_muted=True)
        except CandidateFault as fault:
            if fault.by is not None:  # the reference, asked by `renew`: that shows nothing
                raise
            self._needs_own(fault)
            left = nothing
        return max(0.0, whole - nothing), max(0.0, left - nothing)

    def own_alone(self, slot: int, deadline_s: float) -> float:
        """Nanoseconds of the own kernels over what a whole forward over this slot has left in memory; 0 where they
        fault on that, or never end.
        """
        nodes = self._recording.forwards[slot].nodes
        others = tuple(number for number, node in enumerate(nodes) if not isinstance(node, Kernel))
        try:
            nothing = self._timed(orders.Time(()), deadline_s)
            self.run(slot, deadline_s)
            return max(0.0, self._least(slot, False, deadline_s, others) - nothing)
        except CandidateFault:
            self._revive()
            return 0.0

    def is_whole_without_own(self, slot: int, deadline_s: float) -> bool:
        """Whether a forward over this slot ends without own kernels; its outputs then lie there."""
        try:
            self.run(slot, deadline_s, is_muted=True)
        except CandidateFault as fault:
            self._needs_own(fault)
            return False
        return True

    def own_behind(self, inputs: Collection[int], slot: int) -> tuple[int, ...] | None:
        """As `own_kernels_behind` says, of these inputs of a slot."""
        return own_kernels_behind(
            self._recording.forwards[slot], [span(self._inputs[slot][number]) for number in inputs]
        )

    def without(self, nodes: tuple[int, ...], slot: int, deadline_s: float) -> None:
        """A forward over this slot without these nodes; what needs them finds poison."""
        try:
            self.run(slot, deadline_s, left_out=nodes)
        except CandidateFault as fault:
            self._needs_own(fault)

    def _needs_own(self, fault: CandidateFault) -> None:
        """An operator faults on poison: it needs what own kernels make.

        :raises NoMemory: or it found none, which shows nothing.
        """
        if fault.kind is Fault.OUT_OF_MEMORY:
            raise NoMemory(f"a forward without its own kernels found no memory: {fault.text}") from fault
        self._revive()

    def _revive(self) -> None:
        with self._as_tried():
            self._arena = self._host.revive()
        self._see()
        self._is_warm, self._captured = not self.has_operators, 0
        self.poison()

    def _least(self, slot: int, is_muted: bool, deadline_s: float, left_out: tuple[int, ...] = ()) -> float:
        """Of three runs; long ones tell at once."""
        order = orders.Time((slot,), 1, is_muted, left_out)
        least = self._timed(order, deadline_s)
        return least if least > _TELLS_NS else min(least, *(self._timed(order, deadline_s) for _ in range(2)))

    def answered(self, is_answer: TensorCheck, slot: int = 0, is_moved: TensorCheck = never) -> str:
        """After `muted`: the operator whose result already is the answer, as far as `is_answer(tensor)` says, and
        `is_moved(tensor)` of what only copies.
        """
        found = ""
        written: list[Span] = []
        results: dict[str, list[torch.Tensor]] = {}
        for node in self._recording.forwards[slot].nodes:
            if isinstance(node, Operator):
                name = allowed.base_of(node.name)
                if copies(name) and any(is_moved(self._arena.view(plain(meta))) for meta in node.results):
                    return name
                for meta in node.results if allowed.does_work(node.name) else ():
                    found, result = name, self._arena.view(plain(meta))
                    if is_answer(result):
                        return found
                    results.setdefault(found, []).append(result)
                written += map(span, node.results)
            elif isinstance(node, Memcpy):
                written.append((node.to, node.to + node.size))
        sizes = {math.prod(meta.shape) for meta in self._outputs[slot]}
        for operator, parts in results.items():
            if any(are_parts(parts, size, is_answer) for size in sizes):
                return operator
        return found if found and self._is_put_together(written, is_answer, slot) else ""

    def _is_put_together(self, written: list[Span], is_answer: TensorCheck, slot: int) -> bool:
        """Whether what operators and copies wrote side by side is the answer, of which each made a part."""
        for meta in self._outputs[slot]:
            size = math.prod(meta.shape) * values.dtype_of(meta.dtype).itemsize
            for begin in stretches_of(written, size)[:_MOST_STRETCHES]:
                if is_answer(self._arena.view(wire.TensorMeta(meta.dtype, (math.prod(meta.shape),), (1,), begin))):
                    return True
        return False
