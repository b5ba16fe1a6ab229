"""Inside a GPU child: forwards as CUDA graphs, so that nothing of the candidate's Python runs while they are timed.

::

    one graph, launched once:   flush L2 ─▶ event ─▶ forward over slot 0 ─▶ … ─▶ forward over slot K−1 ─▶ event

Each forward is captured into a graph of its own, so a side stream that is not joined fails right there, and its
nodes are the candidate's alone. Every slot has its own inputs and outputs: K forwards of a short kernel share one flush
and one pair of events, and each still finds its inputs cold (its code and weights only the first).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kbrl_async.kernels.cuda_driver import CHILD, EMPTY, HOST, KERNEL, MEMCPY, MEMSET, Driver
from kbrl_async.kernels.verify import values
from kbrl_async.kernels.verify.cuda.own_graphs import PLAIN

_NAMES = {HOST: "a call of the host", 6: "a wait for an event", 7: "a record of an event", 10: "an allocation"}
_PER_THREAD = 2  # CU_STREAM_PER_THREAD
_DEPTH = 4
"""Of containers in each other."""
_ALLOWED = (KERNEL, MEMCPY, MEMSET, EMPTY, CHILD)


class NoGraph(Exception):  # noqa: N818 - an answer, not an error
    """Why a forward is not timed as a graph."""


def thread_stream() -> Any:
    """The calling thread's own default stream: where a kernel launches that an extension of ours launches without a
    stream. It can be captured, unlike the default stream that all threads share; each of the two waits for the other.
    """
    return torch.cuda.ExternalStream(_PER_THREAD)  # type: ignore[no-untyped-call, unused-ignore]


def leave_capture() -> None:
    """A capture that breaks leaves torch's random generator as if it went on, for whatever draws or replays a graph of
    its own later; one that ends does not.
    """
    empty = PLAIN()
    with contextlib.suppress(RuntimeError):
        empty.capture_begin(capture_error_mode="thread_local")
        empty.capture_end()


class Flush:
    """A buffer of twice the L2 cache, written before each timed run."""

    def __init__(self, driver: Driver, device: torch.device) -> None:
        size = 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self._driver = driver

    def now(self, stream: int) -> None:
        self._driver.call("cuMemsetD8Async", self.buffer.data_ptr(), 1, self.buffer.numel(), stream)

    def node(self, graph: int) -> int:
        return self._driver.add_memset(graph, None, self.buffer.data_ptr(), self.buffer.numel(), 1)

    def chained(self, events: tuple[int, int], graphs: list[int]) -> int:
        """What is launched to time these one after the other, between two events, behind a flush."""
        driver, (begin, end) = self._driver, events
        whole = driver.graph()
        last = driver.add_event(whole, self.node(whole), begin)
        for graph in graphs:
            last = driver.add_child(whole, last, graph)
        driver.add_event(whole, last, end)
        made = driver.instantiate(whole)
        driver.call("cuGraphDestroy", whole)
        return made


def tensors_kept_by(model: Any) -> list[torch.Tensor]:
    """What a model has as attributes of its modules, and in lists, tuples and dictionaries there. Of what is no module
    nothing is known.
    """
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return [tensor for module in modules for tensor in _tensors_in(vars(module), _DEPTH)]


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one, depth - 1)


class CapturedForwards:
    """Graphs of `forward(k)` for every slot k < `count`. `NoGraph` where that can't be.

    The first graph may read or write tensors that the model kept from the call before, and has replaced when it was
    captured (the hidden state of a recurrent network): `kept` names them, and they live as long as the graph.
    """

    def __init__(
        self,
        driver: Driver,
        flush: Flush,
        forward: Callable[[int], list[torch.Tensor]],
        count: int,
        kept: Callable[[], list[torch.Tensor]] = list,
    ) -> None:
        self._driver, self._flush, self._list_kept = driver, flush, kept
        self._kept: list[torch.Tensor] = []
        self._events = driver.event(), driver.event()
        self._stream = thread_stream()
        self.outputs: list[list[torch.Tensor]] = []
        """Of each slot; the same memory at every replay."""
        self._captured: list[Any] = []
        self._capture(forward, count)
        self.kernels: dict[str, list[int]] = {}
        """Nodes of slot 0 by kernel name."""
        for graph in self._captured:
            self._look_at(graph.raw_cuda_graph(), is_first=graph is self._captured[0])
        self._timed = self._flush.chained(self._events, [graph.raw_cuda_graph() for graph in self._captured])
        self._empty = self._flush.chained(self._events, [])

    def _capture(self, forward: Callable[[int], list[torch.Tensor]], count: int) -> None:
        with torch.cuda.stream(self._stream):
            forward(0)  # libraries make their workspaces for a new stream at its first use
            self._driver.call("cuCtxSynchronize")
            self._kept = self._list_kept()
            pool = torch.cuda.graph_pool_handle()
            for slot in range(count):
                graph = PLAIN(keep_graph=True)
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    outputs = forward(slot)
                    graph.capture_end()
                except BaseException:
                    with contextlib.suppress(RuntimeError):
                        graph.capture_end()
                    leave_capture()
                    raise
                self.outputs.append(outputs)
                self._captured.append(graph)

    def _look_at(self, graph: int, is_first: bool) -> None:
        for node, kind in self._driver.nodes(graph):
            if kind not in _ALLOWED:
                raise NoGraph(f"its graph holds {_NAMES.get(kind, f'a node of type {kind}')}")
            if kind == KERNEL and self._driver.keeps_l2(node):
                raise NoGraph("a kernel asks for lines that persist in L2")
            if kind == KERNEL and is_first:
                self.kernels.setdefault(self._driver.kernel_name(node), []).append(node)

    def close(self) -> None:
        for graph in (self._timed, self._empty):
            self._driver.call("cuGraphExecDestroy", graph)
        for event in self._events:
            self._driver.call("cuEventDestroy_v2", event)

    def replay(self, times: int = 1) -> float:
        """Nanoseconds of `times` runs over all slots, summed."""
        return sum(self._run(self._timed) for _ in range(times))

    def empty(self) -> float:
        return min(self._run(self._empty) for _ in range(5))

    def _run(self, graph: int) -> float:
        driver = self._driver
        driver.call("cuCtxResetPersistingL2Cache")
        driver.call("cuGraphLaunch", graph, self._stream.cuda_stream)
        driver.call("cuCtxSynchronize")
        return driver.elapsed_ns(*self._events)

    def without(self, names: list[str], keep: Callable[[list[torch.Tensor]], None]) -> tuple[float, float]:
        """Nanoseconds of one forward over slot 0 as it is, and with these kernels left out, beyond those of launching;
        the outputs are the latter's, copied by `keep`. The whole forward comes last: before it, what own kernels write
        in between is of other inputs than those that lie in the slot.
        """
        driver = self._driver
        graph = driver.instantiate(self._captured[0].raw_cuda_graph())
        self._enable(graph, list(self.kernels), False)
        nothing = self._alone(graph)
        self._enable(graph, [name for name in self.kernels if name not in names], True)
        for tensor in self.outputs[0]:
            values.fill_bytes(tensor, 0x7F)
        left = self._alone(graph)
        keep(self.outputs[0])
        self._enable(graph, names, True)
        whole = self._alone(graph)
        driver.call("cuGraphExecDestroy", graph)
        return max(0.0, whole - nothing), max(0.0, left - nothing)

    def _enable(self, graph: int, names: list[str], on: bool) -> None:
        for node in (node for name in names for node in self.kernels.get(name, ())):
            self._driver.call("cuGraphNodeSetEnabled", graph, node, int(on))

    def _alone(self, graph: int) -> float:
        return min(self._alone_once(graph) for _ in range(3))

    def _alone_once(self, graph: int) -> float:
        driver, (begin, end), stream = self._driver, self._events, self._stream.cuda_stream
        self._flush.now(stream)  # while it runs, the host gets ahead
        driver.call("cuEventRecord", begin, stream)
        driver.call("cuGraphLaunch", graph, stream)
        driver.call("cuEventRecord", end, stream)
        driver.call("cuCtxSynchronize")
        return driver.elapsed_ns(begin, end)
