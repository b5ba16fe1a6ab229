"""One candidate's forward over each slot: captured, and written down as a `Recording`.

::

    forward(slot) under capture and `Watch` ─▶ graph of the driver, operators with their nodes ─▶ [Node]
        memset, copy: as they are · kernels of an operator: the operator · other kernels: its own, or Refused
        a graph of its own that it replays: its nodes, in this way
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from kbrl_async.kernels.cuda_driver import KERNEL, MEMSET
from kbrl_async.kernels.verify import recording, values, wire
from kbrl_async.kernels.verify.cuda.capture import leave_capture
from kbrl_async.kernels.verify.cuda.own_graphs import PLAIN
from kbrl_async.kernels.verify.cuda.record.graph import Graphs, NotRecordable, Raw
from kbrl_async.kernels.verify.cuda.record.heap import Heap
from kbrl_async.kernels.verify.cuda.record.machine_code import MachineCode
from kbrl_async.kernels.verify.cuda.record.operators import OperatorSpan, Watch
from kbrl_async.kernels.verify.cuda.record.own_graphs import Inside, OwnGraphs

MAX_NODES = 20_000


class TorchForward(msgspec.Struct):
    """One forward as torch holds it."""

    graph: Any
    steps: list[OperatorSpan]
    tree: wire.Tree
    outputs: list[torch.Tensor]
    taken: list[tuple[int, int]] = []
    """(address, bytes) of all memory that it took, its outputs among it."""
    inside: dict[int, Inside] = {}
    """Graphs of its own that it replays, by the number of their node."""


def are_apart(forwards: list[TorchForward]) -> bool:
    """Whether each output lies where no other forward has worked, so that they can be done again in any order."""
    kept = [
        {tensor.untyped_storage().data_ptr() for tensor in forward.outputs if tensor.is_cuda} for forward in forwards
    ]
    return not any(
        begin <= place < begin + size
        for number, forward in enumerate(forwards)
        for begin, size in forward.taken
        for other, places in enumerate(kept)
        if other != number
        for place in places
    )


class Scribe:
    """Writes down what runs on the current stream in the arena from `base` on, `size` bytes long."""

    def __init__(self, graphs: Graphs, heap: Heap, base: int, size: int, code: MachineCode) -> None:
        self._graphs, self._heap, self._code = graphs, heap, code
        self._base, self._size = base, size
        self._kept: dict[int, int] | None = None
        self.own = OwnGraphs(graphs, heap, self.place)

    def capture(self, forward: Callable[[], Any]) -> TorchForward:
        """:raises Refused: and whatever `forward` raises when it is captured."""
        graph, stream = PLAIN(keep_graph=True), torch.cuda.current_stream()
        graph.capture_begin(capture_error_mode="thread_local")
        self._heap.part(self._kept)  # by now: the first graph of a process takes memory for itself, the others don't
        try:
            handle = self._graphs.captured_on(stream.cuda_stream)
            watch = Watch(lambda: self._graphs.count(handle), self.place, self._heap)
            with self.own.recorded() as inside, watch:
                result = forward()
            outputs: list[torch.Tensor] = []
            tree = values.flatten(result, outputs)
            graph.capture_end()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                torch.cuda.set_stream(stream)  # `torch.cuda.graph` leaves its own behind where it may not begin
                graph.capture_end()
            leave_capture()
            raise
        return TorchForward(graph, watch.steps, tree, outputs, list(self._heap.trail), inside)

    def learn(self, captured: TorchForward | None) -> None:
        """Which of the blocks that a forward takes are outputs: all forwards are expected to take the same. None: they
        do not.
        """
        if captured is None:
            self._kept = None
            return
        places = {tensor.untyped_storage().data_ptr() for tensor in captured.outputs if tensor.is_cuda}
        last = {address: number for number, (address, _) in enumerate(captured.taken)}
        self._kept = {last[place]: captured.taken[last[place]][1] for place in places & last.keys()}

    def write(self, captured: TorchForward) -> recording.Forward:
        """:raises Refused: what can't be done again from data."""
        known = {place: own.handle for place, own in captured.inside.items()}
        raws = self._graphs.read(captured.graph.raw_cuda_graph(), known)
        if len(raws) > MAX_NODES:
            raise NotRecordable(f"forward consists of {len(raws)} steps, more than {MAX_NODES}")
        owners = _owners(raws, _all_steps(captured))
        numbers: dict[int, int] = {}
        nodes: list[recording.Node] = []
        for place, raw in enumerate(raws):
            step, span = owners.get(place, (None, [place]))
            if place > span[0]:
                numbers[place] = numbers[span[0]]
                continue
            numbers[place] = len(nodes)
            after = sorted({numbers[before] for one in span for before in raws[one].after if before not in span})
            nodes.append(self._node(raw, after) if step is None else self._operator(step, after))
        return recording.Forward(nodes, captured.tree, [self.place(tensor) for tensor in captured.outputs])

    def _node(self, raw: Raw, after: list[int]) -> recording.Node:
        if raw.kind == KERNEL:
            return self._kernel(raw, after)
        if raw.kind == MEMSET:
            params = self._graphs.memset(raw.node)
            size = params.element * params.width if params.height <= 1 else params.pitch * params.height
            place = self._offset(params.place, size)
            return recording.Memset(
                place, params.value, params.element, params.width, params.height, params.pitch, after
            )
        to, source, size = self._graphs.copy(raw.node)
        return recording.Memcpy(self._offset(to, size), self._offset(source, size), size, after)

    def _operator(self, step: OperatorSpan, after: list[int]) -> recording.Operator:
        asked = [(address - self._base, size) for address, size in step.allocations]
        return recording.Operator(step.name, step.arguments, step.tensors, step.results, asked, after)

    def _kernel(self, raw: Raw, after: list[int]) -> recording.Kernel:
        launch = self._graphs.launch(raw.node)
        owner = self._code.owner(self._graphs.module_of(launch.function), launch.name)
        self._refuse_foreign(launch.name, launch.arguments)
        return recording.Kernel(
            owner,
            launch.name,
            launch.grid,
            launch.block,
            launch.shared,
            launch.arguments,
            after,
            launch.cluster,
            launch.is_cooperative,
            raw.is_serialized,
            launch.carveout,
        )

    def _refuse_foreign(self, name: str, arguments: list[bytes]) -> None:
        """Memory that torch has not allocated is not there when the kernel runs again."""
        for argument in arguments:
            for (word,) in struct.iter_unpack("<Q", argument[: len(argument) // 8 * 8]):
                if not 0 <= word - self._base < self._size and self._graphs.is_memory(word):
                    raise NotRecordable(f"{name[:80]} uses memory that torch has not allocated")

    def place(self, tensor: torch.Tensor) -> wire.TensorMeta:
        """:raises Refused: it lies outside of the arena, or is no plain tensor."""
        if not tensor.is_cuda:
            raise NotRecordable("a tensor of the host takes part in forward")
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise NotRecordable("a tensor of forward is sparse, conjugated or negated by a mark only")
        meta = values.describe(tensor, 0)
        if tensor.numel() == 0:
            return meta
        last = sum((size - 1) * stride for size, stride in zip(meta.shape, meta.strides, strict=True))
        place = self._offset(tensor.data_ptr(), (last + 1) * tensor.element_size())
        return msgspec.structs.replace(meta, place=place)

    def _offset(self, address: int, size: int) -> int:
        if not 0 <= address - self._base <= self._size - size:
            raise NotRecordable("forward uses memory that torch has not allocated")
        return address - self._base


def _all_steps(captured: TorchForward) -> list[OperatorSpan]:
    """Those in graphs of its own among them."""
    return captured.steps + [
        msgspec.structs.replace(step, within=place) for place, own in captured.inside.items() for step in own.steps
    ]


def _owners(raws: list[Raw], steps: list[OperatorSpan]) -> dict[int, tuple[OperatorSpan, list[int]]]:
    """The operator of each node that one made, and all of its nodes; what only fills or copies stands for itself."""
    owners: dict[int, tuple[OperatorSpan, list[int]]] = {}
    for step in steps:
        made = [
            number
            for number, raw in enumerate(raws)
            if step.first <= raw.place < step.last and raw.within == step.within
        ]
        if any(raws[number].kind == KERNEL for number in made):
            owners.update(dict.fromkeys(made, (step, made)))
    return owners
