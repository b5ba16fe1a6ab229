"""The trusted handle on a GPU child: `Session` with an arena in device memory, and timed calls.

::

    write(slot) ─▶ wait for our writes ─▶ poison its output area ─▶ call ─▶ [child frozen] read, compare on the GPU
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import msgspec
import torch

from kbrl_async.errors import InfraError
from kbrl_async.kernels.backends import backend
from kbrl_async.kernels.sandbox import Child, Limits, Zygote
from kbrl_async.kernels.stages import span
from kbrl_async.kernels.timing.turns import DeviceTurns
from kbrl_async.kernels.verify import values, wire
from kbrl_async.kernels.verify.cuda import proof as cuda_proof
from kbrl_async.kernels.verify.cuda import starting
from kbrl_async.kernels.verify.cuda.arena import ALIGNMENT, DeviceArena
from kbrl_async.kernels.verify.cuda.prewarmed import ENTRY, PrewarmedChildren, as_files
from kbrl_async.kernels.verify.layouts import TensorCheck, never
from kbrl_async.kernels.verify.memory import as_message
from kbrl_async.kernels.verify.options import Tick, no_tick
from kbrl_async.kernels.verify.session import CandidateFault, ForwardOutcome, Judged, Session, no_meter

_POISON = 0x7F
_CLAIM_SHARE, _CLAIM_NS = 1.1, 1_000_000
"""Two clocks may differ by so much."""
_BLOCKED_S, _DRIVER_S = 0.1, 4.0
_MOVE_S, _FAR_S = 10.0, 30.0
_Answer = TypeVar("_Answer", wire.Captured, wire.Timed)
_KEEPS_OUTPUTS = (wire.OP_POISON_ON, wire.OP_POISON_OFF, wire.OP_FREE)


class TimedCall(msgspec.Struct, frozen=True):
    """One timed call: what the child says lies between two events, and what our clock says of the whole call."""

    elapsed_ns: float
    wall_ns: int
    empty_ns: float = 0.0
    stream_ns: float = 0.0


@runtime_checkable
class TimedSide(Judged, Protocol):
    """What timing asks of either side on a GPU."""

    is_trusted: bool
    """Whether its times are those of a process that no candidate's host code runs in."""

    is_kept: bool
    """Whether one buffer holds the outputs of several slots: then each is a timed run of its own."""

    is_proven: bool
    """Whether a timed run over all slots was found right, and need not be looked at again."""

    forward_ns: float
    """The shortest call so far by our clock, with what calling costs; infinite where none was timed."""

    def attach(
        self,
        tree: wire.Tree,
        tensors: list[torch.Tensor],
        slots: int,
        copies: bool = True,
        outs: list[wire.TensorMeta] | None = None,
    ) -> None: ...
    def poison(self, slots: int | None = None) -> None:
        """What a call does not write stays poison. `slots`: only outputs of those up to this number are looked at."""
        ...

    def capture(self, count: int, deadline_s: float) -> wire.Captured: ...
    def replay(self, times: int, deadline_s: float) -> TimedCall: ...
    def event(self, slot: int, deadline_s: float) -> TimedCall: ...
    def events(self, times: int, deadline_s: float) -> TimedCall: ...
    def leaves_out(self, deadline_s: float) -> None: ...
    def outputs(self, first: int, end: int) -> list[torch.Tensor]:
        """The outputs of these slots after a timed call, by output: (end − first, *shape). Maybe no copies."""
        ...

    def own_kernels(self, source: str) -> list[str]: ...
    def muted(
        self, kernels: list[str], deadline_s: float, renew: Callable[[], None], slot: int = 0
    ) -> tuple[float, float]: ...
    def answered(self, is_answer: TensorCheck, slot: int = 0, is_moved: TensorCheck = never) -> str: ...


class CudaSession(Session):
    entry = ENTRY
    ends_within_s = 10.0  # its context is taken down after its socket
    is_trusted = is_kept = False
    gives_back = True
    is_widened = False
    """Whether its arena has room for outputs in fp64: a reference's."""
    is_far = False
    """Whether its arena lies on the host unless it is being timed: a reference's, where the GPU can't hold two."""
    has_kept = 0
    """How often in a row less came free than it was told to give back."""
    forward_ns = math.inf
    keeps_freed = False
    """Whether its process keeps what a draw leaves free: ordinary forwards of it are being timed, and would have to ask
    the driver for their outputs anew, which a candidate, who draws nothing, has not to."""

    def __init__(
        self,
        zygote: Zygote,
        setup: wire.Setup,
        fds: tuple[int, ...],
        limits: Limits,
        deadline_s: float,
        spares: PrewarmedChildren,
    ) -> None:
        self._spares = spares
        self._where = torch.device(setup.device)
        self.shared: DeviceArena | None = None
        self.captured: wire.Captured | None = None
        self._captured_slots = 0
        self.is_proven = False
        self._is_confined = self._is_given = self._is_lost = False
        self._outputs_at = 0
        self._metas: list[list[wire.TensorMeta]] = []
        self.uses = 0
        """How often what lies in its arena may have changed."""
        self.drawn_beside: int | None = None
        """Bytes that its process needs for a draw, beside the arena that it goes to; None: not known yet."""
        self._outs: list[tuple[wire.TensorMeta, int]] = []
        super().__init__(zygote, setup, fds, limits, deadline_s)
        self.copies = True

    def _spawn(self, zygote: Zygote, setup: wire.Setup, fds: tuple[int, ...], limits: Limits) -> Child:
        self._orders: tuple[wire.Setup, tuple[int, ...]] | None = None
        if not setup.artifacts or backend(setup.backend).reads_bytes:
            self._orders = setup, fds
            self._another = self._spares.take
        else:
            self._another = functools.partial(super()._spawn, zygote, setup, fds, limits)
        return self._another()

    def _confined(self) -> wire.Confined:
        confined = starting.first_that_starts(self._first_word)
        self._is_confined = True
        if self._orders is not None:
            self._send_orders(*self._orders)
        return confined

    def _first_word(self) -> wire.Confined:
        if self._is_lost:
            self._child, self._is_lost = self._another(), False
        try:
            return starting.confined(self._child, "a process for a reference or a candidate")
        except starting.NotStarted:
            self._is_lost = True
            self._spares.dying.add(self._child)
            raise

    def _send_orders(self, setup: wire.Setup, fds: tuple[int, ...]) -> None:
        message, more = as_message(wire.encode(setup))
        files = as_files(setup.artifacts)
        try:
            socket.send_fds(self._child.channel, [message], [*more, *fds, *files])
        except OSError as error:
            raise InfraError(f"a waiting sandbox child could not be given its candidate ({error})") from error
        finally:
            for fd in (*more, *files):
                os.close(fd)

    def rest(self) -> None:
        """Its process may serve another; this session is closed next."""
        with contextlib.suppress(CandidateFault, InfraError, OSError):
            self.thaw()
            self._send(wire.encode(wire.Rest()))
            self._spares.give(self._child)
            self._is_given = True

    def close(self) -> None:
        """Returns at once; who needs its memory waits for its end, see `CudaDevice.ended`."""
        if not self._is_given:
            self._spares.dying.add(self._child)
        self.uses += 1
        self.slots, self._outs = [], []
        if self.shared is not None:
            self.shared.close()
            self.shared = None

    def _readable(self, deadline_s: float) -> bool:
        """A child that is starting makes its context, which disturbs nobody who times."""
        return DeviceTurns.answers(self._child.channel, deadline_s, self._child if self._is_confined else None)

    def _starved(self, deadline_s: float, used_before_ns: int = 0) -> bool:
        """A GPU that clears away a fault answers nobody for seconds, us neither; then the child's answer still comes.
        While a kernel merely loops, we get our share.
        """
        begin = time.monotonic()
        torch.ones(1, device=self._where)
        torch.cuda.synchronize()
        if time.monotonic() - begin > _BLOCKED_S and self._readable(_DRIVER_S):
            return True
        return super()._starved(deadline_s, used_before_ns)

    def attach(
        self,
        tree: wire.Tree,
        tensors: list[torch.Tensor],
        slots: int,
        copies: bool = True,
        outs: list[wire.TensorMeta] | None = None,
        least_bytes: int = 0,
    ) -> None:
        """A new arena, or the one that is there where it has `least_bytes`, above 0, and room. `outs` describes the
        outputs of one call; without it they are described but not copied.
        """
        self.thaw()
        self.uses += 1
        self.slots, self.captured = [], None
        metas, end = [], 0
        for _ in range(slots):
            placed, end = values.layout(tensors, end, ALIGNMENT)
            metas.append(placed)
        self._metas, self._outputs_at = metas, end
        self._outs, end = place_outputs(outs or [], slots, end, self.is_widened)
        fds: tuple[int, ...] = ()
        shared = self.shared if least_bytes else None
        if shared is None or max(end, least_bytes) > shared.size or shared.is_on_host is not self.is_far:
            with span("arenas of children"):
                if self.shared is not None:
                    self.shared.close()
                self.shared = shared = DeviceArena.new(max(end, least_bytes), self._where, self.is_far)
                fds = (shared.export(),)
        targets = [[_moved(meta, slot * step) for meta, step in self._outs] for slot in range(slots)]
        order = wire.Attach(shared.size, tree, metas, self._outputs_at if outs is not None else -1, targets)
        try:
            self._send(wire.encode(order), *fds)
        finally:
            for fd in fds:
                os.close(fd)
        self.slots = [[values.flat(shared.view(meta)) for meta in placed] for placed in metas]
        with span("arenas of children, there"):
            self._expect(wire.Ready, 30.0)

    def _send_arena(self, order: wire.Order, arena: DeviceArena) -> None:
        fd = arena.export()
        try:
            self._send(wire.encode(order), fd)
        finally:
            os.close(fd)

    def move(self, to_host: bool, settle: Tick = no_tick, look: Tick = no_tick) -> None:
        """Its arena. A candidate's process is awake for that: its memory of the host is nobody's but the bench's, and
        what it gets of the GPU's holds nothing until it stands still again, and `settle` has returned. From then on
        `look` is called while its contents come.

        :raises CudaError: the memory is not there.
        """
        shared = self.shared
        assert shared is not None
        if shared.is_on_host is to_host:
            return

        def hand_over(fd: int) -> None:
            self._hand_over(fd)
            settle()

        if self.is_far or not to_host:
            shared.move(to_host, hand_over, look)
            return
        shared.move(to_host=True)
        before = torch.cuda.mem_get_info(self._where)[0]
        self._hand_over()
        came_free = torch.cuda.mem_get_info(self._where)[0] - before
        self.has_kept = self.has_kept + 1 if came_free < shared.size // 2 else 0

    def _hand_over(self, *fds: int) -> None:
        """Whoever stood still does so again."""
        was_frozen = self._frozen
        self.thaw()
        self._send(wire.encode(wire.Move()), *fds)
        self._expect(wire.Ready, _FAR_S if self.is_far else _MOVE_S)
        if was_frozen or not self.is_far:
            self._frozen = self._child.freeze()

    def fetch(self, metas: list[wire.TensorMeta], deadline_s: float) -> DeviceArena:
        """The tensors that the child described last, in memory of our own from now on."""
        end = max((meta.place + _bytes(meta) for meta in metas), default=0)
        arena = DeviceArena.new(end, self._where, self.is_far)
        try:
            self._send_arena(wire.Export(arena.size), arena)
            self._expect(wire.Ready, deadline_s)
        except BaseException:
            arena.close()
            raise
        return arena

    def drawn(
        self, seed: int, deadline_s: float, more: tuple[int, ...] = ()
    ) -> tuple[wire.Tree, list[torch.Tensor], DeviceArena]:
        """Inputs that the problem's own `get_inputs` makes after `seed`, and after `more` one after the other, and the
        memory they lie in.
        """
        self.thaw()
        self._child.channel.send(wire.encode(wire.Draw(seed, more=more)))
        drawn = self._expect(wire.Drawn, deadline_s)
        arena = self.fetch(drawn.tensors, deadline_s)
        return drawn.tree, [arena.view(meta) for meta in drawn.tensors], arena

    def lent(self, seed: int, deadline_s: float) -> tuple[wire.Tree, list[torch.Tensor], DeviceArena | None]:
        """As `drawn`, in slot 0, where it has room for just such inputs; then there is no arena to be closed."""
        self.thaw()
        self.uses += 1
        torch.cuda.synchronize()  # what of ours still reads what was lent before: its process writes there next
        self._child.channel.send(wire.encode(wire.Draw(seed, is_lent=bool(self._metas))))
        drawn = self._expect(wire.Drawn, deadline_s)
        if self.shared is None or not self._metas or not _lie_alike(drawn.tensors, self._metas[0]):
            arena = self.fetch(drawn.tensors, deadline_s)
            return drawn.tree, [arena.view(meta) for meta in drawn.tensors], arena
        self.drawn_beside = drawn.beside
        self._send(wire.encode(wire.Export(0, self.keeps_freed)))
        self._expect(wire.Ready, deadline_s)
        return drawn.tree, [self.shared.view(meta) for meta in drawn.tensors], None

    def call(self, op: int, slot: int, deadline_s: float, meter: object = no_meter) -> ForwardOutcome:
        """As on a CPU; our writes are done before, and a candidate's output area holds poison."""
        self.uses += 1
        if op not in _KEEPS_OUTPUTS and not self.is_widened:
            self.poison()
        if op == wire.OP_FREE:
            self.captured = None  # the child gives its graphs back, too
        torch.cuda.synchronize()
        return self._noted(super().call(op, slot, deadline_s), op)

    def _noted(self, outcome: ForwardOutcome, op: int) -> ForwardOutcome:
        """What fp64 lacks tells nothing of the way that counts."""
        self.is_short = self.is_short or (outcome.is_short and op != wire.OP_DOUBLE)
        return outcome

    def watched_forward(self, op: int, answer: list[torch.Tensor], deadline_s: float) -> ForwardOutcome:
        """A forward over slot 0 of which its process tells; its own launches are skipped where `op` says so. `answer`:
        what it gave over these inputs before. The library's results are compared with that where the outputs are to
        go, so that none has to be kept.
        """
        assert self.shared is not None
        self.uses += 1
        self.poison()
        for (meta, _), tensor in zip(self._outs, answer, strict=True):
            self.shared.view(meta).copy_(tensor)
        torch.cuda.synchronize()
        return self._noted(super().call(op, 0, deadline_s), op)

    def poison(self, slots: int | None = None) -> None:
        if self.shared is None:
            return
        self.uses += 1
        if slots is None:
            self.shared.raw[self._outputs_at :].fill_(_POISON)
            return
        for meta, step in self._outs:
            self.shared.raw[meta.place : meta.place + slots * step].fill_(_POISON)

    def look(self, meta: wire.TensorMeta) -> torch.Tensor:
        """An output that the child has copied into its arena, where it lies."""
        assert self.shared is not None
        try:
            return self.shared.view(meta)
        except (ValueError, RuntimeError) as error:
            raise self.forged("an output lies outside of its arena") from error

    def read(self, meta: wire.TensorMeta) -> torch.Tensor:
        """A copy of it."""
        return self.look(meta).clone()

    def outputs(self, first: int, end: int) -> list[torch.Tensor]:
        assert self.shared is not None
        return [_stacked(self.shared, meta, step, end)[first:] for meta, step in self._outs]

    def capture(self, count: int, deadline_s: float) -> wire.Captured:
        """Graphs of forward over the first `count` slots, made once for an arena and as many."""
        if self.captured is None or self._captured_slots != count:
            self._captured_slots = count
            self.captured = self._timed_call(wire.Captured, wire.OP_CAPTURE, count, deadline_s)[1]
            self.is_short = self.is_short or self.captured.is_short
        return self.captured

    def replay(self, times: int, deadline_s: float) -> TimedCall:
        return self._sample(wire.OP_REPLAY, times, deadline_s)

    def events(self, times: int, deadline_s: float) -> TimedCall:
        """Ordinary forwards over slot 0, summed."""
        return self._sample(wire.OP_EVENTS, times, deadline_s)

    def event(self, slot: int, deadline_s: float) -> TimedCall:
        return self._sample(wire.OP_EVENT, slot, deadline_s)

    def leaves_out(self, deadline_s: float) -> None:
        """Only what is replayed can be run in part."""

    def own_kernels(self, source: str) -> list[str]:
        """Those of the captured kernels that are the candidate's, by their names."""
        return [] if self.captured is None else cuda_proof.own_kernels(list(self.captured.kernels), source)

    def answered(self, is_answer: TensorCheck, slot: int = 0, is_moved: TensorCheck = never) -> str:
        """Nobody sees the results of its operators in a graph: see `watched_forward`."""
        return ""

    def muted(
        self, kernels: list[str], deadline_s: float, renew: Callable[[], None], slot: int = 0
    ) -> tuple[float, float]:
        """Nanoseconds of a forward over slot 0, the only one here, and of one without these kernels, whose outputs lie
        there. All of it is one order to the child, so that nothing is renewed.
        """
        assert slot == 0
        nonce = secrets.randbits(63)
        told = self._answered(wire.Timed, wire.encode(wire.Mute(nonce, kernels)), nonce, deadline_s)[1]
        return told.elapsed_ns, told.empty_ns

    def _timed_call(self, kind: type[_Answer], op: int, argument: int, deadline_s: float) -> tuple[int, _Answer]:
        nonce = secrets.randbits(64)
        return self._answered(kind, wire.GO.pack(op, argument, nonce), nonce, deadline_s)

    def _answered(self, kind: type[_Answer], order: bytes, nonce: int, deadline_s: float) -> tuple[int, _Answer]:
        """Wall time and the answer. What it claims of times lies within the call, as our own clock saw it."""
        self.uses += 1
        torch.cuda.synchronize()
        elapsed, *_, reply = self._exchange(order, deadline_s)
        if not isinstance(reply, kind) or reply.nonce != nonce:
            raise self.forged()
        if isinstance(reply, wire.Timed):
            claim = max(reply.elapsed_ns, reply.empty_ns, reply.stream_ns)
            if claim > _CLAIM_SHARE * self._took_ns + _CLAIM_NS:
                raise self.forged("a call is said to have lasted longer than it did")
        return elapsed, reply

    def _sample(self, op: int, argument: int, deadline_s: float) -> TimedCall:
        wall_ns, told = self._timed_call(wire.Timed, op, argument, deadline_s)
        return TimedCall(told.elapsed_ns, wall_ns, told.empty_ns, told.stream_ns)


def _bytes(meta: wire.TensorMeta) -> int:
    return math.prod(meta.shape) * values.dtype_of(meta.dtype).itemsize


def _lie_alike(some: list[wire.TensorMeta], others: list[wire.TensorMeta]) -> bool:
    """Whether these are tensors of one kind in the same places."""
    both = ([(one.dtype, one.shape, one.strides, one.place) for one in metas] for metas in (some, others))
    return next(both) == next(both)


def _moved(meta: wire.TensorMeta, by: int) -> wire.TensorMeta:
    return msgspec.structs.replace(meta, place=meta.place + by)


def place_outputs(
    outs: list[wire.TensorMeta], slots: int, start: int, is_widened: bool
) -> tuple[list[tuple[wire.TensorMeta, int]], int]:
    """For each output: its place in slot 0 and the step to the next slot. `is_widened`: fp64 of slot 0 fits, too."""
    placed, single = [], 0
    end = start
    for meta in outs:
        size = _bytes(meta)
        step = values.padded(size, ALIGNMENT)
        strides = tuple(math.prod(meta.shape[i + 1 :]) for i in range(len(meta.shape)))
        placed.append((msgspec.structs.replace(meta, place=end, strides=strides), step))
        end += step * slots
        single += values.padded(math.prod(meta.shape) * 8, ALIGNMENT)
    return placed, max(end, start + single if is_widened else 0)


def _stacked(arena: DeviceArena, meta: wire.TensorMeta, step: int, count: int) -> torch.Tensor:
    dtype = values.dtype_of(meta.dtype)
    if step == 0:
        return torch.empty((count, *meta.shape), dtype=dtype, device=arena.raw.device)
    block: torch.Tensor = arena.raw[meta.place : meta.place + step * count].view(dtype)
    return block.as_strided((count, *meta.shape), (step // dtype.itemsize, *meta.strides))
