"""A processor, as timing needs it."""

from __future__ import annotations

import torch

from kbrl_async.kernels.timing.cpu.host import hardware, llc_bytes
from kbrl_async.kernels.timing.device import PROBE_S, TimedDevice
from kbrl_async.kernels.timing.methods import Method, naive_median, torch_timer
from kbrl_async.kernels.timing.roofline import Peaks


class TimedCpu(TimedDevice):
    """See `timing.device`."""

    def hardware(self) -> str:
        return hardware()

    def peaks(self, hardware: str, budget_s: float = PROBE_S, *, cache_bytes: int | None = None) -> Peaks:
        """Of the calling thread's core, by torch: copies beyond and within the last-level cache, a matrix product.

        Leaves torch with one thread, as a bench has it.
        """
        torch.set_num_threads(1)
        cache = llc_bytes() if cache_bytes is None else cache_bytes
        big, small = max(4 * cache, 64 << 20), max(min(cache // 8, 4 << 20), 1 << 16)
        return Peaks(
            hardware,
            self.copy_gbs(big // 2, budget_s),
            self.copy_gbs(small // 2, budget_s / 3),
            cache,
            self.gemm_gflops(torch.float32, 512, budget_s),
        )

    def methods(self) -> dict[str, Method]:
        return {"naive median": naive_median, "torch Timer": torch_timer}

    def library_runner(self, library: str) -> str:
        return f"AOTIModelContainerRunnerCpu({library!r}, 1)"
