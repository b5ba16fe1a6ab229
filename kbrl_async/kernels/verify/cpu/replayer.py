"""The code of a confined child that does a program again: no Python of a candidate ever runs in it, only its compiled
functions. Reference and candidate are timed in the same way here.

Blocks that no step may write to are mapped so that nothing in this process can write to them. The others lie in a file
that the trusted side holds too: it puts them back before each call.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import time
import warnings
from typing import Any

import torch

from kbrl_async.kernels.sandbox import Isolation
from kbrl_async.kernels.verify import values, wire
from kbrl_async.kernels.verify.cpu import program
from kbrl_async.kernels.verify.cpu.compiled import Compiler
from kbrl_async.kernels.verify.cpu.program import Call, CpuProgram, Step
from kbrl_async.kernels.verify.cpu.runner import Runner, failure, mute
from kbrl_async.kernels.verify.operators import computes, copies

_now = time.thread_time_ns
warnings.filterwarnings("ignore", "The given buffer is not writable")


def main(channel: socket.socket, payload: bytes, fds: list[int], isolation: Isolation) -> None:
    """Entry of the child. `fds`: the file of blocks that stay, and the one of blocks that are put back."""
    mute()
    channel.send(wire.encode(wire.Confined(isolation.level, isolation.missing)))
    try:
        replayer = Replayer(channel, wire.decode_setup(payload), fds)
    except BaseException as error:
        channel.send(wire.encode(failure(error)))
        return
    replayer.serve()


class Replayer(Runner):
    """Answers what a runner answers; its forward is a program."""

    def __init__(self, channel: socket.socket, setup: wire.Setup, fds: list[int]) -> None:
        torch.set_grad_enabled(False)
        self.channel, self.fds = channel, fds
        self.slots, self.held, self.last = [], [None, None], None
        self.copy_to, self.arena = -1, None
        work = program.decode(setup.program)
        libraries = {key: ctypes.CDLL(path) for key, path in setup.artifacts.items()}
        self._compiler = Compiler(work, _constants(work, setup.blocks, fds), libraries)
        self.model: Any = self._compiler.forward()
        channel.send(wire.encode(wire.Ready()))

    def _order(self, order: wire.Order, fds: list[int]) -> None:
        super()._order(order, fds)
        for number, slot in enumerate(self.slots):
            tensors: list[torch.Tensor] = []
            values.flatten(slot, tensors)
            self.slots[number] = tensors

    def _traced(self, slot: int, muted: bool) -> tuple[Any, wire.Trace]:
        """One run, and what its steps took. A muted one leaves the own calls out and gives (outputs, what operators
        computed), so that the trusted side can see whether one of them had the answer."""
        launches: dict[str, tuple[int, int]] = {}
        ops: dict[str, tuple[int, int]] = {}
        kept: dict[str, torch.Tensor] = {}

        def note(step: Step, begun: int, made: Any) -> None:
            spent = _now() - begun
            name = step.name.partition(".")[0]
            book = launches if isinstance(step, Call) else ops
            count, before = book.get(name, (0, 0))
            book[name] = (count + 1, before + spent)
            if muted and (computes(name) or copies(name)):
                for item in made if isinstance(made, (list, tuple)) else [made]:
                    if isinstance(item, torch.Tensor) and (computes(name) or item.is_contiguous()):
                        kept[f"{len(kept):06} {name}"] = item.clone()

        result = self._compiler.watched(note, _now, muted=muted)(*self.slots[slot])
        return ((result, kept) if muted else result), wire.Trace(launches, ops)


def _constants(work: CpuProgram, places: list[tuple[int, int]], fds: list[int]) -> list[torch.Tensor]:
    maps = []
    for fd, rights in zip(fds, (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE), strict=True):
        size = os.fstat(fd).st_size
        maps.append(mmap.mmap(fd, size, mmap.MAP_SHARED, rights) if size else b"")
        os.close(fd)
    found = []
    for constant in work.constants:
        file, begin = places[constant.block]
        dtype, meta = values.dtype_of(constant.meta.dtype), constant.meta
        size = work.blocks[constant.block].size // dtype.itemsize
        flat = (
            torch.frombuffer(maps[file], dtype=dtype, count=size, offset=begin) if size else torch.empty(0, dtype=dtype)
        )
        found.append(flat.as_strided(meta.shape, meta.strides, meta.place // dtype.itemsize))
    return found
