"""The edges of timing on a CPU: which processor, which core, cold caches, and how long a process waited for
its core.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


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
    return _size_in(_CACHES / "index2" / "size") or default


def llc_bytes(default: int = 32 << 20) -> int:
    """Size of the first core's last-level cache."""
    return max(map(_size_in, _CACHES.glob("index*/size")), default=default)


def _size_in(path: Path) -> int:
    """As sysfs writes it; 0 where there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    units = {"K": 1 << 10, "M": 1 << 20}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text)


class CacheFlush:
    """Streams through a buffer, so that a timed call finds its private caches cold.

    Default size: twice the L2 cache (0.1 ms). The last-level cache is shared and often tens of MB; emptying all of
    it would cost more than most candidates run: `evict` takes the lines that matter out of it, one by one.
    """

    def __init__(self, size: int = 0) -> None:
        self._buffer = torch.zeros((size or 2 * l2_bytes()) // 8, dtype=torch.int64)

    def __call__(self) -> None:
        self._buffer.add_(1)


# clflush [rdi]; add rdi, 64; sub rsi, 64; ja back; mfence; ret
_EVICT = bytes.fromhex("0fae3f 4883c740 4883ee40 77f3 0faef0 c3".replace(" ", ""))


@functools.cache
def _evictor() -> Callable[[int, int], None] | None:
    """A few bytes of machine code, as no library offers it; None where the processor or the kernel refuses."""
    if platform.machine() != "x86_64" or "clflush" not in " ".join(_cpuinfo("flags")[:1]).split():
        return None
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # hardened kernels map nothing writable and executable
        return None
    page.write(_EVICT)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)(address)

    def evict(start: int, size: int, _page: mmap.mmap = page) -> None:
        run(start, size)

    return evict


def evict(tensors: Iterable[torch.Tensor]) -> bool:
    """Take the memory of dense tensors out of every cache, the shared last level too (about 50 µs a MB).

    Caches go by physical address: what is evicted here is cold for every process that shares the memory.
    False where this host can't.
    """
    run = _evictor()
    if run is None:
        return False
    for tensor in tensors:
        if size := tensor.numel() * tensor.element_size():
            run(tensor.data_ptr(), size)
    return True


@functools.cache
def keep_heap() -> None:
    """Blocks of up to 32 MB come from a heap that is never given back: else each comparison of a large output
    faults its pages in anew, which doubled the time per pair.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc has no such thing
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


class CoreUse:
    """How long a child and the calling thread waited for their core, and how long they used it, up to now.

    On a shared core one of the two waits while the other runs, so that waiting alone says too much; and a
    child that sleeps
    leaves time unused without anybody disturbing it. What others took is at most either of both: see `taken_by_others`.
    Zeros where the kernel does not say.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        own = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._fds = [fd for fd in map(_open, (f"/proc/{pid}/schedstat", own)) if fd >= 0]

    def __call__(self) -> tuple[int, int]:
        """(ns waited, ns used)."""
        waited = 0
        for fd in self._fds:
            with contextlib.suppress(OSError, IndexError):
                waited += int(os.pread(fd, 128, 0).split()[1])
        return waited, time.thread_time_ns() + process_time_ns(self._pid)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def waited_ns(pid: int) -> int:
    """How long a process was runnable without running, since its start; 0 where the kernel does not say."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/schedstat", "rb") as file:
        return int(file.read().split()[1])
    return 0


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def process_time_ns(pid: int) -> int:
    """CPU time of another process; 0 where it is gone."""
    # The kernel's encoding of another process's CPU clock, as clock_getcpuclockid(3) makes it.
    with contextlib.suppress(OSError):
        return time.clock_gettime_ns((~pid << 3) | 2)
    return 0


def taken_by_others(elapsed_ns: int, waited_ns: int, used_ns: int) -> int:
    """Time of a call that other processes had the core; never negative."""
    return max(0, min(waited_ns, elapsed_ns - used_ns))


@contextlib.contextmanager
def pinned(cores: tuple[int, ...]) -> Iterator[None]:
    """The calling thread on these cores for a while, with torch as one thread (several would fight for the
    one core).
    """
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
