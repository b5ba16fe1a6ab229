"""The trusted handle on one runner child: its arena, calls with a deadline, and reading its outputs out of its memory.

::

    write(slot, values) ─▶ call(op, slot) ─▶ Outcome ─▶ [child frozen] read(meta) … ─▶ thaw at the next call
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from kbrl_async.errors import InfraError
from kbrl_async.kernels.sandbox import Access, Child, Isolation, Limits, Zygote
from kbrl_async.kernels.timing.cpu.host import process_time_ns, waited_ns
from kbrl_async.kernels.verify import values, wire
from kbrl_async.kernels.verify.cpu.disarm import disarm
from kbrl_async.kernels.verify.memory import read_memory

_SLACK = 8
_EXTENSIONS = 4
_COPY_AREA = 1 << 28


class CandidateFault(Exception):  # noqa: N818 - reads as what it is: a result, not an error of ours
    """The child's code ended it or broke a rule: `kind` is a `Fault` value."""

    def __init__(self, kind: str, text: str, rule: str = "") -> None:
        self.kind, self.text, self.rule = kind, text, rule
        super().__init__(text)


def no_meter() -> tuple[int, int]:
    return 0, 0


class Outcome(msgspec.Struct, frozen=True):
    elapsed_ns: int
    waited_ns: int
    used_ns: int
    """Both as the meter says: see `timing.host.CoreUse`."""
    tree: wire.Tree
    tensors: list[wire.TensorMeta]
    trace: wire.Trace | None = None


class Session:
    """One runner child. Raises `CandidateFault` for what its code did, `InfraError` for what the host did."""

    entry = "kbrl_async.kernels.verify.cpu.runner:main"
    confined_within_s = 10.0

    def __init__(
        self, zygote: Zygote, setup: wire.Setup, fds: tuple[int, ...], limits: Limits, deadline_s: float
    ) -> None:
        self._child: Child = self._spawn(zygote, setup, fds, limits)
        self._frozen = False
        self._arena: mmap.mmap | None = None
        self.slots: list[list[torch.Tensor]] = []
        self.copies = False
        try:
            confined = self._confined()
            self.isolation = Isolation(confined.level, confined.missing)
            ready = self._reply(deadline_s)
            if not isinstance(ready, wire.Ready):
                raise CandidateFault("cheating", "an answer was sent that nobody asked for", "forged_result")
            self.ready = ready
        except BaseException:
            self._child.close()
            raise

    def _spawn(self, zygote: Zygote, setup: wire.Setup, fds: tuple[int, ...], limits: Limits) -> Child:
        access = Access(read=tuple(setup.artifacts.values()))
        return zygote.spawn(self.entry, wire.encode(setup), fds, limits, access)

    def _confined(self) -> wire.Confined:
        confined = self._reply(self.confined_within_s)
        if not isinstance(confined, wire.Confined):
            raise InfraError("a sandbox child did not confine itself", "See the zygote's message on stderr")
        return confined

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
        fd = os.memfd_create("arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            self._arena = mmap.mmap(fd, size)
            order = wire.Attach(size, tree, metas, end if copies else -1)
            socket.send_fds(self._child.channel, [wire.encode(order)], [fd])
        finally:
            os.close(fd)
        self.copies = copies
        self.slots = [[values.flat(values.view(self._arena, meta)) for meta in placed] for placed in metas]
        self._reply(5.0)

    def draw(self, seed: int, fd: int, deadline_s: float) -> tuple[wire.Tree, list[torch.Tensor]]:
        """Inputs that the problem's own `get_inputs` makes after `seed`."""
        self.thaw()
        self._child.channel.send(wire.encode(wire.Draw(seed)))
        drawn = self._reply(deadline_s)
        if not isinstance(drawn, wire.Drawn):
            raise InfraError("a reference gave no inputs", "The problem may be broken")
        data = bytearray(os.pread(fd, os.fstat(fd).st_size, 0))
        return drawn.tree, [values.view(data, meta) for meta in drawn.tensors]

    def call(self, op: int, slot: int, deadline_s: float, meter: Callable[[], tuple[int, int]] = no_meter) -> Outcome:
        """One call; the child is frozen afterwards until the next one, so that its outputs stand still."""
        nonce = secrets.randbits(64)
        elapsed, waited, used, done = self._exchange(wire.GO.pack(op, slot, nonce), deadline_s, meter)
        if not isinstance(done, wire.Done) or done.nonce != nonce:
            raise CandidateFault("cheating", "an answer was sent that nobody asked for", "forged_result")
        return Outcome(elapsed, waited, used, done.tree, done.tensors, done.trace)

    def _exchange(
        self, order: bytes, deadline_s: float, meter: Callable[[], tuple[int, int]] = no_meter
    ) -> tuple[int, int, int, wire.Reply]:
        """Wall time, what the meter says, and the answer; the child is frozen."""
        channel = self._child.channel
        waited, used = meter()
        used_before = process_time_ns(self.host_pid)
        self.thaw()
        begin = time.perf_counter_ns()
        channel.send(order)
        ready = self._readable(deadline_s)
        elapsed = time.perf_counter_ns() - begin
        waited_after, used_after = meter()
        if not ready and not self._starved(deadline_s, used_before):
            self._overdue(deadline_s)
        done = self._take()
        self._frozen = self._child.freeze()
        return elapsed, waited_after - waited, used_after - used, done

    def thaw(self) -> None:
        if self._frozen:
            self._child.thaw()
            self._frozen = False

    def disarm(self, artifacts: list[Path]) -> int:
        """Switch the kernels of these shared objects off in the frozen child, for good; how many functions."""
        return disarm(self.host_pid, artifacts) if self._frozen else 0

    def read(self, meta: wire.TensorMeta) -> torch.Tensor:
        """A copy of an output. `CandidateFault` where nothing can be read there."""
        dtype = values.dtype_of(meta.dtype)
        numel = 1
        for size in meta.shape:
            numel *= size
        if numel == 0:
            return torch.empty(meta.shape, dtype=dtype)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(meta.shape, meta.strides, strict=True))
        if min(meta.strides, default=0) < 0 or extent > max(numel * _SLACK, 1 << 16):
            raise CandidateFault("incorrect", "the output's strides reach far outside its elements", "layout")
        block = torch.empty(extent, dtype=dtype)
        self._copy(block, meta.place)
        return block.as_strided(meta.shape, meta.strides)

    def _copy(self, block: torch.Tensor, place: int) -> None:
        size = block.numel() * block.element_size()
        if self.copies:
            assert self._arena is not None
            flat = torch.frombuffer(self._arena, dtype=block.dtype, count=block.numel(), offset=place)
            block.copy_(flat)
            return
        if not read_memory(self.host_pid, place, block.data_ptr(), size):
            if self._child.has_ended(0.2):  # after its answer: by itself, or with its zygote, which is no fault of its
                self._ended()
            raise CandidateFault("illegal_access", "the output tensor points to memory that can't be read", "output")

    def _readable(self, deadline_s: float) -> bool:
        poll = select.poll()
        poll.register(self._child.channel, select.POLLIN)
        return bool(poll.poll(deadline_s * 1000))

    def _starved(self, deadline_s: float, used_before_ns: int = 0) -> bool:
        """Whether an answer came after all, in the extra time that a child gets which others kept from its core.

        False: it had its share, the deadline stands. `InfraError`: it never gets its share on this host.
        """
        enough = deadline_s * 0.5e9
        for extension in range(1, _EXTENSIONS + 1):
            used = process_time_ns(self.host_pid) - used_before_ns
            if used >= enough or waited_ns(self.host_pid) < extension * enough:
                return False
            if self._readable(deadline_s):
                return True
        raise InfraError("a sandboxed process gets no time on its core", "Others load this host; give the bench a core")

    def _reply(self, deadline_s: float) -> wire.Reply:
        if not self._readable(deadline_s) and not self._starved(deadline_s):
            self._overdue(deadline_s)
        return self._take()

    def _take(self) -> wire.Reply:
        try:
            data = self._child.channel.recv(wire.MAX_REPLY)
            reply = wire.decode_reply(data) if data else None
        except (msgspec.MsgspecError, ConnectionError):
            reply = None
        if reply is None:
            self._ended()
        if isinstance(reply, wire.Failed):
            raise CandidateFault(reply.kind, reply.text)
        assert isinstance(reply, wire.Reply)
        return reply

    def _overdue(self, deadline_s: float) -> None:
        raise CandidateFault("timeout", f"no result after {deadline_s:.2f} s")

    def _ended(self) -> None:
        status = self._child.result(0.2)
        if status is None:
            raise CandidateFault("cheating", "the answer is not one that the runner sends", "forged_result")
        raise CandidateFault(*_meaning(status))


def _meaning(status: int) -> tuple[str, str]:
    name = {-11: "SIGSEGV", -7: "SIGBUS", -4: "SIGILL", -8: "SIGFPE", -6: "SIGABRT"}.get(status, "")
    if status in (-11, -7):
        return "illegal_access", f"the kernel read or wrote memory that is not its own ({name})"
    if status in (-24, -9):
        return "timeout", "the process used up its CPU time"
    if status < 0:
        return "runtime_error", f"the process was ended by signal {-status} {name}".rstrip()
    return "runtime_error", f"the process ended itself with exit code {status}"
