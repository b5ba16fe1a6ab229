"""How others time a function, to be put beside this bench on the same kernels: each gives milliseconds of one call.

None of them pairs, interleaves, or knows how sure it is. They call the function in this process: for trusted code only.
Which there are for a device says `TimedDevice.methods`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

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


def ratio(method: Method, first: Function, second: Function, budget_s: float) -> float:
    """What the method says of the speed of the second over the first, one after the other."""
    return method(first, budget_s / 2) / method(second, budget_s / 2)
