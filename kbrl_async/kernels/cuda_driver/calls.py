"""Which calls there are and what they take: signatures, structures, a launch and its arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

_COOPERATIVE, _CLUSTER, _CLUSTER_POLICY, _STREAM_SERIALIZATION = 2, 4, 5, 6

_p, _size, _u64, _int, _uint = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint
SIGNATURES: dict[str, list[Any]] = {
    "cuMemGetAllocationGranularity": [_p, _p, _int],
    "cuMemCreate": [_p, _size, _p, _u64],
    "cuMemRelease": [_u64],
    "cuMemAlloc_v2": [_p, _size],
    "cuMemFree_v2": [_u64],
    "cuMemExportToShareableHandle": [_p, _u64, _int, _u64],
    "cuMemImportFromShareableHandle": [_p, _p, _int],
    "cuMemAddressReserve": [_p, _size, _size, _u64, _u64],
    "cuMemAddressFree": [_u64, _size],
    "cuMemMap": [_u64, _size, _size, _u64, _u64],
    "cuMemUnmap": [_u64, _size],
    "cuMemSetAccess": [_u64, _size, _p, _size],
    "cuMemsetD8Async": [_u64, ctypes.c_ubyte, _size, _p],
    "cuMemcpyDtoDAsync_v2": [_u64, _u64, _size, _p],
    "cuMemsetD2D8Async": [_u64, _size, ctypes.c_ubyte, _size, _size, _p],
    "cuMemsetD2D16Async": [_u64, _size, ctypes.c_ushort, _size, _size, _p],
    "cuMemsetD2D32Async": [_u64, _size, _uint, _size, _size, _p],
    "cuEventCreate": [_p, ctypes.c_uint],
    "cuEventDestroy_v2": [_p],
    "cuEventRecord": [_p, _p],
    "cuEventElapsedTime": [_p, _p, _p],
    "cuCtxSynchronize": [],
    "cuCtxResetPersistingL2Cache": [],
    "cuGraphCreate": [_p, ctypes.c_uint],
    "cuGraphDestroy": [_p],
    "cuGraphAddChildGraphNode": [_p, _p, _p, _size, _p],
    "cuGraphAddEventRecordNode": [_p, _p, _p, _size, _p],
    "cuGraphAddMemsetNode": [_p, _p, _p, _size, _p, _p],
    "cuGraphInstantiateWithFlags": [_p, _p, _u64],
    "cuGraphExecDestroy": [_p],
    "cuGraphLaunch": [_p, _p],
    "cuGraphGetNodes": [_p, _p, _p],
    "cuGraphNodeGetType": [_p, _p],
    "cuGraphNodeSetEnabled": [_p, _p, ctypes.c_uint],
    "cuGraphChildGraphNodeGetGraph": [_p, _p],
    "cuGraphKernelNodeGetParams_v2": [_p, _p],
    "cuGraphKernelNodeGetAttribute": [_p, _int, _p],
    "cuGraphMemsetNodeGetParams": [_p, _p],
    "cuGraphMemcpyNodeGetParams": [_p, _p],
    "cuFuncGetModule": [_p, _p],
    "cuPointerGetAttribute": [_p, _int, _u64],
    "cuModuleUnload": [_p],
    "cuFuncGetName": [_p, _p],
    "cuKernelGetName": [_p, _p],
    "cuCtxGetCurrent": [_p],
    "cuStreamBeginCapture_v2": [_p, _int],
    "cuStreamEndCapture": [_p, _p],
    "cuModuleLoadData": [_p, ctypes.c_char_p],
    "cuModuleGetFunction": [_p, _p, ctypes.c_char_p],
    "cuModuleGetGlobal_v2": [_p, _p, _p, ctypes.c_char_p],
    "cuFuncGetAttribute": [_p, _int, _p],
    "cuFuncSetAttribute": [_p, _int, _int],
    "cuInit": [_uint],
    "cuDeviceGet": [_p, _int],
    "cuDeviceGetName": [ctypes.c_char_p, _int, _int],
    "cuDeviceTotalMem_v2": [_p, _int],
    "cuDeviceGetAttribute": [_p, _int, _int],
    "cuLaunchKernel": [_p, *[_uint] * 7, _p, _p, _p],
}
NEWER: dict[str, list[Any]] = {
    "cuCtxRecordEvent": [_p, _p],
    "cuLaunchKernelEx": [_p, _p, _p, _p],
    "cuStreamGetCaptureInfo_v2": [_p, _p, _p, _p, _p, _p],
    "cuStreamUpdateCaptureDependencies": [_p, _p, _size, _uint],
    "cuGraphGetEdges_v2": [_p, _p, _p, _p, _p],
    "cuFuncGetParamInfo": [_p, _size, _p, _p],
    "cuKernelGetFunction": [_p, _p],
    "cuTensorMapEncodeTiled": [_p, _int, _uint, _p, _p, _p, _p, _p, _int, _int, _int, _int],
}
"""Not in every driver that we run on."""
QUICK = frozenset({"cuLaunchKernel", "cuLaunchKernelEx", "cuTensorMapEncodeTiled"})
"""Called with the interpreter's lock held: they wait for nothing, and so argument buffers can be reused."""


class CudaError(RuntimeError):
    """A driver call answered with an error; `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        self.code = code
        super().__init__(f"CUDA error {code} ({name}) in {call}")


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Launch:
    """Size and attributes of a launch, made once: thread-block clusters, a cooperative grid, or programmatic dependent
    launch.
    """

    def __init__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        shared: int,
        *,
        cluster: Sequence[int] = (1, 1, 1),
        cooperative: bool = False,
        serialize: bool = False,
        spread: bool = False,
    ) -> None:
        wanted: list[tuple[int, tuple[int, ...]]] = []
        if serialize:
            wanted.append((_STREAM_SERIALIZATION, (1,)))
        if cooperative:
            wanted.append((_COOPERATIVE, (1,)))
        if tuple(cluster) != (1, 1, 1):
            wanted += [(_CLUSTER, tuple(cluster)), *([(_CLUSTER_POLICY, (1,))] if spread else [])]
        self._attributes = (_Attribute * max(1, len(wanted)))()
        for slot, (number, values) in zip(self._attributes, wanted, strict=False):
            slot.id = number
            slot.value[: len(values)] = values
        sizes = (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block)
        self.config = _Config(*sizes, shared, 0, self._attributes, len(wanted))
        self.address = ctypes.addressof(self.config)


class Location(ctypes.Structure):
    _fields_ = (("type", _int), ("id", _int))


class AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", _int),
        ("handle_types", _int),
        ("location", Location),
        ("win32", _p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDesc(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", _int))


class KernelParams(ctypes.Structure):
    _fields_ = (
        ("func", _p),
        ("dims", ctypes.c_uint * 6),
        ("shared", ctypes.c_uint),
        ("params", _p),
        ("extra", _p),
        ("kern", _p),
        ("ctx", _p),
    )


class MemsetParams(ctypes.Structure):
    _fields_ = (
        ("dst", _u64),
        ("pitch", _size),
        ("value", ctypes.c_uint),
        ("element", ctypes.c_uint),
        ("width", _size),
        ("height", _size),
    )


class Arguments:
    """A reusable block of kernel arguments: the driver copies what the cells hold at each launch."""

    def __init__(self, cells: Sequence[Any]) -> None:
        self.cells = list(cells)
        addresses = [ctypes.addressof(cell) for cell in self.cells]
        self._array = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
        self.address = ctypes.addressof(self._array)
