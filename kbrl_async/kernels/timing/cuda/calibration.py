"""A fixed kernel of ours after each pair: the GPU's clock from inside, and whether the GPU is what it was a moment ago.

::

    pair ─▶ a chain of multiply-adds on every SM, between readings of %globaltimer and clock64 ─▶ Beat
            over 2 % off the last ones, a clock under 75 % of the GPU's, or somebody else on it ─▶ the pair is set aside

It runs in the trusted process, where no candidate is, and needs no right to ask the driver for anything.

Invariants
* Whether a pair is set aside depends on our kernel alone, never on what the pair measured.
* A GPU that settles at another clock is believed after half a window: beats are compared with the last ones, not with
  the first.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from kbrl_async.errors import HostError, MissingTool
from kbrl_async.kernels.timing.cuda.clocks import is_slow

ROUNDS = 50_000
"""Multiply-adds of each thread, four cycles each: 0.1 ms at 2 GHz. `%globaltimer` moves in steps of 1 µs on Hopper."""
DRIFT = 0.02
WINDOW = 9
SHARED_NS = 500_000.0
"""A launch and a wait take some 0.03 ms more than the kernel; another process's slice takes two."""
NAME = "calibrate"
KERNEL = r"""
extern "C" __global__ void calibrate(unsigned long long *out, int rounds) {
    unsigned long long begin_ns, end_ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin_ns));
    unsigned long long begin = clock64();
    float value = threadIdx.x;
    for (int i = 0; i < rounds; ++i) value = __fmaf_rn(value, 0.999f, 0.5f);
    unsigned long long end = clock64();
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end_ns));
    if (value < 0.0f) out[0] = 0;
    if (threadIdx.x == 0) {
        out[2 * blockIdx.x] = end_ns - begin_ns;
        out[2 * blockIdx.x + 1] = end - begin;
    }
}
"""


class KernelRun(msgspec.Struct, frozen=True):
    """One run of the kernel."""

    ns: float
    """Of the work, by the GPU's timer: median over the SMs."""
    mhz: float
    host_ns: float
    """From the launch until the host knew that it was over."""


def beat_of(spans: Sequence[tuple[int, int]], host_ns: float) -> KernelRun:
    """From what each block wrote, (ns, cycles).

    >>> beat_of([(100_000, 198_000), (101_000, 199_980), (99_000, 196_020)], 130_000.0)
    Beat(ns=100000.0, mhz=1980.0, host_ns=130000.0)
    """
    clocks = [1e3 * cycles / ns for ns, cycles in spans if ns > 0]
    if not clocks:
        raise HostError("the GPU's timer stands still", "Time on another GPU, or update the driver")
    return KernelRun(float(statistics.median(ns for ns, _ in spans)), statistics.median(clocks), host_ns)


class Steady:
    """Judges beats one after the other: why the pair before one must be set aside, or an empty string."""

    def __init__(self, expected_mhz: float | None = None) -> None:
        self._expected_mhz = expected_mhz
        self._last: deque[float] = deque(maxlen=WINDOW)

    def fault(self, beat: KernelRun) -> str:
        usual = statistics.median(self._last) if self._last else beat.ns
        self._last.append(beat.ns)
        if beat.host_ns > beat.ns + SHARED_NS:
            return "shared"
        if is_slow(beat.mhz, self._expected_mhz):
            return "slow"
        return "drift" if abs(beat.ns / usual - 1) > DRIFT else ""


class Calibration:
    """The kernel on one GPU. Raises `MissingTool` where it can't be compiled: a bench then times without it."""

    def __init__(self, device: Any) -> None:
        import torch

        from kbrl_async.kernels import cuda_driver
        from kbrl_async.kernels.backends.nvrtc import compiler as nvrtc

        self._device = torch.device(device)
        found = torch.cuda.get_device_properties(self._device)
        try:
            built = nvrtc.compile_source(KERNEL, [NAME], f"sm_{found.major}{found.minor}")
        except (MissingTool, nvrtc.CompileError, OSError) as error:
            raise MissingTool(f"no calibration kernel: {error}", "pip install nvidia-cuda-nvrtc") from error
        self._blocks = int(found.multi_processor_count)
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().synchronize()  # there is a context from here on
            self._out = torch.zeros(2 * self._blocks, dtype=torch.int64, device=self._device)
            self._function = cuda_driver.driver().function(
                cuda_driver.driver().load_module(built.cubin), built.names[NAME]
            )
        cells = [ctypes.c_void_p(self._out.data_ptr()), ctypes.c_int(ROUNDS)]
        self._arguments = cuda_driver.Arguments(cells)
        self._launch = cuda_driver.driver().launch
        self.beat()

    def beat(self) -> KernelRun:
        """One run, awaited: some 0.15 ms."""
        import torch

        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            stream.synchronize()
            begun = time.perf_counter_ns()
            self._launch(self._function, (self._blocks, 1, 1), (32, 1, 1), 0, stream.cuda_stream, self._arguments)
            stream.synchronize()
            host_ns = float(time.perf_counter_ns() - begun)
            numbers = self._out.tolist()
        return beat_of(list(zip(numbers[::2], numbers[1::2], strict=True)), host_ns)
