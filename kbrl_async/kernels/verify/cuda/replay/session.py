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
import functools
import hashlib
import math
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kbrl_async.kernels import stages
from kbrl_async.kernels.sandbox import Isolation
from kbrl_async.kernels.verify import allowed, compare, values, wire
from kbrl_async.kernels.verify.cuda.arena import ALIGNMENT, BASE, DeviceArena
from kbrl_async.kernels.verify.cuda.replay import orders
from kbrl_async.kernels.verify.cuda.replay.host import ReplayHost, Unreplayable
from kbrl_async.kernels.verify.cuda.replay.images import Image
from kbrl_async.kernels.verify.cuda.session import TimedCall
from kbrl_async.kernels.verify.recording import Forward, Kernel, Memcpy, Node, Operator, Recording
from kbrl_async.kernels.verify.session import CandidateFault, ForwardOutcome
from kbrl_async.kernels.verify.validation import overlap, span
from protocols.records import REPLAYED, Fault

POISON = 0x7F
_GAPS = 32
"""A gap between two inputs is at most so many times the alignment."""
_LARGE, _PAGE, _PAGES = 1 << 20, 2 << 20, 3
_ORDERS = 2
_SMALL = _GAPS * ALIGNMENT
"""Stretches up to this many bytes are poisoned all at once."""
_TELLS_NS = 1e6
_MOST_STRETCHES = 64
_BATCHED = "forward over one input also writes the outputs of another: one call did the work of several"
_STRAY = "forward writes to memory that is neither its output nor its own: an index or a pointer is wrong"
_KEPT = "an output returned earlier was overwritten by a later call: allocate a new output in each call"
Span = tuple[int, int]


def place_inputs(
    tensors: list[torch.Tensor], slots: int, rng: random.Random
) -> tuple[list[list[wire.TensorMeta]], int]:
    """Places for the inputs of each slot, at distances that nobody can foresee, and their end."""
    placed: list[list[wire.TensorMeta]] = []
    end = 0
    for _ in range(slots):
        metas: list[wire.TensorMeta] = []
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            step = ALIGNMENT if size < _LARGE else _PAGE  # large ones begin with a page, as the driver's own do
            end = values.padded(end, step) + rng.randint(1, _GAPS if size < _LARGE else _PAGES) * step
            metas += values.layout([tensor], end, step)[0]
            end += values.padded(size, ALIGNMENT)
        placed.append(metas)
    return placed, values.padded(end + ALIGNMENT, _PAGE)


class ReplaySession:
    """One candidate in a player. Raises `CandidateFault` for what its kernels did, `InfraError` for what the host did.

    `recorded_in`: the arena of its recorder, which holds the image. `inputs`: as `place_inputs` gave them.

    :raises Unreplayable: its machine code can't be loaded here.
    """

    trust, trust_reason = REPLAYED, ""
    keeps_outputs = False
    reads_in_place = True
    is_trusted = True

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
        self.kernels = _count(recording.forwards[0])
        self.plan = _digest(recording.forwards[0])
        self._image = [recorded_in.raw[begin:end].clone() for begin, end in recording.image]
        self._outputs = [[_plain(meta) for meta in forward.outputs] for forward in recording.forwards]
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
        self._poisoned: dict[int | None, _Stretches] = {None: _Stretches(raw, self._rest)}
        self._seen = [[self._arena.view(meta) for meta in slot] for slot in self._outputs]
        self._restored = [raw[begin:end] for begin, end in self._recording.image]

    def _shared_outputs(self) -> CandidateFault | None:
        """Outputs of two calls in one place, or in memory that lasts: the later call overwrites the earlier's."""
        inputs = [span(meta) for slot in self._inputs for meta in slot]
        own = [[one for one in map(span, slot) if not _touches(one, inputs)] for slot in self._outputs]
        kept = any(_touches(one, self._recording.image) for slot in own for one in slot)
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
            self._poisoned[slots] = _Stretches(self._arena.raw, rest)
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
        what lies there is what forward makes of that slot's inputs, and not what it made of its own.
        """
        outputs = self._outputs[other]
        written = {number: self._copy(meta) for number, meta in enumerate(outputs) if not self._is_poison(meta)}
        if not written:
            return
        own = [self._copy(self._outputs[slot][number]) for number in written]
        self.run(other, deadline_s)
        is_work = all(compare.is_roughly(found, self._copy(outputs[number])) for number, found in written.items())
        if is_work and not all(map(compare.is_roughly, written.values(), own)):
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

    def disarm(self, artifacts: list[Path]) -> int:
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

    @property
    def trace(self) -> wire.Trace:
        """What forward consists of."""
        launches = {name: (count, 0) for name, (count, is_own) in self.kernels.items() if is_own}
        ops = {allowed.base_of(name): (count, 0) for name, (count, is_own) in self.kernels.items() if not is_own}
        return wire.Trace(launches, ops)

    def muted(self, kernels: list[str], deadline_s: float, renew: Callable[[], None]) -> tuple[float, float]:
        """Nanoseconds of a forward over slot 0, and of one without own kernels, whose outputs then lie in slot 0.
        `renew` comes before the last run: those that were timed may have changed their inputs.
        """
        nothing = self._timed(orders.Time(()), deadline_s)
        whole = self._least(False, deadline_s)
        try:
            self.poison()
            left = self._least(True, deadline_s)
            renew()
            self.run(0, deadline_s, is_muted=True)
        except CandidateFault as fault:
            if fault.by is not None:  # the reference, asked by `renew`: that shows nothing
                raise
            self._revive()
            left = nothing
        return max(0.0, whole - nothing), max(0.0, left - nothing)

    def _revive(self) -> None:
        """An operator faulted on poison: it needs what own kernels make, whose outputs then are poison."""
        with self._as_tried():
            self._arena = self._host.revive()
        self._see()
        self._is_warm, self._captured = not self.has_operators, 0
        self.poison()

    def own_behind(self, inputs: Collection[int]) -> tuple[int, ...] | None:
        """Numbers of the own kernels of a forward over slot 0 that come no sooner than what first reads one of these
        inputs; None where nothing is seen to read them.
        """
        spans = [span(self._inputs[0][number]) for number in inputs]
        nodes = self._recording.forwards[0].nodes
        first = next((number for number, node in enumerate(nodes) if _reads(node, spans)), None)
        if first is None:
            return None
        return tuple(number for number, node in enumerate(nodes) if number >= first and isinstance(node, Kernel))

    def without(self, nodes: tuple[int, ...], deadline_s: float) -> None:
        """A forward over slot 0 without these nodes; what needs them finds poison."""
        try:
            self.run(0, deadline_s, left_out=nodes)
        except CandidateFault:
            self._revive()

    def _least(self, is_muted: bool, deadline_s: float) -> float:
        """Of three runs; long ones tell at once."""
        least = self._timed(orders.Time((0,), 1, is_muted), deadline_s)
        if least > _TELLS_NS:
            return least
        return min(least, *(self._timed(orders.Time((0,), 1, is_muted), deadline_s) for _ in range(2)))

    def answered(self, is_answer: Callable[[torch.Tensor], bool]) -> str:
        """After `muted`: the operator whose result already is the answer, as far as `is_answer(tensor)` says."""
        found = ""
        written: list[Span] = []
        for node in self._recording.forwards[0].nodes:
            if isinstance(node, Operator):
                for meta in node.results if allowed.does_work(node.name) else ():
                    found = allowed.base_of(node.name)
                    if is_answer(self._arena.view(_plain(meta))):
                        return found
                written += map(span, node.results)
            elif isinstance(node, Memcpy):
                written.append((node.to, node.to + node.size))
        return found if found and self._is_put_together(written, is_answer) else ""

    def _is_put_together(self, written: list[Span], is_answer: Callable[[torch.Tensor], bool]) -> bool:
        """Whether what operators and copies wrote side by side is the answer, of which each made a part."""
        for meta in self._outputs[0]:
            size = math.prod(meta.shape) * values.dtype_of(meta.dtype).itemsize
            for begin in stretches_of(written, size)[:_MOST_STRETCHES]:
                if is_answer(self._arena.view(wire.TensorMeta(meta.dtype, (math.prod(meta.shape),), (1,), begin))):
                    return True
        return False


class _Stretches:
    """Memory that is poisoned together."""

    def __init__(self, raw: torch.Tensor, spans: Iterable[Span]) -> None:
        parts = [raw[begin:end] for begin, end in spans]
        self._large = [part for part in parts if part.numel() > _SMALL]
        self._small = [part for part in parts if part.numel() <= _SMALL]
        self._stamps = [_stamp(raw.device)[: part.numel()] for part in self._small]

    def poison(self) -> None:
        for part in self._large:
            part.fill_(POISON)
        if self._small:
            torch._foreach_copy_(self._small, self._stamps)


@functools.cache
def _stamp(device: torch.device) -> torch.Tensor:
    return torch.full((_SMALL,), POISON, dtype=torch.uint8, device=device)


def complement(taken: Iterable[Span], end: int) -> list[Span]:
    """The stretches of (0, end) that none of these covers.

    >>> complement([(2, 4), (6, 8)], 10)
    [(0, 2), (4, 6), (8, 10)]
    """
    left, at = [], 0
    for begin, stop in sorted(taken):
        if begin > at:
            left.append((at, begin))
        at = max(at, stop)
    return [*left, (at, end)] if at < end else left


def _reads(node: Node, spans: Sequence[Span]) -> bool:
    """Whether an argument lies there: of a kernel, any pointer in the bytes of its parameters."""
    if isinstance(node, Kernel):
        words = [word for one in node.arguments for (word,) in struct.iter_unpack("<Q", one[: len(one) // 8 * 8])]
        return any(begin <= word - BASE < end for word in words for begin, end in spans)
    if isinstance(node, Operator):
        return any(_touches(span(meta), spans) for meta in node.tensors)
    return isinstance(node, Memcpy) and _touches((node.source, node.source + node.size), spans)


def _touches(one: Span, others: Sequence[Span]) -> bool:
    return any(one[0] < end and begin < one[1] for begin, end in others)


def joined(spans: Iterable[Span]) -> list[Span]:
    """Those of one slot may share bytes: two outputs may be views of one buffer.

    >>> joined([(4, 8), (0, 6), (9, 9), (10, 12)])
    [(0, 8), (10, 12)]
    """
    found: list[Span] = []
    for begin, end in sorted(one for one in spans if one[0] < one[1]):
        if found and begin < found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def stretches_of(written: Iterable[Span], size: int) -> list[int]:
    """Where blocks of so many bytes may begin that several of these cover, and none alone.

    >>> stretches_of([(0, 256), (256, 512), (1024, 1280)], 512)
    [0]
    """
    spans = sorted(set(written))
    covered: list[Span] = []
    for begin, end in spans:
        if covered and begin <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(end, covered[-1][1]))
        else:
            covered.append((begin, end))
    alone = {begin for begin, end in spans if end - begin >= size}
    return [
        begin
        for first, last in covered
        for begin in dict.fromkeys(begin for begin, _ in spans if first <= begin and begin + size <= last)
        if size and begin not in alone and begin % ALIGNMENT == 0
    ]


def _plain(meta: wire.TensorMeta) -> wire.TensorMeta:
    """What type it had in Python is nothing that data has."""
    return wire.TensorMeta(meta.dtype, meta.shape, meta.strides, meta.place)


def _count(forward: Forward) -> dict[str, tuple[int, bool]]:
    """How often each kernel, operator or copy is in a forward, and whether it is the candidate's own."""
    own = Counter(node.name for node in forward.nodes if isinstance(node, Kernel))
    library = Counter(_name(node) for node in forward.nodes if not isinstance(node, Kernel))
    return {name: (count, False) for name, count in library.items()} | {n: (c, True) for n, c in own.items()}


def _digest(forward: Forward) -> str:
    """Of which kernels and operators there are, on what shapes: a tuned kernel may be launched in several ways."""
    return hashlib.sha256(repr([_identity(node) for node in forward.nodes]).encode()).hexdigest()


def _identity(node: Any) -> tuple[object, ...]:
    if isinstance(node, Kernel):
        return node.artifact, node.name
    tensors = (*node.tensors, *node.results) if isinstance(node, Operator) else ()
    return _name(node), [(meta.dtype, tuple(meta.shape)) for meta in tensors]


def _name(node: Any) -> str:
    if isinstance(node, Operator):
        return node.name
    return "aten::fill_" if type(node).__name__ == "Memset" else "aten::copy_"
