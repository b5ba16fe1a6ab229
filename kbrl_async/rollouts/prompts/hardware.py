"""What a prompt tells of the machine that kernels will run on: a few figures that decide how a fast kernel looks.

A GPU is asked through the driver's attributes, which needs no context and so no memory on it; a CPU through /proc and
/sys. Where nothing can be learned, nothing is said.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from kbrl_async.kernels.cuda_driver import CudaError, driver

_SHARED_PER_BLOCK, _SMS, _CLOCK_KHZ, _MEMORY_KHZ, _BUS_BITS, _L2 = 97, 16, 13, 36, 37, 38
_MAJOR, _MINOR, _REGISTERS, _THREADS_PER_SM = 75, 76, 82, 39
Attribute = Callable[[int], int]


class GpuFacts(msgspec.Struct, frozen=True):
    name: str
    capability: str
    sms: int
    clock_mhz: int
    memory_gib: float
    bandwidth_gbs: float
    """By clock and width of the memory bus; a kernel reaches nine tenths of it at best."""
    l2_mib: float
    shared_kib: float
    """Most shared memory of one block."""
    threads_per_sm: int

    def text(self) -> str:
        return (
            f"GPU: {self.name}, compute capability {self.capability}, {self.sms} SMs at {self.clock_mhz} MHz, "
            f"{self.memory_gib:.0f} GiB of memory at {self.bandwidth_gbs:.0f} GB/s, {self.l2_mib:.0f} MiB of L2, "
            f"up to {self.shared_kib:.0f} KiB of shared memory a block, {self.threads_per_sm} threads an SM."
        )


def gpu_facts(name: str, memory_bytes: int, attribute: Attribute) -> GpuFacts:
    """From the driver's attributes (`CUdevice_attribute`) of one device."""
    return GpuFacts(
        name=name,
        capability=f"{attribute(_MAJOR)}.{attribute(_MINOR)}",
        sms=attribute(_SMS),
        clock_mhz=attribute(_CLOCK_KHZ) // 1000,
        memory_gib=memory_bytes / 2**30,
        # double data rate: two transfers a clock
        bandwidth_gbs=2.0 * attribute(_MEMORY_KHZ) * 1e3 * attribute(_BUS_BITS) / 8 / 1e9,
        l2_mib=attribute(_L2) / 2**20,
        shared_kib=attribute(_SHARED_PER_BLOCK) / 2**10,
        threads_per_sm=attribute(_THREADS_PER_SM),
    )


def of_gpu(index: int = 0) -> str:
    """Facts of the first GPU that this process may see; empty where there is none."""
    try:
        cuda = driver()
        device, name, total = cuda.device(index)
        return gpu_facts(name, total, lambda which: cuda.device_attribute(which, device)).text()
    except (OSError, CudaError):
        return ""


def of_cpu(cpuinfo: Path = Path("/proc/cpuinfo"), cache: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> str:
    """Name, vector width and caches of this processor; kernels run on one core of it."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    vectors = next(
        (word for word, flag in (("AVX-512", "avx512f"), ("AVX2", "avx2"), ("NEON", "asimd")) if flag in known), ""
    )
    sizes = [(level, _read(cache / f"index{index}" / "size")) for level, index in (("L1", 0), ("L2", 2), ("L3", 3))]
    caches = ", ".join(f"{size.replace('K', ' KiB').replace('M', ' MiB')} of {level}" for level, size in sizes if size)
    parts = [name[1] if name else "", vectors, caches]
    said = ", ".join(part for part in parts if part)
    return f"CPU: one core of {said}." if said else ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def facts_for(backend_runs_on_gpu: bool) -> str:
    """What this host can say; empty where kernels run elsewhere."""
    if backend_runs_on_gpu:
        return of_gpu() if os.environ.get("CUDA_VISIBLE_DEVICES") != "" else ""
    return of_cpu()
