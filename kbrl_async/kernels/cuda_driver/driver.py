"""The calls as methods: each raises `CudaError` and decides nothing."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from kbrl_async.kernels.cuda_driver.calls import (
    NEWER,
    QUICK,
    SIGNATURES,
    AccessDesc,
    AllocationProp,
    Arguments,
    CudaError,
    KernelParams,
    Launch,
    Location,
    MemsetParams,
)

_ON_DEVICE, _ON_HOST, _PINNED, _POSIX_FD, _READ_WRITE = 1, 3, 1, 1, 3
_EVENT_DEFAULT = 0
_ACCESS_POLICY_WINDOW = 1
_MAX_THREADS, _STATIC_SHARED, _LOCAL, _REGISTERS, _MAX_DYNAMIC_SHARED = 0, 1, 3, 4, 8
_DEVICE_SHARED_OPTIN, _HOST_NUMA_ID, _HAS_HOST_MEMORY = 97, 134, 141
_CARVEOUT, _LARGE_CLUSTERS = 9, 14
_RELAXED, _SET_DEPENDENCIES = 2, 1
KERNEL, MEMCPY, MEMSET, HOST, CHILD, EMPTY = 0, 1, 2, 3, 4, 5
DEFAULT_SHARED = 48 << 10

_p, _size, _u64, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int


class Driver:
    """All calls use the calling thread's current context, which torch makes."""

    def __init__(self) -> None:
        library, quick = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
        self._error_name = library.cuGetErrorName
        self.images: dict[int, bytes] = {}
        """Machine code by the module that it was loaded as: whose kernel a function is."""
        self._calls: dict[str, Any] = {}
        for name, arguments in (SIGNATURES | NEWER).items():
            if name in NEWER and not hasattr(library, name):
                continue
            function = getattr(quick if name in QUICK else library, name)
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

    def create(self, size: int, device: int, is_on_host: bool = False) -> int:
        """Handle of new physical memory that can be exported: the device's, or pinned memory of the host."""
        prop = _prop(device)
        if is_on_host:
            prop.location = Location(_ON_HOST, max(0, self.device_attribute(_HOST_NUMA_ID, device)))
        return int(self._out("cuMemCreate", _u64, size, ctypes.byref(prop), 0))

    def has_host_memory(self, device: int) -> bool:
        """Whether `create` has memory of the host for this device."""
        value = _int()
        return self.succeeds("cuDeviceGetAttribute", ctypes.byref(value), _HAS_HOST_MEMORY, device) and value.value > 0

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
        access = AccessDesc(Location(_ON_DEVICE, device), _READ_WRITE)
        try:
            self.call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
        except CudaError:
            self.call("cuMemUnmap", address, size)
            raise

    def take_out(self, address: int, handle: int, size: int) -> None:
        """The addresses stay reserved."""
        self.call("cuMemUnmap", address, size)
        self.call("cuMemRelease", handle)

    def clear(self, address: int, size: int) -> None:
        """The addresses are free again; the memory that was behind them stays its handle's."""
        self.call("cuMemUnmap", address, size)
        self.call("cuMemAddressFree", address, size)

    def event(self) -> int:
        return int(self._out("cuEventCreate", _p, _EVENT_DEFAULT))

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
        params = MemsetParams(address, 0, value, 4, size // 4, 1)
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
        params = KernelParams()
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


def _prop(device: int) -> AllocationProp:
    return AllocationProp(_PINNED, _POSIX_FD, Location(_ON_DEVICE, device), None)


@functools.cache
def driver() -> Driver:
    """`OSError` where this host has no CUDA driver."""
    return Driver()
