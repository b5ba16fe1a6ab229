"""The trusted handle on one runner child: its arena, calls with a deadline, and reading its outputs out of its memory.

::

    write(slot, values) ─▶ call(op, slot) ─▶ Outcome ─▶ [child frozen] read(meta) … ─▶ thaw at the next call
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import msgspec
import torch

from kbrl_async.errors import InfraError
from kbrl_async.kernels.sandbox import START_S, Access, Child, Isolation, Limits, Zygote
from kbrl_async.kernels.timing.cpu.host import process_time_ns, waited_ns
from kbrl_async.kernels.verify import replies, values, wire
from kbrl_async.kernels.verify.cpu.disarm import disarm
from kbrl_async.kernels.verify.memory import content_of, memory_file, read_memory, seal_size
from protocols.records import INFRASTRUCTURE_FAULTS, OBSERVED, Fault

_SLACK = 8
_HICCUP_S = 0.5
"""A host may stand still, or be busy with its disk and memory, for as long as a short deadline: a process that had not
half of it to run gets that much more, and nobody counts as waiting there.
"""
_EXTENSIONS = 4
_COPY_AREA = 1 << 28
FORGED = "forged_result"
_TOLD = (wire.OP_TRACE, wire.OP_MUTED, wire.OP_SHADOWED)
_Expected = TypeVar("_Expected", bound=wire.Reply)


class CandidateFault(Exception):  # noqa: N818 - reads as what it is: a result, not an error of ours
    """The child's code ended it or broke a rule. `by`: the child; None where the trusted side found it in what it read.

    :raises ValueError: `kind` is no fault, or one of ours: nothing that a child does can be that.
    """

    def __init__(self, kind: Fault, text: str, rule: str = "", by: object = None) -> None:
        if kind is Fault.OK or kind in INFRASTRUCTURE_FAULTS:
            raise ValueError(f"{kind} is no fault of a candidate")
        self.kind, self.text, self.rule, self.by = Fault(kind), text, rule, by
        super().__init__(text)


class Submission(msgspec.Struct, frozen=True):
    """What a child is to run: a candidate, or the reference's own source."""

    source: str
    backend: str = ""
    artifacts: dict[str, str] = {}
    """Paths of what was built, by key."""
    entry: str = "ModelNew"


def no_meter() -> tuple[int, int]:
    return 0, 0


class Judged(Protocol):
    """What checking asks of a candidate: its own process, or a trusted one that does its recorded work again."""

    slots: list[list[torch.Tensor]]
    isolation: Isolation
    trust: str
    trust_reason: str
    keeps_outputs: bool
    """Whether outputs of earlier calls are still there after a later one."""
    reads_in_place: bool
    """Whether what `read` gives lies where it was written."""
    gives_back: bool
    """Whether it can be told to give back the memory of its outputs (`OP_FREE`), and does not poison more than it
    needs (`OP_POISON_ON`)."""
    is_shared: bool
    """Whether a process that had served others had a part in it: then what counts is found out once more without."""
    plan: str
    """A digest of the steps of a replay, the same in every process that has recorded the same work; empty: none."""

    @property
    def is_short(self) -> bool:
        """Whether in any call so far a library found too little memory of the device, and may have gone a way that
        rounds otherwise."""
        ...

    @property
    def host_pid(self) -> int: ...
    def call(self, op: int, slot: int, deadline_s: float) -> ForwardOutcome: ...
    def again(self, op: int, slot: int, metas: list[wire.TensorMeta], deadline_s: float) -> list[wire.TensorMeta]: ...
    def read(self, meta: wire.TensorMeta) -> torch.Tensor: ...
    def look(self, meta: wire.TensorMeta) -> torch.Tensor: ...
    def disarm(self, artifacts: list[Path], whole: bool = False) -> int: ...
    def close(self) -> None: ...


class ForwardOutcome(msgspec.Struct, frozen=True):
    elapsed_ns: int
    waited_ns: int
    used_ns: int
    """Both as the meter says: see `timing.host.CoreUse`."""
    tree: wire.Tree
    tensors: list[wire.TensorMeta]
    trace: wire.Trace | None = None
    worked_ns: int = 0
    """CPU time of the child from before the order until it stood still: work that it does before its order came, or
    after its answer, is in here and not in `elapsed_ns`."""
    inside: int = 0
    is_short: bool = False
    """Both as in `wire.Done`."""

    def parts(self) -> tuple[ForwardOutcome, dict[str, wire.TensorMeta]]:
        """Of a replay with own kernels off: its outputs, and what operators computed by number and name.

        :raises ValueError: it is no such outcome.
        """
        kind, body = self.tree
        if kind != "U" or len(body) != 2 or body[1][0] != "D" or any(item[0] != "T" for item in body[1][1].values()):
            raise ValueError("no outcome of a replay with own kernels off")
        first = len(self.tensors) - len(body[1][1])
        kept = dict(zip(body[1][1], self.tensors[first:], strict=True))
        return msgspec.structs.replace(self, tree=body[0], tensors=self.tensors[:first]), kept


class Session:
    """One runner child. Raises `CandidateFault` for what its code did, `InfraError` for what the host did."""

    entry = "kbrl_async.kernels.verify.cpu.runner:main"
    trust = OBSERVED
    own_share: float | None = None
    """Known before anything is timed, where there is nothing but own kernels."""
    keeps_outputs = True
    is_short = gives_back = False
    reads_in_place = False
    ends_within_s = 2.0
    """From the end of its socket to its own; one that lives on has shut the socket itself."""

    def __init__(
        self, zygote: Zygote, setup: wire.Setup, fds: tuple[int, ...], limits: Limits, deadline_s: float
    ) -> None:
        self._child: Child = self._spawn(zygote, setup, fds, limits)
        self._frozen = False
        self.trust_reason, self.is_shared, self.plan = "", False, ""
        self._arena: mmap.mmap | None = None
        self._copies_from = self._took_ns = 0
        self._end: tuple[Fault, str] | None = None
        """What it ended with, once that was met: whoever asks it again meets it again."""
        self.slots: list[list[torch.Tensor]] = []
        self.copies = False
        try:
            confined = self._confined()
            self.isolation = Isolation(confined.level, confined.missing)
            self.ready = self._expect(wire.Ready, deadline_s)
        except BaseException:
            self._child.close()
            raise

    def _spawn(self, zygote: Zygote, setup: wire.Setup, fds: tuple[int, ...], limits: Limits) -> Child:
        access = Access(read=tuple(setup.artifacts.values()))
        return zygote.spawn(self.entry, wire.encode(setup), fds, limits, access)

    def _confined(self) -> wire.Confined:
        try:
            return self._expect(wire.Confined, START_S)
        except CandidateFault as fault:  # nothing of the source has run yet
            cause = f"a sandboxed process did not confine itself ({fault.text[:200]})"
            raise InfraError(cause, "See the zygote's message on stderr") from fault

    @property
    def host_pid(self) -> int:
        return self._child.host_pid

    def close(self) -> None:
        self._child.close()
        self.slots, self._arena = [], None

    def attach(self, tree: wire.Tree, tensors: list[torch.Tensor], slots: int, copies: bool = False) -> None:
        """Give the child a new arena with `slots` places for inputs like `tensors`."""
        self.thaw()
        metas, end = [], 0
        for _ in range(slots):
            placed, end = values.layout(tensors, end)
            metas.append(placed)
        size = max(end, mmap.PAGESIZE) + (_COPY_AREA if copies else 0)
        fd = memory_file("arena")
        try:
            os.ftruncate(fd, size)
            seal_size(fd)
            self._arena = mmap.mmap(fd, size)
            self._send(wire.encode(wire.Attach(size, tree, metas, end if copies else -1)), fd)
        finally:
            os.close(fd)
        self.copies, self._copies_from = copies, end
        self.slots = [[values.flat(values.view(self._arena, meta)) for meta in placed] for placed in metas]
        self._expect(wire.Ready, START_S)

    def draw(self, seed: int, fd: int, deadline_s: float, inputs: str = "") -> tuple[wire.Tree, list[torch.Tensor]]:
        """Inputs that the problem's own `get_inputs` makes after `seed`; `inputs` as in `wire.Draw`."""
        self.thaw()
        self._child.channel.send(wire.encode(wire.Draw(seed, inputs)))
        drawn = self._expect(wire.Drawn, deadline_s)
        try:
            data = content_of(fd)
            os.ftruncate(fd, 0)
            return drawn.tree, [values.view(data, meta) for meta in drawn.tensors]
        except (ValueError, RuntimeError) as error:
            raise self.forged("an input lies outside of its file") from error

    def call(
        self, op: int, slot: int, deadline_s: float, meter: Callable[[], tuple[int, int]] = no_meter
    ) -> ForwardOutcome:
        """One call; the child is frozen afterwards until the next one, so that its outputs stand still."""
        nonce = secrets.randbits(64)
        elapsed, waited, used, worked, done = self._exchange(wire.GO.pack(op, slot, nonce), deadline_s, meter)
        if not isinstance(done, wire.Done) or done.nonce != nonce or (done.trace is not None) != (op in _TOLD):
            raise self.forged()
        told = done.tree, done.tensors, done.trace, worked, done.inside, done.is_short
        return ForwardOutcome(elapsed, waited, used, *told)

    def record(self, slot: int, deadline_s: float) -> wire.Taped:
        """One run, written down. What it says is a proposal."""
        nonce = secrets.randbits(64)
        recorded = self._exchange(wire.GO.pack(wire.OP_RECORD, slot, nonce), deadline_s)[-1]
        if not isinstance(recorded, wire.Taped) or recorded.nonce != nonce:
            raise self.forged()
        return recorded

    def block(self, place: int, size: int) -> torch.Tensor:
        """A copy of these bytes of its memory. `CandidateFault` where they can't be read."""
        found = torch.empty(size, dtype=torch.uint8)
        if size and not read_memory(self.host_pid, place, found.data_ptr(), size):
            raise self.forged("what it says lasts from call to call is not there")
        return found

    def again(self, op: int, slot: int, metas: list[wire.TensorMeta], deadline_s: float) -> list[wire.TensorMeta]:
        """Where outputs that lay at `metas` can be read as they are now: there, or in new copies that `op` asks for."""
        if not self.copies:
            return metas
        found = self.call(op, slot, deadline_s).tensors
        if [(meta.dtype, meta.shape) for meta in found] != [(meta.dtype, meta.shape) for meta in metas]:
            raise self.forged("the same outputs were described in another way")
        return found

    def _exchange(
        self, order: bytes, deadline_s: float, meter: Callable[[], tuple[int, int]] = no_meter
    ) -> tuple[int, int, int, int, wire.Reply]:
        """Wall time, what the meter says, the child's CPU time, and the answer; the child is frozen."""
        waited, used = meter()
        used_before = process_time_ns(self.host_pid)
        self.thaw()
        begin = time.perf_counter_ns()
        self._send(order)
        ready = self._readable(deadline_s)
        elapsed = time.perf_counter_ns() - begin
        waited_after, used_after = meter()
        if not ready and not self._starved(deadline_s, used_before):
            self._overdue(deadline_s)
        done = self._take()
        self._took_ns = time.perf_counter_ns() - begin
        self._frozen = self._child.freeze()
        worked = process_time_ns(self.host_pid) - used_before
        return elapsed, waited_after - waited, used_after - used, worked, done

    def thaw(self) -> None:
        if self._frozen:
            self._child.thaw()
            self._frozen = False

    def disarm(self, artifacts: list[Path], whole: bool = False) -> int:
        """Switch these shared objects' kernels off in the frozen child, for good: the functions that they export, or
        the `whole` of their code. How many functions, or stretches of code.
        """
        return disarm(self.host_pid, artifacts, whole) if self._frozen else 0

    def look(self, meta: wire.TensorMeta) -> torch.Tensor:
        """An output, to be looked at once: maybe no copy."""
        return self.read(meta)

    def read(self, meta: wire.TensorMeta) -> torch.Tensor:
        """A copy of an output. `CandidateFault` where nothing can be read there."""
        dtype, extent = values.dtype_of(meta.dtype), replies.extent(meta)
        if extent == 0:
            return torch.empty(meta.shape, dtype=dtype)
        if extent > max(math.prod(meta.shape) * _SLACK, 1 << 16):
            raise self._fault(Fault.INCORRECT, "the output's strides reach far outside its elements", "layout")
        try:
            block = torch.empty(extent, dtype=dtype)
        except RuntimeError as error:
            raise self._fault(Fault.OUT_OF_MEMORY, "an output is larger than the memory") from error
        self._copy(block, meta.place)
        return block.as_strided(meta.shape, meta.strides)

    def _copy(self, block: torch.Tensor, place: int) -> None:
        size = block.numel() * block.element_size()
        if self.copies:
            assert self._arena is not None
            if not self._copies_from <= place <= len(self._arena) - size:
                raise self.forged("an output lies outside of its arena")
            block.view(torch.uint8).copy_(torch.frombuffer(self._arena, dtype=torch.uint8, count=size, offset=place))
            return
        if not read_memory(self.host_pid, place, block.data_ptr(), size):
            if self._child.ends():  # after its answer: by itself, or with its zygote, which is no fault of its
                self._ended()
            text = "the output tensor points to memory that can't be read"
            raise self._fault(Fault.ILLEGAL_ACCESS, text, "output")

    def _send(self, order: bytes, *fds: int) -> None:
        if self._end is not None:
            raise self._fault(*self._end)
        try:
            socket.send_fds(self._child.channel, [order], fds) if fds else self._child.channel.send(order)
        except ConnectionError:
            self._ended()

    def _readable(self, deadline_s: float) -> bool:
        poll = select.poll()
        poll.register(self._child.channel, select.POLLIN)
        return bool(poll.poll(deadline_s * 1000))

    def _starved(self, deadline_s: float, used_before_ns: int = 0) -> bool:
        """Whether an answer came after all, in the extra time that a child gets which others kept from its core.

        False: it had its share, the deadline stands. `InfraError`: it never gets its share on this host.
        """
        enough = deadline_s * 0.5e9
        for extension in _extensions(deadline_s):
            used = process_time_ns(self.host_pid) - used_before_ns
            may_hiccup = extension * deadline_s <= _HICCUP_S and used < enough
            if not may_hiccup and (used >= enough or waited_ns(self.host_pid) < extension * enough):
                return False
            if self._readable(deadline_s):
                return True
        raise InfraError("a sandboxed process gets no time on its core", "Others load this host; give the bench a core")

    def _reply(self, deadline_s: float) -> wire.Reply:
        used_before = process_time_ns(self.host_pid)
        if not self._readable(deadline_s) and not self._starved(deadline_s, used_before):
            self._overdue(deadline_s)
        return self._take()

    def _expect(self, kind: type[_Expected], deadline_s: float) -> _Expected:
        reply = self._reply(deadline_s)
        if not isinstance(reply, kind):
            raise self.forged()
        return reply

    def _take(self) -> wire.Reply:
        data, flags = b"", 0
        with contextlib.suppress(ConnectionError):
            data, _, flags, _ = self._child.channel.recvmsg(wire.MAX_REPLY)
        if not data:
            self._ended()
        if flags & socket.MSG_TRUNC:
            raise self.forged("an answer is longer than any that the runner sends")
        try:
            reply = replies.read(data)
        except replies.Malformed as error:
            raise self.forged("the answer is not one that the runner sends") from error
        if isinstance(reply, wire.Failed):
            raise self._fault(Fault(reply.kind), reply.text)
        return reply

    def _overdue(self, deadline_s: float) -> NoReturn:
        raise self._fault(Fault.TIMEOUT, f"no result after {deadline_s:.2f} s")

    def _await_end(self) -> None:
        """Once its socket is shut: until it has ended, or has had the time for that."""
        enough, used, waited = self.ends_within_s * 0.5e9, process_time_ns(self.host_pid), waited_ns(self.host_pid)
        for extension in _extensions(self.ends_within_s):
            if self._child.ends(self.ends_within_s):
                return
            had, missed = process_time_ns(self.host_pid) - used, waited_ns(self.host_pid) - waited
            if had >= enough or missed < extension * enough:
                return

    def _ended(self) -> NoReturn:
        self._await_end()
        status = self._child.result(0.0)  # None, and killed, where it lives on though it had time to end
        if status is None:
            raise self.forged("the way to the bench was shut")
        self._end = _meaning(status)
        raise self._fault(*self._end)

    def _fault(self, kind: Fault, text: str, rule: str = "") -> CandidateFault:
        return CandidateFault(kind, text, rule, self)

    def forged(self, text: str = "an answer was sent that nobody asked for") -> CandidateFault:
        return self._fault(Fault.CHEATING, text, FORGED)


def _extensions(deadline_s: float) -> range:
    """How often, at most, a child that gets no time is given its deadline once more: others may have its core for
    seconds, however short that is.
    """
    return range(1, max(_EXTENSIONS, math.ceil(START_S / deadline_s)) + 1)


def _meaning(status: int) -> tuple[Fault, str]:
    name = {-11: "SIGSEGV", -7: "SIGBUS", -4: "SIGILL", -8: "SIGFPE", -6: "SIGABRT"}.get(status, "")
    if status in (-11, -7):
        return Fault.ILLEGAL_ACCESS, f"the kernel read or wrote memory that is not its own ({name})"
    if status in (-24, -9):
        return Fault.TIMEOUT, "the process used up its CPU time"
    if status < 0:
        return Fault.RUNTIME_ERROR, f"the process was ended by signal {-status} {name}".rstrip()
    return Fault.RUNTIME_ERROR, f"the process ended itself with exit code {status}"
