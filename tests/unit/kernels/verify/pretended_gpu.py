"""A GPU without one: device memory is files, a process is a thread, nothing is timed. The arenas are the real ones."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from kbrl_async.kernels import settings as sections
from kbrl_async.kernels.cuda_driver import CudaError
from kbrl_async.kernels.verify import bench_options, wire
from kbrl_async.kernels.verify.cuda import arena, reference, runner
from kbrl_async.kernels.verify.cuda.reference import CudaReference
from kbrl_async.kernels.verify.known import Offloaded, Sizes
from protocols.records import Problem

SOURCE = """
import torch
class Model(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = torch.nn.Linear(size, size)
    def forward(self, x, y):
        return torch.relu(self.linear(x)) + y
def get_inputs():
    return [torch.randn(16, 8), torch.randn(16, 8)]
def get_init_inputs():
    return [8]
"""

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_size_t]
FIXED, SHARED, PRIVATE, ANONYMOUS = 16, 1, 2, 32


def mapped(address: int | None, size: int, flags: int, fd: int) -> int:
    found = libc.mmap(address, size, 3, flags, fd, 0)
    assert found not in (None, ctypes.c_void_p(-1).value)
    return int(found)


class Memory:
    """A driver whose memory is files, and whose addresses are this process's. `fails`: a call that does, `times`."""

    def __init__(self, step: int = 4096) -> None:
        self.live: dict[int, int] = {}
        self.on_host: set[int] = set()
        self.fails, self.times, self.made, self._step, self._next = "", 1, 0, step, 100

    def _try(self, name: str) -> None:
        if name == self.fails:
            self.times -= 1
            self.fails = name if self.times else ""
            raise CudaError(name, 2, "CUDA_ERROR_OUT_OF_MEMORY")

    def granularity(self, device: int) -> int:
        return self._step

    def has_host_memory(self, device: int) -> bool:
        return True

    def create(self, size: int, device: int, is_on_host: bool = False) -> int:
        """What lay there before is still there."""
        self._try("create on the host" if is_on_host else "create")
        self.made += 1
        fd = os.memfd_create("memory")
        os.write(fd, bytes([7]) * size)
        handle = self._added(fd)
        if is_on_host:
            self.on_host.add(handle)
        return handle

    def _added(self, fd: int) -> int:
        self._next += 1
        self.live[self._next] = fd
        return self._next

    def export_fd(self, handle: int) -> int:
        return os.dup(self.live[handle])

    def import_fd(self, fd: int) -> int:
        return self._added(os.dup(fd))

    def map(self, handle: int, size: int, device: int, at: int = 0) -> int:
        self._try("map")
        return mapped(None, size, SHARED, self.live[handle])

    def fill_in(self, address: int, handle: int, size: int, device: int) -> None:
        self._try("fill_in")
        mapped(address, size, SHARED | FIXED, self.live[handle])

    def clear(self, address: int, size: int) -> None:
        self.call("cuMemUnmap", address, size)

    def take_out(self, address: int, handle: int, size: int) -> None:
        self.clear(address, size)
        self.call("cuMemRelease", handle)

    def call(self, name: str, *given: Any) -> None:
        """Addresses stay mapped, to zeros: whoever looks there by mistake does not end the tests."""
        if name == "cuMemUnmap":
            mapped(given[0], given[1], PRIVATE | ANONYMOUS | FIXED, -1)
        if name == "cuMemRelease":
            os.close(self.live.pop(given[0]))

    def event(self) -> int:
        return 1

    def record_everywhere(self, *_: Any) -> None:
        """There is no stream."""

    def elapsed_ns(self, *_: Any) -> float:
        return 1e5


def bytes_at(address: int, size: int) -> Any:
    content: Any = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(content, dtype=np.uint8)


def pretend_memory(monkeypatch: pytest.MonkeyPatch, step: int = 4096) -> Memory:
    known = Memory(step)
    monkeypatch.setattr(arena, "driver", lambda: known)
    monkeypatch.setattr(arena, "_Raw", bytes_at)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 0))
    return known


def pretend(monkeypatch: pytest.MonkeyPatch) -> Memory:
    known = pretend_memory(monkeypatch)
    monkeypatch.setattr(runner, "driver", lambda: known)
    monkeypatch.setattr(reference, "driver", lambda: known)
    monkeypatch.setattr(runner, "Flush", lambda *_: SimpleNamespace(now=lambda stream: None))
    monkeypatch.setattr(reference, "memory_of", lambda options: 8 << 30)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(os, "_exit", lambda code: None)
    return known


class Child:
    """A reference's process that is a thread."""

    host_pid = os.getpid()

    def __init__(self) -> None:
        self.channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._theirs:
            self._theirs.send(wire.encode(wire.Confined("full", ())))
            setup, fds = runner.await_orders(self._theirs)
            runner.CudaRunner(self._theirs, setup, fds, torch.device("cpu")).serve()

    def freeze(self) -> bool:
        return False

    def has_ended(self, within_s: float = 0.0) -> bool:
        return False


class Homes:
    dying = SimpleNamespace(add=lambda child: child.channel.close())

    def __init__(self) -> None:
        self.given = 0

    def give(self, child: Child) -> None:
        """Nobody takes it again."""
        self.given += 1
        child.channel.close()

    def take(self) -> Child:
        return Child()


def made(
    source: str = SOURCE, claim: Callable[[int], None] = lambda size: None, homes: Homes | None = None
) -> CudaReference:
    options = bench_options(sections.TimingBench(), "cpu")
    problem = Problem("one", 1, "one", source)
    known = cast(Any, homes or Homes())
    return CudaReference(cast(Any, None), problem, options, random.Random(1), known, known, claim=claim)


def idle() -> Any:
    spares: Any = Homes()
    spares.refill = lambda: None
    return spares


def far(monkeypatch: pytest.MonkeyPatch, at: Offloaded) -> CudaReference:
    """With memory for just this, by its own prediction."""
    sizes = Sizes(2 * 512, 512, 288, frees=True, offloaded=at)
    monkeypatch.setattr(reference, "memory_of", lambda options: sizes.asked + 100)
    return made()
