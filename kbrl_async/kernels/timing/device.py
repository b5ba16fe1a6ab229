"""What timing asks of a device, one folder a kind: `cpu`, `cuda`. A further kind is a further folder with a `device`
module, and one line in `KINDS`; nothing else here asks which kind it is.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from kbrl_async.errors import ConfigError, UserError
from kbrl_async.kernels.timing.methods import Method
from kbrl_async.kernels.timing.roofline import Peaks

KINDS = {
    "cpu": "kbrl_async.kernels.timing.cpu.device:TimedCpu",
    "cuda": "kbrl_async.kernels.timing.cuda.device:TimedGpu",
}
PROBE_S = 0.15


class TimedDevice:
    """One device, by its name: `"cpu"` or `"cuda:N"`. Making one touches nothing."""

    batch = 1
    """Calls between two looks at the clock, where a peak is looked for: as many as hide that each is launched."""
    inductor: Mapping[str, object] = {}
    """What ahead-of-time Inductor is told for it, so that one file is all that a candidate's child has to read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def hardware(self) -> str:
        """What the processor or the GPU is called."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Returns when what was started on it has ended."""

    def peaks(self, hardware: str, budget_s: float = PROBE_S) -> Peaks | None:
        """Measured now, `budget_s` each; None where there is no room for it."""
        raise NotImplementedError

    def methods(self) -> dict[str, Method]:
        """Other projects' ways to time that can run on it, by name."""
        raise NotImplementedError

    def library_runner(self, library: str) -> str:
        """The constructor below `torch._C._aoti` that runs such a library on it, as source."""
        raise NotImplementedError

    def held_clocks(self, mode: str, folder: Path) -> AbstractContextManager[int | None]:
        """What a bench enters for its life: the locked clock in MHz, or None where nothing is changed (`"observe"`).
        `folder`: `locks` in the run's folder, which its nannies look into.

        :raises ConfigError: `"lock"`, and it has none that can be locked.
        """
        if mode == "lock":
            raise ConfigError("timing_bench.clocks=lock is for a GPU, and this bench has none", "Set clocks=observe")
        return nullcontext()

    def copy_gbs(self, size: int, budget_s: float) -> float:
        """Bytes read and written, of a copy of `size` bytes."""
        source = torch.ones(size // 4, dtype=torch.float32, device=self.name)
        target = torch.empty_like(source)
        return 2 * size / self._best_s(lambda: target.copy_(source), budget_s) / 1e9

    def gemm_gflops(self, dtype: torch.dtype, side: int, budget_s: float) -> float:
        """Of a square matrix product."""
        a, b = (torch.randn(side, side, device=self.name, dtype=dtype) for _ in range(2))
        return 2 * side**3 / self._best_s(lambda: a @ b, budget_s) / 1e9

    def _best_s(self, work: Callable[[], object], budget_s: float) -> float:
        """The best time of one call, as peaks are what can be reached."""
        for _ in range(2):
            work()
        self.synchronize()
        times: list[float] = []
        end = time.perf_counter() + budget_s
        while not times or time.perf_counter() < end:
            begin = time.perf_counter()
            for _ in range(self.batch):
                work()
            self.synchronize()
            times.append((time.perf_counter() - begin) / self.batch)
        return statistics.quantiles(times, n=20)[0] if len(times) >= 20 else min(times)


def timed_device(name: str) -> TimedDevice:
    """The device of that name.

    :raises UserError: nobody knows such a kind.
    """
    made: TimedDevice = made_of(KINDS, name)
    return made


def made_of(kinds: Mapping[str, str], name: str) -> Any:
    """What `kinds` has for the kind of this device, as `module:class`, made of its name.

    :raises UserError: nobody knows such a kind.
    """
    kind = name.partition(":")[0]
    if kind not in kinds:
        raise UserError(f"{name!r} is no device", f"Choose {', '.join(kinds)} or cuda:N")
    module, _, place = kinds[kind].partition(":")
    return getattr(importlib.import_module(module), place)(name)


def hardware_of(device: str) -> str:
    """The name of the processor or the GPU that `device` (`"cpu"`, `"cuda:N"`) is."""
    return timed_device(device).hardware()
