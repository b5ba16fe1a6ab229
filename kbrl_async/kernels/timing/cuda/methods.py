"""How others time a function on a GPU; see `timing.methods`. Two of them need Triton."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from kbrl_async.kernels.timing.methods import Function


def do_bench(function: Function, budget_s: float) -> float:
    """`triton.testing.do_bench`: an L2-sized buffer is cleared before each call."""
    from triton.testing import do_bench as bench  # type: ignore[import-untyped, unused-ignore]

    return float(bench(function, warmup=25, rep=int(1e3 * budget_s), return_mode="median"))


def do_bench_cudagraph(function: Function, budget_s: float) -> float:
    """The same in a CUDA graph of many calls: L2 stays warm."""
    from triton.testing import do_bench_cudagraph as bench  # type: ignore[import-untyped, unused-ignore]

    cuda: Any = torch.cuda  # its streams and events have no types
    with cuda.stream(cuda.Stream()):
        return float(bench(function, rep=int(1e3 * budget_s), return_mode="median"))


def cuda_events(function: Function, budget_s: float, *, trials: int = 100, flush_bytes: int = 256 << 20) -> float:
    """KernelBench's way: a fixed number of trials, each between two events after L2 was overwritten; their mean."""
    trash = torch.empty(flush_bytes // 4, dtype=torch.int32, device="cuda")
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    cuda: Any = torch.cuda
    times: list[float] = []
    for _ in range(trials):
        trash.fill_(len(times))
        torch.cuda.synchronize()
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return statistics.fmean(times)
