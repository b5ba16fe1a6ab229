"""Inside a GPU child: the CUDA graphs that a candidate captures and replays by itself, seen where torch makes them.

::

    torch.cuda.CUDAGraph is `OwnGraph` ─▶ its observer: capture begun · ended · replayed
        watched process (`CountedGraphs`): a replay counts as the launches that were captured
        recorder (`record.own_graphs`): a replay inside the capture of forward becomes a part of that graph

Who replays a graph past this class (an extension, by the driver) is not seen: such a forward can't be captured.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from kbrl_async.kernels.backends.launch.recorder import RECORDER
from kbrl_async.kernels.cuda_driver import CHILD, KERNEL, CudaError, Driver, driver
from kbrl_async.kernels.verify.cpu.trace import OperatorWatch
from kbrl_async.kernels.verify.cuda.record.graph import Graphs
from kbrl_async.kernels.verify.operators import computes

PLAIN: Any = torch.cuda.CUDAGraph
"""Torch's own, for graphs of ours."""


class Observer(Protocol):
    """`contents` of a graph is what `captured` gave."""

    def begins(self) -> None:
        """Before anything is captured."""

    def begun(self, pool: Any) -> None:
        """The current stream is being captured from now on, over memory of `pool`; None: of a new one."""

    def ends(self) -> None:
        """Before the capture ends. Also called where it never began."""

    def captured(self, graph: Any) -> Any: ...

    def replays(self, graph: Any, contents: Any) -> bool:
        """Whether that was all: then nothing is launched."""


_observers: list[Observer] = []
"""The one who is told. Here and not on the class: a candidate holds its graphs, and is to tell nobody of them."""
_contents: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""What the observer has said of each graph."""


class OwnGraph(PLAIN):  # type: ignore[misc, unused-ignore]
    """Keeps the graph beside what is launched, so that it can be read; otherwise as torch's own: made ready for its
    launch by the end of its capture, unless who made it keeps the graph to change it first.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__(keep_graph=True)
        self._is_changed_first = keep_graph

    def capture_begin(self, pool: Any = None, *rest: Any, **more: Any) -> None:
        _observers[0].begins()
        super().capture_begin(*(() if pool is None and not rest else (pool,)), *rest, **more)
        _observers[0].begun(pool)

    def capture_end(self) -> None:
        _observers[0].ends()
        super().capture_end()
        if not self._is_changed_first:
            super().instantiate()
        _contents[self] = _observers[0].captured(self)

    def replay(self) -> None:
        if not _observers[0].replays(self, _contents.get(self)):
            super().replay()


def install(observer: Observer) -> None:
    """From now on, in this process, graphs that are made and those that are there tell this observer."""
    _observers[:] = [observer]
    torch.cuda.CUDAGraph = torch.cuda.graphs.CUDAGraph = OwnGraph  # type: ignore[misc, unused-ignore]


class CountedGraphs:
    """What a graph launches is known from its capture, and which of its nodes own launches made; each replay counts as
    that, and muted it is launched without these nodes. Where they can't be told from the library's, it counts for
    nothing and is launched as ever, so that nobody's library work disappears with own kernels.
    """

    def __init__(self) -> None:
        self._entered = contextlib.ExitStack()
        self._launches: dict[str, tuple[int, int]] = {}
        self._spans: list[tuple[int, int]] = []
        self._watch = OperatorWatch(set())

    def begins(self) -> None:
        self.ends()

    def begun(self, pool: Any) -> None:
        self._watch, self._launches, self._spans = OperatorWatch(set()), {}, []
        before = RECORDER.launches, RECORDER.is_on, RECORDER.is_muted, RECORDER.place, RECORDER.spans
        self._entered.callback(_set, *before)
        _set(self._launches, True, False, _counter(), self._spans)
        self._entered.enter_context(self._watch)

    def ends(self) -> None:
        self._entered.close()

    def captured(self, graph: Any) -> Any:
        return self._launches, self._watch.ops, self._spans

    def replays(self, graph: Any, contents: Any) -> bool:
        if not RECORDER.is_on or contents is None:
            return False
        launches, ops, spans = contents
        own = _own_nodes(driver(), graph.raw_cuda_graph(), spans) if launches else []
        if launches and not own:
            return False
        for book, found in ((RECORDER.launches, launches), (RECORDER.ops, ops)):
            for name, (count, spent) in found.items():
                before = book.get(name, (0, 0))
                book[name] = (before[0] + count, before[1] + spent)
        RECORDER.unseen = next((name for name in ops if computes(name)), RECORDER.unseen)
        if not RECORDER.is_muted or not own:
            return False
        _launch_without(own, driver(), graph.raw_cuda_graph())
        return True


def _counter() -> Callable[[], int]:
    """Counts the nodes of the graph that the current stream is captured into; 0 where that can't be."""
    graphs = Graphs(driver())

    def counted() -> int:
        try:
            return graphs.count(handle)
        except CudaError:
            return 0

    try:
        handle = graphs.captured_on(int(torch.cuda.current_stream().cuda_stream))
    except CudaError:
        return lambda: 0
    return counted


def _own_nodes(driver: Driver, graph: int, spans: list[tuple[int, int]]) -> list[int]:
    """The kernels in these spans; none where the graph holds another one: the driver switches nothing off in there."""
    nodes = driver.nodes(graph)
    if any(kind == CHILD for _, kind in nodes):
        return []
    return [nodes[place][0] for place in _places(spans) if place < len(nodes) and nodes[place][1] == KERNEL]


def _places(spans: list[tuple[int, int]]) -> list[int]:
    """Each once, though an own launch may lie in another."""
    return sorted({place for first, last in spans for place in range(first, last)})


def _launch_without(own: list[int], driver: Driver, graph: int) -> None:
    made = driver.instantiate(graph)
    for node in own:
        driver.call("cuGraphNodeSetEnabled", made, node, 0)
    driver.call("cuGraphLaunch", made, torch.cuda.current_stream().cuda_stream)
    driver.call("cuCtxSynchronize")
    driver.call("cuGraphExecDestroy", made)


def _set(
    launches: dict[str, tuple[int, int]],
    is_on: bool,
    is_muted: bool,
    place: Callable[[], int] | None,
    spans: list[tuple[int, int]],
) -> None:
    RECORDER.launches, RECORDER.is_on, RECORDER.is_muted = launches, is_on, is_muted
    RECORDER.place, RECORDER.spans = place, spans
