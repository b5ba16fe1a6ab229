"""The edges of timing on a CPU: which processor, which core, cold caches, and how long a process waited for its core."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch


@functools.cache
def hardware() -> str:
    """Model name and core count from /proc/cpuinfo."""
    names = _cpuinfo("model name") or [platform.processor() or platform.machine()]
    return f"{names[0]} × {os.cpu_count()}"


def clock_mhz(core: int) -> float | None:
    """What /proc/cpuinfo says of a core's clock; None where it says nothing."""
    clocks = _cpuinfo("cpu MHz")
    return float(clocks[core]) if core < len(clocks) else None


def _cpuinfo(key: str) -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(key)]


def l2_bytes(default: int = 1 << 20) -> int:
    """Size of the first core's L2 cache."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
    except OSError:
        return default
    units = {"K": 1 << 10, "M": 1 << 20}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text)


class Flush:
    """Streams through a buffer, so that a timed call finds its private caches cold.

    Default size: twice the L2 cache (0.1 ms). The last-level cache is shared and often tens of MB; emptying it would cost
    more than most candidates run, and reference and candidate find it in the same state either way.
    """

    def __init__(self, size: int = 0) -> None:
        self._buffer = torch.zeros((size or 2 * l2_bytes()) // 8, dtype=torch.int64)

    def __call__(self) -> None:
        self._buffer.add_(1)


class Waited:
    """How long a process was runnable without running, from /proc/PID/schedstat; 0 where the kernel does not say."""

    def __init__(self, pid: int) -> None:
        try:
            self._fd = os.open(f"/proc/{pid}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def ns(self) -> int:
        if self._fd < 0:
            return 0
        try:
            return int(os.pread(self._fd, 128, 0).split()[1])
        except (OSError, IndexError):
            return 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def pinned(cores: tuple[int, ...]) -> Iterator[None]:
    """The calling thread on these cores for a while, with torch as one thread (several would fight for the one core)."""
    torch.set_num_threads(1)
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
