"""CUDA graphs of a candidate's own in the process that records it: what they hold, and where forward replays them.

::

    capture (constructor, first call) ─▶ memory of a pool, operators with their nodes: `Contents`
    replay while forward is recorded  ─▶ a child of the graph that is being recorded: `Inside`, read in its place
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from kbrl_async.kernels.verify.cuda.record.graph import Graphs, NotRecordable
from kbrl_async.kernels.verify.cuda.record.heap import Heap
from kbrl_async.kernels.verify.cuda.record.operators import OperatorSpan, Place, Watch

_LATE = "it captures a CUDA graph of its own in later calls, too"


class Contents(msgspec.Struct):
    """Of a graph, once it is captured."""

    steps: list[OperatorSpan]
    refused: str
    """Why a replay of it can't be recorded."""


class Inside(msgspec.Struct):
    """A replay in a forward."""

    handle: Callable[[], int]
    """The graph; asked for when it is read, because its candidate may have dropped it by then."""
    steps: list[OperatorSpan]


class _QuietWatch(Watch):  # type: ignore[no-untyped-call, unused-ignore]
    """What can't be recorded matters only where the graph is replayed in forward."""

    refused = ""

    def _refuse(self, why: str) -> None:
        self.refused = self.refused or why


class OwnGraphs:
    """Of one candidate: an `own_graphs.Observer`."""

    def __init__(self, graphs: Graphs, heap: Heap, place: Place, stream: Callable[[], int] | None = None) -> None:
        """`stream`: which one is torch's current one."""
        self._graphs, self._heap, self._place = graphs, heap, place
        self._stream = stream or _current_stream
        self._pools: dict[tuple[int, int], int] = {}
        self._pool = 0
        self._watch: _QuietWatch | None = None
        self._entered = contextlib.ExitStack()
        self._recorded: dict[int, Inside] | None = None
        self._held: list[Any] = []
        """Graphs that were captured, until the candidate is done with: one that it drops while forward is recorded
        would be destroyed then, which breaks the driver's capture, and what follows would fail for no reason of its
        own."""
        self.count = 0
        """Of graphs that were captured."""

    @contextlib.contextmanager
    def recorded(self) -> Iterator[dict[int, Inside]]:
        """While forward is captured: its replays by the number of their node."""
        self._recorded = {}
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def begins(self) -> None:
        """:raises NotRecordable: what it makes ready for that graph would become part of the forward that is recorded,
        and not be there when the graph is replayed.
        """
        if self._recorded is not None:
            raise NotRecordable(_LATE)
        self.ends()

    def begun(self, pool: Any) -> None:
        self.count += 1
        self._pool = self._pools.get(_key(pool), self.count)
        handle = self._graphs.captured_on(self._stream())
        self._watch = _QuietWatch(lambda: self._graphs.count(handle), self._place, self._heap)
        self._heap.enter(self._pool)
        self._entered.enter_context(self._watch)

    def ends(self) -> None:
        self._entered.close()
        self._heap.enter(None)

    def close(self) -> None:
        """Its candidate is done with."""
        self.ends()
        self._held.clear()

    def captured(self, graph: Any) -> Contents:
        assert self._watch is not None
        self._held.append(graph)
        self._pools[_key(graph.pool())] = self._pool
        return Contents(self._watch.steps, self._watch.refused)

    def replays(self, graph: Any, contents: Any) -> bool:
        """Inside the capture of forward. Inside another one torch refuses it.

        :raises NotRecordable: it holds what can't be recorded.
        """
        stream = self._stream()
        if self._recorded is None or not isinstance(contents, Contents) or not self._graphs.captured_on(stream):
            return False
        if contents.refused:
            raise NotRecordable(f"in a CUDA graph of its own, {contents.refused}")
        self._graphs.read(graph.raw_cuda_graph())  # whatever is in the way has a name there
        place = self._graphs.insert(stream, graph.raw_cuda_graph())
        self._recorded[place] = Inside(graph.raw_cuda_graph, contents.steps)
        return True


def _key(pool: Any) -> tuple[int, int]:
    return tuple(pool) if pool is not None else (0, 0)  # type: ignore[return-value, unused-ignore]


def _current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
