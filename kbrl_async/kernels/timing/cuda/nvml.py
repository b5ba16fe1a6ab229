"""The little of NVIDIA's management library that a bench needs, behind an interface that a test can play.

Only `lock` and `unlock` change anything, and only `clocks.ClockLock` calls them.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from kbrl_async.errors import HostError, MissingTool

THROTTLE = {
    0x1: "GpuIdle",
    0x2: "ApplicationsClocks",
    0x4: "SwPowerCap",
    0x8: "HwSlowdown",
    0x10: "SyncBoost",
    0x20: "SwThermal",
    0x40: "HwThermal",
    0x80: "PowerBrake",
    0x100: "DisplayClocks",
}
REJECTING = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
"""Reasons that make a sample slower than the same code a moment before."""


def throttle_names(bits: int) -> list[str]:
    """Reasons by name; an unknown bit by its number.

    >>> throttle_names(0x44)
    ['SwPowerCap', 'HwThermal']
    """
    known = [name for bit, name in THROTTLE.items() if bits & bit]
    rest = bits & ~sum(THROTTLE)
    return [*known, hex(rest)] if rest else known


def is_rejected(bits: int) -> bool:
    return bool(bits & REJECTING)


class Nvml(Protocol):
    """One GPU, by the index that the driver gives it (not that of CUDA_VISIBLE_DEVICES)."""

    def name(self) -> str: ...

    def uuid(self) -> str: ...

    def sm_mhz(self) -> int:
        """Now."""

    def max_sm_mhz(self) -> int: ...

    def supported_sm_mhz(self) -> list[int]:
        """Clocks that can be locked, at the memory clock of now; any order."""

    def throttle_bits(self) -> int: ...

    def other_pids(self) -> list[int]:
        """Processes that have a context on this GPU; ours among them."""

    def memory_of(self, pid: int) -> int | None:
        """Bytes of this GPU that a process has, its context included; None where the driver does not tell."""

    def lock(self, mhz: int) -> None:
        """Raises `HostError` where we have no right to."""

    def unlock(self) -> None:
        """The driver's own clocks again. Raises `HostError` where we have no right to."""


class NvmlDriver:
    """The real one, by nvidia-ml-py."""

    def __init__(self, index: int) -> None:
        try:
            self._lib: Any = importlib.import_module("pynvml")
            self._lib.nvmlInit()
            self._gpu = self._lib.nvmlDeviceGetHandleByIndex(index)
            self._max_sm_mhz = 0
        except ImportError as error:
            raise MissingTool("nvidia-ml-py is not installed", "pip install nvidia-ml-py") from error
        except self._lib.NVMLError as error:
            raise MissingTool(f"NVML does not answer for GPU {index}: {error}", "Is there an NVIDIA driver?") from error

    def name(self) -> str:
        return _text(self._lib.nvmlDeviceGetName(self._gpu))

    def uuid(self) -> str:
        return _text(self._lib.nvmlDeviceGetUUID(self._gpu))

    def sm_mhz(self) -> int:
        return int(self._lib.nvmlDeviceGetClockInfo(self._gpu, self._lib.NVML_CLOCK_SM))

    def max_sm_mhz(self) -> int:
        if not self._max_sm_mhz:  # asked twice a candidate, and each answer takes the driver milliseconds
            self._max_sm_mhz = int(self._lib.nvmlDeviceGetMaxClockInfo(self._gpu, self._lib.NVML_CLOCK_SM))
        return self._max_sm_mhz

    def supported_sm_mhz(self) -> list[int]:
        memory = self._lib.nvmlDeviceGetSupportedMemoryClocks(self._gpu)
        return [int(mhz) for mhz in self._lib.nvmlDeviceGetSupportedGraphicsClocks(self._gpu, max(memory))]

    def throttle_bits(self) -> int:
        return int(self._lib.nvmlDeviceGetCurrentClocksThrottleReasons(self._gpu))

    def other_pids(self) -> list[int]:
        return [int(process.pid) for process in self._lib.nvmlDeviceGetComputeRunningProcesses(self._gpu)]

    def memory_of(self, pid: int) -> int | None:
        for process in self._lib.nvmlDeviceGetComputeRunningProcesses(self._gpu):
            if process.pid == pid and process.usedGpuMemory is not None:  # not told in some containers
                return int(process.usedGpuMemory)
        return None

    def lock(self, mhz: int) -> None:
        self._change("lock", lambda: self._lib.nvmlDeviceSetGpuLockedClocks(self._gpu, mhz, mhz))

    def unlock(self) -> None:
        self._change("restore", lambda: self._lib.nvmlDeviceResetGpuLockedClocks(self._gpu))

    def _change(self, what: str, call: Any) -> None:
        try:
            call()
        except self._lib.NVMLError as error:
            cause = f"this user may not {what} the GPU's clocks: {error}"
            raise HostError(cause, "Set timing_bench.clocks=observe, or run as an administrator") from error


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def opened(factory: str, index: int) -> Nvml:
    """`factory` is `"module:callable"`, so that a guard process can be given a fake too."""
    module, _, name = factory.partition(":")
    made: Nvml = getattr(importlib.import_module(module), name)(index)
    return made


DRIVER = "kbrl_async.kernels.timing.cuda.nvml:NvmlDriver"
