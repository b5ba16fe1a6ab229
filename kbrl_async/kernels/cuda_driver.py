"""The calls of CUDA's driver API that torch has no name for, through ctypes: machine code and its launches, memory that
can be shared by descriptor, graphs. The one binding, for launchers in children and for the trusted side.

Thin: each raises `CudaError` and decides nothing. Importing it loads no library; `driver()` does, and only `device`
initialises CUDA (else torch does that). Function pointers are taken once, before any candidate code can run in the
process.

By ctypes, though wheels of torch bring `cuda.bindings`: only those from 2.10 on and only for GPUs do, a launch through
ctypes takes two microseconds, and hosts that only build have neither the driver nor the bindings.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

_POSIX_FD = 1
_PINNED, _ON_DEVICE = 1, 1
_READ_WRITE = 3
EVENT_DEFAULT = 0
KERNEL, MEMCPY, MEMSET, HOST, CHILD, EMPTY = 0, 1, 2, 3, 4, 5
_ACCESS_POLICY_WINDOW = 1
_MAX_THREADS, _STATIC_SHARED, _LOCAL, _REGISTERS, _MAX_DYNAMIC_SHARED = 0, 1, 3, 4, 8
_DEVICE_SHARED_OPTIN = 97
_CARVEOUT, _LARGE_CLUSTERS = 9, 14
_COOPERATIVE, _CLUSTER, _CLUSTER_POLICY, _STREAM_SERIALIZATION = 2, 4, 5, 6
_RELAXED, _SET_DEPENDENCIES = 2, 1
DEFAULT_SHARED = 48 << 10

_p, _size, _u64, _int, _uint = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint
_SIGNATURES: dict[str, list[Any]] = {
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
_NEWER: dict[str, list[Any]] = {
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
_QUICK = frozenset({"cuLaunchKernel", "cuLaunchKernelEx", "cuTensorMapEncodeTiled"})
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


class Arguments:
    """A reusable block of kernel arguments: the driver copies what the cells hold at each launch."""

    def __init__(self, cells: Sequence[Any]) -> None:
        self.cells = list(cells)
        addresses = [ctypes.addressof(cell) for cell in self.cells]
        self._array = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
        self.address = ctypes.addressof(self._array)


class Driver:
    """All calls use the calling thread's current context, which torch makes."""

    def __init__(self) -> None:
        library, quick = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
        self._error_name = library.cuGetErrorName
        self.images: dict[int, bytes] = {}
        """Machine code by the module that it was loaded as: whose kernel a function is."""
        self._calls: dict[str, Any] = {}
        for name, arguments in (_SIGNATURES | _NEWER).items():
            if name in _NEWER and not hasattr(library, name):
                continue
            function = getattr(quick if name in _QUICK else library, name)
            function.argtypes, function.restype = arguments, _int
            self._calls[name] = function
        self._launch = self._calls["cuLaunchKernel"]

    def call(self, name: str, *arguments: Any) -> None:
        code = self._calls[name](*arguments)
        if code != 0:
            raise self._error(name, code)

    def succeeds(self, name: str, *arguments: Any) -> bool:
        return bool(self._calls[name](*arguments) == 0)

    def _error(self, name: str, code: int) -> CudaError:
        text = ctypes.c_char_p()
        self._error_name(code, ctypes.byref(text))
        return CudaError(name, code, (text.value or b"?").decode())

    def _out(self, name: str, kind: Any, *arguments: Any) -> Any:
        value = kind()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def load_module(self, image: bytes) -> int:
        """A module from a cubin, or from PTX that ends with a zero byte, in the current context."""
        module = int(self._out("cuModuleLoadData", _p, image) or 0)
        self.images[module] = image
        return module

    def unload_modules(self) -> None:
        """All that were loaded; nobody may launch their functions any more."""
        while self.images:
            self.call("cuModuleUnload", self.images.popitem()[0])

    def parameter_sizes(self, function: int) -> list[int]:
        """Bytes of each parameter that a kernel's machine code declares."""
        sizes: list[int] = []
        offset, size = _size(), _size()
        while self.succeeds("cuFuncGetParamInfo", function, len(sizes), ctypes.byref(offset), ctypes.byref(size)):
            sizes.append(size.value)
        return sizes

    def function(self, module: int, name: str) -> int:
        return int(self._out("cuModuleGetFunction", _p, module, name.encode()) or 0)

    def variable(self, module: int, name: str) -> tuple[int, int]:
        """Address and bytes of a variable of the device."""
        address, size = _u64(), _size()
        self.call("cuModuleGetGlobal_v2", ctypes.byref(address), ctypes.byref(size), module, name.encode())
        return address.value, size.value

    def device(self, index: int) -> tuple[int, str, int]:
        """A device that this process may see: handle, name and bytes of memory. The driver is initialised for it, and
        no context made."""
        self.call("cuInit", 0)
        name, handle = ctypes.create_string_buffer(128), int(self._out("cuDeviceGet", _int, index))
        self.call("cuDeviceGetName", name, len(name), handle)
        return handle, name.value.decode(), int(self._out("cuDeviceTotalMem_v2", _size, handle))

    def device_attribute(self, which: int, device: int = 0) -> int:
        return int(self._out("cuDeviceGetAttribute", _int, which, device))

    def _attribute(self, of: int, which: int) -> int:
        return int(self._out("cuFuncGetAttribute", _int, which, of))

    def function_facts(self, of: int) -> tuple[int, int, int]:
        """Registers of a thread, 4-byte words it spills, and the most threads a block may have."""
        return self._attribute(of, _REGISTERS), self._attribute(of, _LOCAL) // 4, self._attribute(of, _MAX_THREADS)

    def allow_shared(self, of: int, device: int = 0) -> int:
        """Let a function ask for as much dynamic shared memory as the device has beside its static part; how much."""
        most = self.device_attribute(_DEVICE_SHARED_OPTIN, device)
        dynamic = most - self._attribute(of, _STATIC_SHARED)
        self.call("cuFuncSetAttribute", of, _MAX_DYNAMIC_SHARED, dynamic)
        return dynamic

    def launch(
        self, of: int, grid: Sequence[int], block: Sequence[int], shared: int, stream: int, arguments: Arguments
    ) -> None:
        code = self._launch(of, *grid, *block, shared, stream, arguments.address, None)
        if code != 0:
            raise self._error("cuLaunchKernel", code)

    def launch_extended(
        self,
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
        launch = Launch(
            grid, block, shared, cluster=(cluster, 1, 1), cooperative=cooperative, serialize=serialize, spread=True
        )
        self.launch_configured(of, launch, stream, arguments)

    def launch_configured(self, of: int, launch: Launch, stream: int, arguments: Arguments) -> None:
        launch.config.stream = stream
        self.call("cuLaunchKernelEx", launch.address, of, arguments.address, None)

    def allow_large_clusters(self, of: int) -> None:
        """More than 8 blocks, where the chip has them."""
        self.call("cuFuncSetAttribute", of, _LARGE_CLUSTERS, 1)

    def prefer_carveout(self, of: int, percent: int) -> None:
        self.call("cuFuncSetAttribute", of, _CARVEOUT, percent)

    def begin_capture(self, stream: int) -> None:
        self.call("cuStreamBeginCapture_v2", stream, _RELAXED)

    def end_capture(self, stream: int) -> int:
        """The graph of what was submitted since `begin_capture`."""
        graph = _p()
        self.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        return int(graph.value or 0)

    def drop_capture(self, stream: int) -> None:
        graph = _p()
        self._calls["cuStreamEndCapture"](stream, ctypes.byref(graph))
        if graph.value:
            self.call("cuGraphDestroy", graph.value)

    def set_dependencies(self, stream: int, nodes: Sequence[int]) -> None:
        """What is captured next waits for these nodes, and for no others."""
        array = (_p * max(1, len(nodes)))(*nodes)
        self.call("cuStreamUpdateCaptureDependencies", stream, array, len(nodes), _SET_DEPENDENCIES)

    def dependencies(self, stream: int) -> list[int]:
        """The nodes that stand for the end of what was captured last."""
        status, number, graph, nodes, count = _int(), _u64(), _p(), _p(), _size()
        found = (ctypes.byref(one) for one in (status, number, graph, nodes, count))
        self.call("cuStreamGetCaptureInfo_v2", stream, *found)
        if not nodes.value:
            return []
        array = ctypes.cast(nodes, ctypes.POINTER(_p))
        return [int(array[i] or 0) for i in range(count.value)]

    def granularity(self, device: int) -> int:
        return int(self._out("cuMemGetAllocationGranularity", _size, ctypes.byref(_prop(device)), 1))

    def create(self, size: int, device: int) -> int:
        """Handle of new physical memory that can be exported."""
        return int(self._out("cuMemCreate", _u64, size, ctypes.byref(_prop(device)), 0))

    def allocate(self, size: int) -> int:
        """Address of new memory that nobody else can be given."""
        return int(self._out("cuMemAlloc_v2", _u64, size))

    def export_fd(self, handle: int) -> int:
        return int(self._out("cuMemExportToShareableHandle", _int, handle, _POSIX_FD, 0))

    def import_fd(self, fd: int) -> int:
        return int(self._out("cuMemImportFromShareableHandle", _u64, _p(fd), _POSIX_FD))

    def map(self, handle: int, size: int, device: int, at: int = 0) -> int:
        """Address of the memory of `handle`, readable and writable by `device`: `at`, where that is not 0.

        :raises CudaError: or the driver refuses; `MemoryError`: that address is taken.
        """
        address = self.reserve(size, at)
        try:
            self.fill_in(address, handle, size, device)
        except CudaError:
            self.call("cuMemAddressFree", address, size)
            raise
        return address

    def reserve(self, size: int, at: int = 0) -> int:
        """Addresses with nothing behind them. Raises as `map` does."""
        address = int(self._out("cuMemAddressReserve", _u64, size, 0, at, 0))
        if at not in (0, address):
            self.call("cuMemAddressFree", address, size)
            raise MemoryError(f"addresses from {at:#x} on are taken in this process")
        return address

    def fill_in(self, address: int, handle: int, size: int, device: int) -> None:
        """The memory of `handle` behind addresses that were reserved."""
        self.call("cuMemMap", address, size, 0, handle, 0)
        access = _AccessDesc(_Location(_ON_DEVICE, device), _READ_WRITE)
        try:
            self.call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
        except CudaError:
            self.call("cuMemUnmap", address, size)
            raise

    def take_out(self, address: int, handle: int, size: int) -> None:
        """The addresses stay reserved."""
        self.call("cuMemUnmap", address, size)
        self.call("cuMemRelease", handle)

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
