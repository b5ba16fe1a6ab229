"""How others time a function, to be put beside this bench on the same kernels: each gives milliseconds of one call.

None of them pairs, interleaves, or knows how sure it is. GPU methods need CUDA and, two of them, Triton. They call the
function in this process: for trusted code only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

Function = Callable[[], object]
Method = Callable[[Function, float], float]
"""(function, seconds that may be spent) → milliseconds."""


def naive_median(function: Function, budget_s: float) -> float:
    """A loop and a stop watch."""
    for _ in range(3):
        function()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def torch_timer(function: Function, budget_s: float) -> float:
    """`torch.utils.benchmark.Timer`, in blocks sized by itself."""
    from torch.utils.benchmark import Timer

    timer = Timer("function()", globals={"function": function}, num_threads=1)
    return 1e3 * float(timer.blocked_autorange(min_run_time=budget_s).median)


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


def methods(device: str) -> dict[str, Method]:
    """Those that can run on `device`, by name."""
    if not device.startswith("cuda"):
        return {"naive median": naive_median, "torch Timer": torch_timer}
    found: dict[str, Method] = {"KernelBench cuda_event": cuda_events, "torch Timer": torch_timer}
    if find_spec("triton"):
        found |= {"do_bench": do_bench, "do_bench_cudagraph": do_bench_cudagraph}
    return found


def ratio(method: Method, first: Function, second: Function, budget_s: float) -> float:
    """What the method says of the speed of the second over the first, one after the other."""
    return method(first, budget_s / 2) / method(second, budget_s / 2)
