"""Tensors that pass for CUDA tensors, so that GPU code meets what it expects where there is no GPU.

Two users: ahead-of-time compilation (`meta` tensors: shapes without memory, nothing is computed) and Triton's
interpreter (real CPU tensors). `device`, `is_cuda` and `.cuda()` answer as on a GPU, `device="cuda"` allocates on the
stand-in device, and what `torch.cuda` says about the device is said for an H100.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CLAIMED = torch.device("cuda", 0)
_GETTERS: dict[Any, Any] = {
    torch.Tensor.device.__get__: _CLAIMED,
    torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.get_device: 0,
}
DEVICE_PROPERTIES = {
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "total_memory": 80 << 30,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_block_optin": 227 << 10,
    "shared_memory_per_multiprocessor": 228 << 10,
    "regs_per_multiprocessor": 65536,
    "L2_cache_size": 50 << 20,
    "warp_size": 32,
}


class PretendCuda(TorchFunctionMode):
    """While it is entered, `stand_in` is the GPU; with `everything`, what is asked for on the CPU lands there too."""

    def __init__(self, stand_in: str, everything: bool) -> None:
        super().__init__()
        self._device = torch.device(stand_in)
        self._replaced = ("cuda", "cpu") if everything else ("cuda",)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _GETTERS:
            return _GETTERS[func]
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        return func(*map(self._here, args), **{name: self._here(value) for name, value in (kwargs or {}).items()})

    def _here(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._device if value.partition(":")[0] in self._replaced else value
        return self._device if isinstance(value, torch.device) and value.type in self._replaced else value


def pretend(stand_in: str, everything: bool = False) -> None:
    """For the rest of this process. Only ever called in a disposable child."""
    if everything:
        torch.set_default_device(stand_in)
    mode: Any = PretendCuda(stand_in, everything)
    mode.__enter__()
    for name, value in (_namespace() | (_GRAPHS if stand_in == "meta" else {})).items():
        setattr(torch.cuda, name, value)
    # The bench looks whether `torch.cuda.synchronize` is still torch's own, so only what it calls is replaced.
    setattr(torch._C, "_cuda_synchronize", lambda: None)  # noqa: B010 - not there in a torch for CPUs
    torch.nn.Module.cuda = lambda self, device=None: self.to("cuda")  # type: ignore[method-assign]


def inputs_of(problem: types.ModuleType) -> list[Any]:
    """What its `get_inputs` gives on the stand-in device; real tensors on the CPU where it looks at values."""
    try:
        return list(problem.get_inputs())
    except (NotImplementedError, RuntimeError):
        with torch._C.DisableTorchFunction():
            return list(problem.get_inputs())


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Nothing runs here, so nothing is waited for."""


class _Event:
    """As `torch.cuda.Event`; a class, because annotations name it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 1.0


class _Stream:
    """As `torch.cuda.Stream`."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    synchronize = wait_stream = wait_event = _nothing

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Graph:
    """As `torch.cuda.CUDAGraph` where nothing is computed: what is captured is called, which is all that is asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    capture_begin = capture_end = instantiate = replay = reset = _nothing

    def pool(self) -> tuple[int, int]:
        return (0, 1)


_GRAPHS: dict[str, Any] = {
    "CUDAGraph": _Graph,
    "graph": lambda *args, **kwargs: contextlib.nullcontext(),
    "graph_pool_handle": lambda: (0, 1),
    "is_current_stream_capturing": lambda: False,
    "make_graphed_callables": lambda callables, *args, **kwargs: callables,
}


def _namespace() -> dict[str, Callable[..., Any]]:
    stream = _Stream()
    properties = types.SimpleNamespace(**DEVICE_PROPERTIES)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "empty_cache": lambda: None,
        "device": lambda device=None: contextlib.nullcontext(),
        "device_of": lambda tensor: contextlib.nullcontext(),
        "stream": lambda stream=None: contextlib.nullcontext(),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "Stream": _Stream,
        "Event": _Event,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
    }
