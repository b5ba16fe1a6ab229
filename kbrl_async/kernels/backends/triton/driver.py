"""The drivers that Triton gets from us: one that only pretends (compiling ahead, interpreting), one that launches.

Neither needs a C compiler: Triton's own driver builds two shared objects for each Python version and signature.
"""

from __future__ import annotations

import ctypes
import functools
import types
from collections.abc import Callable
from typing import Any

from kbrl_async.kernels import cuda_driver
from kbrl_async.kernels.backends.launch.pretend import DEVICE_PROPERTIES
from kbrl_async.kernels.backends.launch.recorder import RECORDER
from kbrl_async.kernels.backends.triton.arguments import BoundArguments

_TUNING_MS = {"warmup": 2, "rep": 10}
_CACHE_BYTES = 256 << 20
_SHARED_KB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 110: 227, 120: 99, 121: 99}
"""Most dynamic shared memory of a block by compute capability, where it is not Hopper's and Blackwell's 227."""


def shared_limit(arch: int) -> int:
    """Bytes of shared memory that one block may have, for kernels that are compiled where the GPU is not."""
    return _SHARED_KB.get(arch, 227) << 10


class PretendDriver:
    """Answers as a GPU of compute capability `arch` would, and runs nothing."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self.utils = types.SimpleNamespace(
            load_binary=lambda *_: (0, 0, 32, 0, 1024),
            get_device_properties=lambda device: {
                "max_shared_mem": shared_limit(arch),
                "max_num_regs": 65536,
                "multiprocessor_count": DEVICE_PROPERTIES["multi_processor_count"],
                "warpSize": 32,
                "sm_clock_rate": 1980000,
                "mem_clock_rate": 2619000,
                "mem_bus_width": 5120,
            },
        )
        self.launcher_cls: Callable[..., Any] = lambda src, metadata: lambda *args: None

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one."""

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(self._arch, 10)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda call, quantiles=(0.5,): [1.0 for _ in quantiles]

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(1)

    def clear_cache(self, cache: Any) -> None:
        """Nothing is measured."""


class LaunchDriver(PretendDriver):
    """Triton's driver on a GPU, through `cuda_driver`. Autotuning is kept short: the bench waits for it."""

    def __init__(self) -> None:
        import torch

        major, minor = torch.cuda.get_device_capability()
        super().__init__(10 * major + minor)
        device: Any = torch.cuda.get_device_properties(0)
        facts = self.utils.get_device_properties(0) | {
            "max_shared_mem": device.shared_memory_per_block_optin,
            "multiprocessor_count": device.multi_processor_count,
        }
        self.utils = types.SimpleNamespace(load_binary=_load_binary, get_device_properties=lambda device: facts)
        self.launcher_cls = Launcher
        self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._device: Callable[[], int] = torch._C._cuda_getDevice

    def get_current_device(self) -> int:
        return self._device()

    def get_current_stream(self, device: int | None = None) -> int:
        return self._stream(self._device() if device is None else device)

    def set_current_device(self, device: int) -> None:
        import torch

        torch.cuda.set_device(device)

    def get_benchmarker(self) -> Callable[..., list[float]]:
        from triton.testing import do_bench

        return functools.partial(do_bench, **_TUNING_MS)

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(_CACHE_BYTES // 4, dtype=torch.int, device="cuda")

    def clear_cache(self, cache: Any) -> None:
        cache.zero_()


def _load_binary(name: str, image: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
    module = cuda_driver.driver().load_module(image)
    function = cuda_driver.driver().function(module, name)
    registers, spills, threads = cuda_driver.driver().function_facts(function)
    if shared > cuda_driver.DEFAULT_SHARED:
        cuda_driver.driver().allow_shared(function, device)
    return module, function, registers, spills, threads


class Launcher:
    """Launches one compiled kernel; Triton calls it with everything but the constants bound."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self._bound = BoundArguments(list(src.signature.values()), getattr(metadata, "tensordesc_meta", None))
        # Two hidden arguments of every kernel: global scratch and profile scratch.
        self._scratch_cell = ctypes.c_uint64()
        self._arguments = cuda_driver.Arguments([*self._bound.cells, self._scratch_cell, ctypes.c_uint64()])
        self._meta = metadata
        self._is_plain = metadata.num_ctas == 1 and not metadata.launch_cooperative_grid and not metadata.launch_pdl

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
        _, enter, leave, *values = rest
        if x * y * z <= 0:
            return
        if RECORDER.tape is not None:
            RECORDER.tape(self, tuple(values), [])
        self._bound.fill(values)
        self._scratch_cell.value = self._scratch(x * y * z, stream)
        if enter is not None:
            enter(rest[0])
        RECORDER.call(self._meta.name, self._launch, (x, y, z), packed, stream, function)
        if leave is not None:
            leave(rest[0])

    def _launch(self, grid: tuple[int, int, int], packed: Any, stream: int, function: int) -> None:
        warps, ctas, shared = packed[:3]
        block = (32 * warps, 1, 1)
        if self._is_plain:
            cuda_driver.driver().launch(function, grid, block, shared, stream, self._arguments)
            return
        cuda_driver.driver().launch_extended(
            function,
            (grid[0] * ctas, grid[1], grid[2]),
            block,
            shared,
            stream,
            self._arguments,
            cluster=ctas,
            cooperative=bool(self._meta.launch_cooperative_grid),
            serialize=bool(self._meta.launch_pdl),
        )

    def _scratch(self, programs: int, stream: int) -> int:
        """What device-side tensor descriptors are written to; allocated as the candidate's `set_allocator` says."""
        size = self._meta.global_scratch_size
        if size <= 0:
            return 0
        from triton.runtime import _allocation

        bytes_ = programs * self._meta.num_ctas * size
        self._held = _allocation._allocator.get()(bytes_, self._meta.global_scratch_align, stream)
        return int(self._held.data_ptr())
