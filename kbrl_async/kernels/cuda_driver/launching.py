"""CUDA's driver API through ctypes: load machine code, find functions, launch. No toolkit, no compiler, no build step.

Calls keep the interpreter's lock (`PyDLL`): a launch takes two microseconds, and argument buffers can be reused.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

_ATTRIBUTE_MAX_THREADS, _ATTRIBUTE_STATIC_SHARED, _ATTRIBUTE_LOCAL, _ATTRIBUTE_REGISTERS = 0, 1, 3, 4
_ATTRIBUTE_MAX_DYNAMIC_SHARED = 8
_DEVICE_SHARED_OPTIN = 97
_CLUSTER, _CLUSTER_POLICY, _STREAM_SERIALIZATION, _COOPERATIVE = 4, 5, 6, 2
DEFAULT_SHARED = 48 << 10


class CudaError(RuntimeError):
    """A call of the driver failed; `code` is its CUresult."""

    def __init__(self, code: int, call: str, text: str) -> None:
        self.code = code
        super().__init__(f"CUDA error {code} ({text}) in {call}")


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@functools.cache
def library() -> ctypes.PyDLL:
    """Raises `OSError` where no driver is installed."""
    loaded = ctypes.PyDLL("libcuda.so.1")
    launch = loaded.cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return loaded


def check(code: int, call: str) -> None:
    if code != 0:
        text = ctypes.c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(code, call, (text.value or b"unknown").decode())


def load_module(image: bytes) -> int:
    """A module from a cubin, or from PTX that ends with a zero byte, in the current context."""
    module = ctypes.c_void_p()
    check(library().cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
    return module.value or 0


def function(module: int, name: str) -> int:
    found = ctypes.c_void_p()
    code = library().cuModuleGetFunction(ctypes.byref(found), ctypes.c_void_p(module), name.encode())
    check(code, f"cuModuleGetFunction({name})")
    return found.value or 0


def attribute(of: int, which: int) -> int:
    value = ctypes.c_int()
    check(library().cuFuncGetAttribute(ctypes.byref(value), which, ctypes.c_void_p(of)), "cuFuncGetAttribute")
    return value.value


def function_facts(of: int) -> tuple[int, int, int]:
    """Registers of a thread, 4-byte words it spills, and the most threads a block may have."""
    spills = attribute(of, _ATTRIBUTE_LOCAL) // 4
    return attribute(of, _ATTRIBUTE_REGISTERS), spills, attribute(of, _ATTRIBUTE_MAX_THREADS)


def allow_shared(of: int, device: int = 0) -> int:
    """Let a function ask for as much dynamic shared memory as the device has beside its static part; how much."""
    most = ctypes.c_int()
    check(library().cuDeviceGetAttribute(ctypes.byref(most), _DEVICE_SHARED_OPTIN, device), "cuDeviceGetAttribute")
    dynamic = most.value - attribute(of, _ATTRIBUTE_STATIC_SHARED)
    code = library().cuFuncSetAttribute(ctypes.c_void_p(of), _ATTRIBUTE_MAX_DYNAMIC_SHARED, dynamic)
    check(code, "cuFuncSetAttribute")
    return dynamic


class Arguments:
    """A reusable block of kernel arguments: the driver copies what the cells hold at each launch."""

    def __init__(self, cells: Sequence[Any]) -> None:
        self.cells = list(cells)
        addresses = [ctypes.addressof(cell) for cell in self.cells]
        self._array = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
        self.address = ctypes.addressof(self._array)


def launch(of: int, grid: Sequence[int], block: Sequence[int], shared: int, stream: int, arguments: Arguments) -> None:
    code = library().cuLaunchKernel(of, *grid, *block, shared, stream, arguments.address, None)
    if code != 0:
        check(code, "cuLaunchKernel")


def launch_extended(
    of: int,
    grid: Sequence[int],
    block: Sequence[int],
    shared: int,
    stream: int,
    arguments: Arguments,
    *,
    cluster: int = 1,
    cooperative: bool = False,
    serialize: bool = False,
) -> None:
    """With thread-block clusters, a cooperative grid, or programmatic dependent launch."""
    wanted: list[tuple[int, tuple[int, ...]]] = []
    if serialize:
        wanted.append((_STREAM_SERIALIZATION, (1,)))
    if cooperative:
        wanted.append((_COOPERATIVE, (1,)))
    if cluster != 1:
        wanted += [(_CLUSTER, (cluster, 1, 1)), (_CLUSTER_POLICY, (1,))]
    attributes = (_Attribute * max(1, len(wanted)))()
    for slot, (number, values) in zip(attributes, wanted, strict=False):
        slot.id = number
        slot.value[: len(values)] = values
    config = _Config((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared, stream, attributes, len(wanted))
    code = library().cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(of), ctypes.c_void_p(arguments.address), None
    )
    check(code, "cuLaunchKernelEx")
