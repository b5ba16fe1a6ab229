"""Processor and GPU use of this process and its children, cheap enough to be asked with every heartbeat.

CPU time of a child that was waited for moves into its parent's account, so the sum over the living tree only grows; a
child that is reaped by somebody else takes its account with it, and such a fall counts as nothing used.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Reading = tuple[float, float]
"""Utilisation (0 … 1) of a process's GPUs, in the mean, and memory in use (MB) on the fullest."""
NO_GPU: Reading = (-1.0, 0.0)
_TICKS_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int, proc: Path = Path("/proc")) -> float:
    """User and system time of a process, what it has waited for, and its living descendants. 0 where it is gone."""
    total, todo = 0, [str(pid)]
    while todo:
        folder = proc / todo.pop()
        with contextlib.suppress(OSError, IndexError, ValueError):
            # the name in parentheses may hold anything, so count from behind it: utime, stime, cutime, cstime
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
            for thread in (folder / "task").iterdir():
                with contextlib.suppress(OSError):
                    todo += (thread / "children").read_text().split()
    return total / _TICKS_S


class CpuMeter:
    """Cores used since the last call."""

    def __init__(self, clock: Callable[[], float], used: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._used = used or (lambda: cpu_seconds(os.getpid()))
        self._at, self._before = clock(), self._used()

    def take(self) -> float:
        now, used = self._clock(), self._used()
        elapsed_s, spent_s = now - self._at, used - self._before
        self._at, self._before = now, used
        return round(max(0.0, spent_s) / elapsed_s, 3) if elapsed_s > 0 else 0.0


class GpuMeter:
    """The GPUs that this process computes on, by NVML; asks only once torch has made a context here, or as told."""

    def __init__(self, uuids: Sequence[str] = (), library: Any = None) -> None:
        """`uuids`: the GPUs as NVML names them; none: that of torch, as soon as it has one."""
        self._uuids = tuple(uuids)
        self._library = library
        self._handles: list[Any] = []
        self._given_up = False

    def take(self) -> Reading:
        uuids = self._uuids or _torch_gpu()
        if not uuids or self._given_up:
            return NO_GPU
        try:
            return self._read(uuids)
        except Exception as error:  # NVML's errors share no base with anything, and a figure is not worth a failure
            if not type(error).__name__.startswith(("NVML", "ImportError", "ModuleNotFound")):
                raise
            self._given_up = True
            return NO_GPU

    def _read(self, uuids: Sequence[str]) -> Reading:
        if not self._handles:
            self._library = self._library or importlib.import_module("pynvml")
            self._library.nvmlInit()
            self._handles = [self._library.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        used = [self._library.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in self._handles]
        memory = [self._library.nvmlDeviceGetMemoryInfo(handle).used / 2**20 for handle in self._handles]
        return round(sum(used) / len(used), 3), round(max(memory), 1)


def _torch_gpu() -> tuple[str, ...]:
    """NVML's name of the GPU that torch uses in this process; none where it uses none (it is not made to)."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ()
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return (f"GPU-{uuid}",) if uuid else ()
