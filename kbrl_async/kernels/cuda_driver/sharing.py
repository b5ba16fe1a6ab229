"""The few calls of the CUDA driver that torch has no name for: memory that can be shared by descriptor, and graphs.

Thin: each raises `CudaError` and decides nothing. Importing it loads no library; `driver()` does, and never initialises
CUDA (torch does that). Function pointers are taken once, before any candidate code can run in the process.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_POSIX_FD = 1
_PINNED, _ON_DEVICE = 1, 1
_READ_WRITE = 3
EVENT_DEFAULT = 0
KERNEL, MEMCPY, MEMSET, HOST, CHILD, EMPTY = 0, 1, 2, 3, 4, 5
_ACCESS_POLICY_WINDOW = 1

_p, _size, _u64, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int
_SIGNATURES: dict[str, list[Any]] = {
    "cuMemGetAllocationGranularity": [_p, _p, _int],
    "cuMemCreate": [_p, _size, _p, _u64],
    "cuMemRelease": [_u64],
    "cuMemExportToShareableHandle": [_p, _u64, _int, _u64],
    "cuMemImportFromShareableHandle": [_p, _p, _int],
    "cuMemAddressReserve": [_p, _size, _size, _u64, _u64],
    "cuMemAddressFree": [_u64, _size],
    "cuMemMap": [_u64, _size, _size, _u64, _u64],
    "cuMemUnmap": [_u64, _size],
    "cuMemSetAccess": [_u64, _size, _p, _size],
    "cuMemsetD8Async": [_u64, ctypes.c_ubyte, _size, _p],
    "cuMemcpyDtoDAsync_v2": [_u64, _u64, _size, _p],
    "cuEventCreate": [_p, ctypes.c_uint],
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
    "cuFuncGetName": [_p, _p],
    "cuKernelGetName": [_p, _p],
    "cuCtxGetCurrent": [_p],
}


_NEWER: dict[str, list[Any]] = {"cuCtxRecordEvent": [_p, _p]}
"""Not in every driver that we run on."""


class CudaError(RuntimeError):
    """A driver call answered with an error; `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        self.code = code
        super().__init__(f"{call}: {name} ({code})")


class _Location(ctypes.Structure):
    _fields_ = (("type", _int), ("id", _int))


class _AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", _int),
        ("handle_types", _int),
        ("location", _Location),
        ("win32", _p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _AccessDesc(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", _int))


class _KernelParams(ctypes.Structure):
    _fields_ = (
        ("func", _p),
        ("dims", ctypes.c_uint * 6),
        ("shared", ctypes.c_uint),
        ("params", _p),
        ("extra", _p),
        ("kern", _p),
        ("ctx", _p),
    )


class _MemsetParams(ctypes.Structure):
    _fields_ = (
        ("dst", _u64),
        ("pitch", _size),
        ("value", ctypes.c_uint),
        ("element", ctypes.c_uint),
        ("width", _size),
        ("height", _size),
    )


class Driver:
    """All calls use the calling thread's current context, which torch makes."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._error_name = library.cuGetErrorName
        self._calls: dict[str, Any] = {}
        for name, arguments in (_SIGNATURES | _NEWER).items():
            if name in _NEWER and not hasattr(library, name):
                continue
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _int
            self._calls[name] = function

    def call(self, name: str, *arguments: Any) -> None:
        code = self._calls[name](*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._error_name(code, ctypes.byref(text))
            raise CudaError(name, code, (text.value or b"?").decode())

    def _out(self, name: str, kind: Any, *arguments: Any) -> Any:
        value = kind()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def granularity(self, device: int) -> int:
        return int(self._out("cuMemGetAllocationGranularity", _size, ctypes.byref(_prop(device)), 1))

    def create(self, size: int, device: int) -> int:
        """Handle of new physical memory that can be exported."""
        return int(self._out("cuMemCreate", _u64, size, ctypes.byref(_prop(device)), 0))

    def export_fd(self, handle: int) -> int:
        return int(self._out("cuMemExportToShareableHandle", _int, handle, _POSIX_FD, 0))

    def import_fd(self, fd: int) -> int:
        return int(self._out("cuMemImportFromShareableHandle", _u64, _p(fd), _POSIX_FD))

    def map(self, handle: int, size: int, device: int) -> int:
        """Address of the memory of `handle`, readable and writable by `device`."""
        address = int(self._out("cuMemAddressReserve", _u64, size, 0, 0, 0))
        self.call("cuMemMap", address, size, 0, handle, 0)
        access = _AccessDesc(_Location(_ON_DEVICE, device), _READ_WRITE)
        self.call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
        return address

    def unmap(self, address: int, size: int, handle: int) -> None:
        self.call("cuMemUnmap", address, size)
        self.call("cuMemAddressFree", address, size)
        self.call("cuMemRelease", handle)

    def event(self) -> int:
        return int(self._out("cuEventCreate", _p, EVENT_DEFAULT))

    def record_everywhere(self, event: int, stream: int) -> None:
        """After all work that was submitted so far on any stream; where the driver can't, after that on `stream`."""
        if "cuCtxRecordEvent" in self._calls:
            try:
                self.call("cuCtxRecordEvent", self._out("cuCtxGetCurrent", _p), event)
                return
            except CudaError:
                del self._calls["cuCtxRecordEvent"]
        self.call("cuEventRecord", event, stream)

    def elapsed_ns(self, begin: int, end: int) -> float:
        return float(self._out("cuEventElapsedTime", ctypes.c_float, begin, end)) * 1e6

    def graph(self) -> int:
        return int(self._out("cuGraphCreate", _p, 0))

    def add_child(self, graph: int, after: int | None, child: int) -> int:
        return int(self._out("cuGraphAddChildGraphNode", _p, graph, *_after(after), child))

    def add_event(self, graph: int, after: int | None, event: int) -> int:
        return int(self._out("cuGraphAddEventRecordNode", _p, graph, *_after(after), event))

    def add_memset(self, graph: int, after: int | None, address: int, size: int, value: int) -> int:
        """`size` is in bytes and a multiple of 4."""
        params = _MemsetParams(address, 0, value, 4, size // 4, 1)
        context = self._out("cuCtxGetCurrent", _p)
        return int(self._out("cuGraphAddMemsetNode", _p, graph, *_after(after), ctypes.byref(params), context))

    def instantiate(self, graph: int) -> int:
        return int(self._out("cuGraphInstantiateWithFlags", _p, graph, 0))

    def nodes(self, graph: int) -> list[tuple[int, int]]:
        """(node, type) of a graph and of the graphs inside it."""
        count = _size()
        self.call("cuGraphGetNodes", graph, None, ctypes.byref(count))
        array = (_p * count.value)()
        self.call("cuGraphGetNodes", graph, array, ctypes.byref(count))
        found: list[tuple[int, int]] = []
        for node in [int(item or 0) for item in array]:
            kind = self._type(node)
            found.append((node, kind))
            if kind == CHILD:
                found += self.nodes(self._child(node))
        return found

    def _type(self, node: int) -> int:
        kind = _int()
        self.call("cuGraphNodeGetType", node, ctypes.byref(kind))
        return kind.value

    def _child(self, node: int) -> int:
        graph = _p()
        self.call("cuGraphChildGraphNodeGetGraph", node, ctypes.byref(graph))
        return int(graph.value or 0)

    def kernel_name(self, node: int) -> str:
        """The (mangled) name of a kernel node's function."""
        params = _KernelParams()
        self.call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(params))
        name = ctypes.c_char_p()
        if params.func:
            self.call("cuFuncGetName", ctypes.byref(name), params.func)
        else:
            self.call("cuKernelGetName", ctypes.byref(name), params.kern)
        return (name.value or b"").decode(errors="replace")

    def keeps_l2(self, node: int) -> bool:
        """Whether a kernel node asks for lines that persist in L2."""
        value = (ctypes.c_uint64 * 8)()
        self.call("cuGraphKernelNodeGetAttribute", node, _ACCESS_POLICY_WINDOW, ctypes.byref(value))
        return bool(value[1])


def _after(node: int | None) -> tuple[Any, int]:
    if node is None:
        return None, 0
    return ctypes.byref(_p(node)), 1


def _prop(device: int) -> _AllocationProp:
    return _AllocationProp(_PINNED, _POSIX_FD, _Location(_ON_DEVICE, device), None)


@functools.cache
def driver() -> Driver:
    """`OSError` where this host has no CUDA driver."""
    return Driver()
