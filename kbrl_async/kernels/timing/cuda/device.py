"""A GPU, as timing needs it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path

import torch

from kbrl_async.kernels.timing.cuda.clocks import held
from kbrl_async.kernels.timing.cuda.methods import cuda_events, do_bench, do_bench_cudagraph
from kbrl_async.kernels.timing.device import PROBE_S, TimedDevice
from kbrl_async.kernels.timing.methods import Method, torch_timer
from kbrl_async.kernels.timing.roofline import Peaks

_L2_OVER_MEMORY = 4.0
"""More than a GPU's L2 is faster than its memory. A copy within it takes less than a launch, so it is not measured."""


class TimedGpu(TimedDevice):
    """See `timing.device`."""

    batch = 10
    inductor = {"aot_inductor.embed_kernel_binary": True}  # noqa: RUF012 - read only, as the class's it replaces

    def hardware(self) -> str:
        return str(torch.cuda.get_device_name(torch.device(self.name)))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.name)

    def peaks(self, hardware: str, budget_s: float = PROBE_S) -> Peaks | None:
        """TF32 stays as the user set it; half precision is that of the tensor cores."""
        with torch.cuda.device(self.name):
            try:
                return self._peaks(hardware, budget_s)
            except torch.OutOfMemoryError:
                return None
            finally:
                torch.cuda.empty_cache()

    def _peaks(self, hardware: str, budget_s: float) -> Peaks:
        memory_gbs = self.copy_gbs(1 << 29, budget_s)
        return Peaks(
            hardware,
            memory_gbs,
            _L2_OVER_MEMORY * memory_gbs,
            int(getattr(torch.cuda.get_device_properties(self.name), "L2_cache_size", 0)),
            self.gemm_gflops(torch.float32, 8192, budget_s),
            self.gemm_gflops(torch.bfloat16, 8192, budget_s),
        )

    def methods(self) -> dict[str, Method]:
        found: dict[str, Method] = {"KernelBench cuda_event": cuda_events, "torch Timer": torch_timer}
        if find_spec("triton"):
            found |= {"do_bench": do_bench, "do_bench_cudagraph": do_bench_cudagraph}
        return found

    def library_runner(self, library: str) -> str:
        return f"AOTIModelContainerRunnerCuda({library!r}, 1, {self.name!r})"

    def held_clocks(self, mode: str, folder: Path) -> AbstractContextManager[int | None]:
        return held(mode, self.name, folder)
