"""The trusted handle on recorders: one serves many candidates in turn, and is replaced where it dies or may be spoilt.

::

    record ─▶ Recording's bytes        forget ─▶ the next one is recorded alone, in a fresh process

Invariants
* Whatever such a process does, `record` ends in time and gives bytes, which nobody has looked at.
* Whoever finds something against a candidate can have it recorded where no other has been before it: `is_fresh`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch

from kbrl_async.errors import InfraError
from kbrl_async.kernels.cuda_driver import CudaError
from kbrl_async.kernels.sandbox import Child, Isolation, Limits, Zygote
from kbrl_async.kernels.stages import span
from kbrl_async.kernels.timing.turns import DeviceTurns
from kbrl_async.kernels.verify import recording, replies, wire
from kbrl_async.kernels.verify.cuda import starting
from kbrl_async.kernels.verify.cuda.arena import DeviceArena
from kbrl_async.kernels.verify.cuda.dying import Dying
from kbrl_async.kernels.verify.cuda.prewarmed import LIFE_S, PrewarmedChildren, as_files
from kbrl_async.kernels.verify.memory import as_message, memory_file

ENTRY = "kbrl_async.kernels.verify.cuda.record.child:main"
_MAP_S = 10.0
_NAME = "a recorder"
MAX_SERVED = 256
_MAX_LEFT = 256 << 20
_MAX_BYTES = 16 << 20


class Patience(NamedTuple):
    """A recording in brief is waited for no longer than `least_s` and `times` the slowest of the last recordings, once
    `known` of them came. In training endless loops are common.
    """

    known: int = 8
    least_s: float = 5.0
    times: float = 10.0


PATIENCE = Patience()


def spares_for(zygote: Zygote, limits: Limits, device: str, count: int) -> PrewarmedChildren:
    """Recorders that wait for their first candidate."""
    return PrewarmedChildren(zygote, msgspec.structs.replace(limits, cpu_s=LIFE_S), device, ENTRY, count)


class Recorders:
    """`arena` is the bench's own mapping of what the present recorder maps: another one with each process, because one
    that is being killed may still write into its own for seconds.
    """

    def __init__(
        self,
        spares: PrewarmedChildren,
        device: str,
        arena_bytes: int,
        most_served: int = MAX_SERVED,
        patience: Patience = PATIENCE,
    ) -> None:
        """`spares`: as `spares_for` makes them, maybe others' too."""
        self._device, self._most_served, self._waits = device, most_served, patience
        self.arena = DeviceArena.new(arena_bytes, torch.device(device))
        self._spares = spares
        self._child: Child | None = None
        self._dying = Dying()
        self._is_used = self._is_begun = False
        self._served = self._left = 0
        self._took: deque[float] = deque(maxlen=32)
        """Seconds of the last recordings that came."""
        self.isolation = Isolation("none", ("no recorder was started",))

    def close(self) -> None:
        self._end()
        self._dying.close()
        self.arena.close()

    def resize(self, arena_bytes: int) -> None:
        """The next candidate gets so much memory: in the same process, unless something that it has served is still in
        the old.
        """
        if self._left:
            self._end()
        self._take_memory(arena_bytes)
        self._is_used = self._child is not None
        if self._child is not None:
            self._is_begun = False
            with contextlib.suppress(OSError):
                self._is_begun = self._map(self._child)
            if not self._is_begun:
                self._end()

    def shrink(self, arena_bytes: int) -> None:
        """The same, and nobody who is being killed has any memory of before."""
        self.resize(arena_bytes)
        self._dying.close()

    def forget(self) -> None:
        """The next candidate gets a fresh process: what this one has served may have spoilt it."""
        self._end()

    @property
    def is_fresh(self) -> bool:
        """Whether the last candidate was the first of its process."""
        return self._served <= 1

    def record(
        self,
        order: wire.RecordForward,
        weights: tuple[int, ...],
        deadline_s: float,
        fill: Callable[[DeviceArena], None],
    ) -> bytes:
        """Of a candidate, the encoded `Recording`. `weights`: the descriptor of the weights, where it has any;
        artifacts are given by path in `order.setup`. `fill` writes its inputs into the arena. Of one in brief much more
        time than others needed is not waited for, however long the deadline: who gets none is judged another way.

        :raises NotStarted: the host starts no recorder; `NoRoom` where only memory is missing.
        :raises CudaError: there is no memory for another arena.
        """
        with span("a recorder that is ready"):
            child = self._ready()
        fill(self.arena)
        torch.cuda.synchronize()
        self._served += 1
        began, limit_s = time.monotonic(), self._patience(deadline_s) if order.is_brief else deadline_s
        message, more = as_message(wire.encode(order))
        file, files = memory_file("recording"), as_files(order.setup.artifacts)
        try:
            socket.send_fds(child.channel, [message], [*more, file, *weights, *files])
            told = self._answer(limit_s)
            if not isinstance(told, wire.Recorded):
                return self._failed("its recorder did not answer in time" if told is None else "its recorder ended")
            content = os.pread(file, min(told.size, _MAX_BYTES), 0)
        except OSError:
            return self._failed("its recorder ended")
        finally:
            for fd in (*more, file, *files):
                os.close(fd)
        self._took.append(time.monotonic() - began)
        self._left = told.left
        if told.is_over or told.left > _MAX_LEFT or self._served >= self._most_served:
            self._retire()
        return content

    def _patience(self, deadline_s: float) -> float:
        if len(self._took) < self._waits.known:
            return deadline_s
        return min(deadline_s, self._waits.least_s + self._waits.times * max(self._took))

    def _failed(self, why: str) -> bytes:
        self._retire()  # whether it had served others still counts: they may have laid that for this one
        return wire.encode(recording.Recording(refused=why))

    def _retire(self) -> None:
        """Its arena stays as it is: what it recorded last is still to be read."""
        served = self._served
        self._end()
        self._served = served

    def _ready(self) -> Child:
        if self._child is not None and self._child.has_ended():
            self._end()
        if self._child is None:
            self._renew()
            self._child = starting.first_that_starts(self._begun)
        return self._child

    def _renew(self) -> None:
        """Memory that no earlier process can reach."""
        if not self._is_used:
            self._is_used = True
            return
        self._take_memory(self.arena.size)

    def _take_memory(self, size: int) -> None:
        self.arena.close()
        try:
            self.arena = DeviceArena.new(size, torch.device(self._device))
        except CudaError:  # it is still theirs
            self._end()
            self._dying.close()
            self.arena = DeviceArena.new(size, torch.device(self._device))

    def _begun(self) -> Child:
        """A fresh one, with the arena. What goes wrong before its first candidate is nobody's fault."""
        self._child, self._served, self._is_begun = self._spares.take(), 0, False
        child = self._child
        try:
            confined = starting.confined(child, _NAME)
            self.isolation = Isolation(confined.level, confined.missing)
            with contextlib.suppress(OSError):  # it has ended, and is asked how
                self._send_arena(child)
            starting.receive(wire.Ready, child, _NAME, _MAP_S)
            self._is_begun = True
        except InfraError:
            self._end()
            raise
        return child

    def _map(self, child: Child) -> bool:
        """Whether one that has served candidates has the arena. `OSError` where it has ended."""
        self._send_arena(child)
        return isinstance(self._answer(_MAP_S), wire.Ready)

    def _send_arena(self, child: Child) -> None:
        fd = self.arena.export()
        try:
            socket.send_fds(child.channel, [wire.encode(wire.Map(self.arena.size))], [fd])
        finally:
            os.close(fd)

    def _answer(self, deadline_s: float) -> wire.Reply | None:
        """None where none came in time. `OSError` where it has ended, or says what no recorder says."""
        assert self._child is not None
        channel = self._child.channel
        if not DeviceTurns.answers(channel, deadline_s, self._child if self._is_begun else None):
            return None
        data = channel.recv(wire.MAX_REPLY)
        try:
            return replies.read(data)
        except replies.Malformed as error:
            raise OSError("no answer of a recorder") from error

    def _end(self) -> None:
        if self._child is not None:
            self._dying.add(self._child)
            self._child = None
        self._served = 0
