"""A captured CUDA graph as plain values: its nodes in the order of capture, the graphs inside it unrolled, and what
each waits for.

::

    graph of the driver ─ read ─▶ [Raw(kind, after, …)]      child graphs and empty nodes are gone, their edges are not

The driver copies a graph that becomes a child; who knows which one it was has the original read, because only there
operators know their nodes by number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kbrl_async.kernels.cuda_driver import CHILD, EMPTY, KERNEL, MEMCPY, MEMSET, Driver

_ACTIVE = 1
_PROGRAMMATIC = 1
_NAMES = {3: "a call of the host", 6: "a wait for an event", 7: "a record of an event", 10: "an allocation"}
_NAMES |= {11: "a release of memory", 13: "a node that depends on values"}
_DEVICE, _UNIFIED = 2, 4
_POINTER_KIND = 2
_COOPERATIVE, _CLUSTER, _ACCESS_POLICY_WINDOW = 2, 4, 1
_CARVEOUT = 9
_LOWEST, _HIGHEST = 1 << 32, 1 << 48
"""Where addresses of a device or of pinned memory can lie."""

_NONE: Mapping[int, Callable[[], int]] = {}


class NotRecordable(Exception):  # noqa: N818 - an answer, not an error
    """Why a forward can't be recorded, in words."""


class Raw(msgspec.Struct, frozen=True):
    """One node. `after`: numbers of earlier ones."""

    node: int
    kind: int
    after: tuple[int, ...]
    is_serialized: bool = False
    """It may begin before the kernel before it has ended."""
    place: int = 0
    """Number of the node that it is, or lies in, of the captured graph itself or of a known child."""
    within: int = -1
    """Number of that child's node; -1: it lies in none."""


class KernelLaunch(msgspec.Struct, frozen=True):
    function: int
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    arguments: list[bytes]
    cluster: tuple[int, int, int]
    is_cooperative: bool
    carveout: int


class _Params(ctypes.Structure):
    _fields_ = (
        ("func", ctypes.c_void_p),
        ("dims", ctypes.c_uint * 6),
        ("shared", ctypes.c_uint),
        ("params", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )


class _Side(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("z", ctypes.c_size_t),
        ("lod", ctypes.c_size_t),
        ("kind", ctypes.c_uint),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("reserved", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Copy(ctypes.Structure):
    _fields_ = (
        ("source", _Side),
        ("to", _Side),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    )


class _Memset(ctypes.Structure):
    _fields_ = (
        ("place", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Edge(ctypes.Structure):
    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("kind", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


class Graphs:
    """Reads graphs through `driver`."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._call = driver, driver.call

    def captured_on(self, stream: int) -> int:
        """The graph that `stream` is being captured into; 0: into none, and then the driver leaves the rest unsaid."""
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        given = (ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph))
        self._call("cuStreamGetCaptureInfo_v2", stream, *given, None, None)
        return int(graph.value or 0) if status.value == _ACTIVE else 0

    def count(self, graph: int) -> int:
        number = ctypes.c_size_t()
        self._call("cuGraphGetNodes", graph, None, ctypes.byref(number))
        return number.value

    def insert(self, stream: int, child: int) -> int:
        """The work of `child` as what is captured next on `stream`; the number of its node."""
        graph, after, node = self.captured_on(stream), self._driver.dependencies(stream), ctypes.c_void_p()
        place, array = self.count(graph), (ctypes.c_void_p * max(1, len(after)))(*after)
        self._call("cuGraphAddChildGraphNode", ctypes.byref(node), graph, array, len(after), child)
        self._driver.set_dependencies(stream, [int(node.value or 0)])
        return place

    def read(self, graph: int, known: Mapping[int, Callable[[], int]] | None = None) -> list[Raw]:
        """`known`: which graphs its nodes with these numbers are copies of.

        :raises NotRecordable: it holds what can't be written down.
        """
        found: list[Raw] = []
        self._unroll(graph, (), found, known=known or {})
        return found

    def _unroll(
        self,
        graph: int,
        before: tuple[int, ...],
        found: list[Raw],
        inside: int | None = None,
        within: int = -1,
        known: Mapping[int, Callable[[], int]] = _NONE,
    ) -> tuple[int, ...]:
        """Appends the nodes of `graph`, which wait for `before`; the numbers of its last ones. `inside`: the number of
        the node that all of it counts as.
        """
        edges = self._edges(graph)
        ends: dict[int, tuple[int, ...]] = {}
        is_last = dict[int, bool]()
        for place, node in enumerate(self._nodes(graph)):
            kind = self._kind(node)
            given = edges.get(node, [])
            if any(earlier not in ends for earlier, _ in given):
                raise NotRecordable("its graph was not built in the order of its work")
            after = tuple(sorted({end for earlier, _ in given for end in ends[earlier]})) if given else before
            for earlier, _ in given:
                is_last[earlier] = False
            is_last[node] = True
            if kind == CHILD and place in known:
                ends[node] = self._unroll(known[place](), after, found, within=place)
            elif kind == CHILD:
                child = self._value("cuGraphChildGraphNodeGetGraph", ctypes.c_void_p, node)
                ends[node] = self._unroll(child, after, found, place if inside is None else inside, within)
            elif kind == EMPTY:
                ends[node] = after
            elif kind in (KERNEL, MEMCPY, MEMSET):
                serialized = any(how == _PROGRAMMATIC for _, how in given)
                found.append(Raw(node, kind, after, serialized, place if inside is None else inside, within))
                ends[node] = (len(found) - 1,)
            else:
                raise NotRecordable(f"its graph holds {_NAMES.get(kind, f'a node of type {kind}')}")
        last = sorted({end for node, ends_here in ends.items() if is_last[node] for end in ends_here})
        return tuple(last) or before

    def _nodes(self, graph: int) -> list[int]:
        number = ctypes.c_size_t(self.count(graph))
        array = (ctypes.c_void_p * number.value)()
        if number.value:
            self._call("cuGraphGetNodes", graph, array, ctypes.byref(number))
        return [int(item or 0) for item in array]

    def _edges(self, graph: int) -> dict[int, list[tuple[int, int]]]:
        """For each node, the nodes that it waits for, and how."""
        number = ctypes.c_size_t()
        self._call("cuGraphGetEdges_v2", graph, None, None, None, ctypes.byref(number))
        begin, end = (ctypes.c_void_p * number.value)(), (ctypes.c_void_p * number.value)()
        how = (_Edge * number.value)()
        if number.value:
            self._call("cuGraphGetEdges_v2", graph, begin, end, how, ctypes.byref(number))
        edges: dict[int, list[tuple[int, int]]] = {}
        for earlier, later, edge in zip(begin, end, how, strict=True):
            edges.setdefault(int(later or 0), []).append((int(earlier or 0), int(edge.kind)))
        return edges

    def _kind(self, node: int) -> int:
        kind = ctypes.c_int()
        self._call("cuGraphNodeGetType", node, ctypes.byref(kind))
        return kind.value

    def _value(self, name: str, kind: Any, *arguments: Any) -> int:
        value = kind()
        self._call(name, *arguments, ctypes.byref(value))
        return int(value.value or 0)

    def launch(self, node: int) -> KernelLaunch:
        params = _Params()
        self._call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(params))
        function = int(params.func or 0)
        if not function:
            handle = ctypes.c_void_p()
            self._call("cuKernelGetFunction", ctypes.byref(handle), params.kern)
            function = int(handle.value or 0)
        if self._attribute(node, _ACCESS_POLICY_WINDOW)[1]:
            raise NotRecordable("a kernel asks for lines that persist in L2")
        name = ctypes.c_char_p()
        self._call("cuFuncGetName", ctypes.byref(name), function)
        cluster = [int(part) for part in self._attribute(node, _CLUSTER)[:3]]
        carveout = ctypes.c_int()
        self._call("cuFuncGetAttribute", ctypes.byref(carveout), _CARVEOUT, function)
        return KernelLaunch(
            function,
            (name.value or b"").decode(errors="replace"),
            (params.dims[0], params.dims[1], params.dims[2]),
            (params.dims[3], params.dims[4], params.dims[5]),
            params.shared,
            self._arguments(function, params),
            (cluster[0] or 1, cluster[1] or 1, cluster[2] or 1),
            bool(self._attribute(node, _COOPERATIVE)[0]),
            carveout.value,
        )

    def _attribute(self, node: int, which: int) -> Any:
        value = (ctypes.c_uint32 * 16)()
        self._call("cuGraphKernelNodeGetAttribute", node, which, ctypes.byref(value))
        return value

    def _arguments(self, function: int, params: _Params) -> list[bytes]:
        sizes = self._driver.parameter_sizes(function)
        if sizes and not params.params:
            raise NotRecordable("a kernel was launched with packed arguments")
        return [ctypes.string_at(params.params[number], size) for number, size in enumerate(sizes)]

    def module_of(self, function: int) -> int:
        module = ctypes.c_void_p()
        self._call("cuFuncGetModule", ctypes.byref(module), function)
        return int(module.value or 0)

    def memset(self, node: int) -> Any:
        params = _Memset()
        self._call("cuGraphMemsetNodeGetParams", node, ctypes.byref(params))
        return params

    def copy(self, node: int) -> tuple[int, int, int]:
        """To, from (addresses) and bytes.

        :raises Refused: it is none from device to device in one piece.
        """
        params = _Copy()
        self._call("cuGraphMemcpyNodeGetParams", node, ctypes.byref(params))
        sides = params.to, params.source
        if any(side.kind not in (_DEVICE, _UNIFIED) for side in sides):
            raise NotRecordable("forward copies between host and device")
        if params.height > 1 or params.depth > 1 or any(side.y or side.z for side in sides):
            raise NotRecordable("forward copies a rectangle of memory")
        to, source = (int(side.device) + int(side.x) for side in sides)
        return to, source, int(params.width)

    def is_memory(self, word: int) -> bool:
        """Whether a number is an address that kernels can use: of a device, or of pinned memory of the host."""
        if not _LOWEST <= word < _HIGHEST:
            return False
        kind = ctypes.c_uint()
        return self._driver.succeeds("cuPointerGetAttribute", ctypes.byref(kind), _POINTER_KIND, word)
