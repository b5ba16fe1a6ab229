"""Backends by name. To add one: one file beside this one, one line in `_BACKENDS`."""

from __future__ import annotations

from kbrl_async.errors import ConfigError
from kbrl_async.kernels.backends.building.backend import Backend
from kbrl_async.kernels.backends.building.plan import Planned
from kbrl_async.kernels.backends.c.build import CBackend
from kbrl_async.kernels.backends.inline.cpp import CppBackend
from kbrl_async.kernels.backends.inline.cuda import CudaBackend
from kbrl_async.kernels.backends.nvrtc.build import NvrtcBackend
from kbrl_async.kernels.backends.triton.build import TritonBackend

_BACKENDS: dict[str, Backend] = {
    "c": Planned(CBackend(), "c_kernel", is_cuda=False),
    "cpp": CppBackend(),
    "cuda": CudaBackend(),
    "cuda-nvrtc": Planned(NvrtcBackend(), "cuda_kernel", is_cuda=True),
    "triton": TritonBackend(),
}


def backends() -> list[str]:
    """Names of all backends."""
    return list(_BACKENDS)


def backend(name: str) -> Backend:
    """`ConfigError` for a name that is not known."""
    if name not in _BACKENDS:
        raise ConfigError(f"there is no backend {name!r}", f"Choose one of: {', '.join(_BACKENDS)}")
    return _BACKENDS[name]
