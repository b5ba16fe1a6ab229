"""A recording in this process: modules loaded, its forwards as CUDA graphs.

::

    one graph, launched once:   flush L2 ─▶ event ─▶ forward of slot a ─▶ forward of slot b ─▶ … ─▶ event

A forward is captured on one stream, whose dependencies are set before each node: so kernels, copies and operators
become nodes in the same way, with the edges that were recorded. Operators run one after the other whatever their edges
say, because here they share one workspace.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from kbrl_async.kernels.backends.launch import elf
from kbrl_async.kernels.cuda_driver import CudaError, Driver
from kbrl_async.kernels.verify import wire
from kbrl_async.kernels.verify.cuda.arena import DeviceArena
from kbrl_async.kernels.verify.cuda.capture import Flush
from kbrl_async.kernels.verify.cuda.replay.images import Image
from kbrl_async.kernels.verify.cuda.replay.places import Places
from kbrl_async.kernels.verify.cuda.replay.steps import (
    KernelStep,
    MemcpyStep,
    MemsetStep,
    OperatorStep,
    Refused,
    Step,
    function_of,
)
from kbrl_async.kernels.verify.recording import Forward, Kernel, Memcpy, Memset, Node, Operator, Recording

_ELF = b"\x7fELF"


class Program:
    """:raises Refused: what was built can't be loaded, or does not fit what was recorded."""

    def __init__(
        self, driver: Driver, flush: Flush, arena: DeviceArena, places: Places, images: list[Image], plan: Recording
    ) -> None:
        self._driver, self._flush, self._arena, self._places = driver, flush, arena, places
        self._events = driver.event(), driver.event()
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
        self._modules: dict[str, list[int]] = {}
        self._variables: list[tuple[int, int, int]] = []
        """Address, address of the value at first, bytes."""
        self._functions: dict[tuple[str, str], int] = {}
        self._graphs: dict[tuple[int, bool, tuple[int, ...]], int] = {}
        self._chains: dict[tuple[tuple[int, ...], bool, tuple[int, ...]], int] = {}
        self._runs: dict[tuple[int, bool, tuple[int, ...]], int] = {}
        try:
            for image in images:
                self._modules[image.digest] = [self._load(part) for part in image.parts]
            self._forwards = [self._steps(forward) for forward in plan.forwards]
        except (CudaError, Refused):
            self.close()
            raise

    def _load(self, part: bytes) -> int:
        try:
            module = self._driver.load_module(part)
            self._keep_variables(module, part)
        except (CudaError, ValueError, struct.error) as error:
            raise Refused(f"what was built can't be loaded alone ({error})") from error
        return module

    def _keep_variables(self, module: int, part: bytes) -> None:
        """As they are before any kernel has run; but for static ones, and those in packed containers of extensions."""
        if not part.startswith(_ELF):
            return
        for name in elf.variables(part):
            try:
                address, size = self._driver.variable(module, name)
            except CudaError:  # static, so that nobody can find it
                continue
            kept = self._driver.allocate(size)
            self._variables.append((address, kept, size))
            self._driver.call("cuMemcpyDtoDAsync_v2", kept, address, size, self._stream.cuda_stream)

    def _restore_variables(self) -> None:
        for address, kept, size in self._variables:
            self._driver.call("cuMemcpyDtoDAsync_v2", address, kept, size, self._stream.cuda_stream)

    def _steps(self, forward: Forward) -> list[Step]:
        return [self._step(node, forward.nodes) for node in forward.nodes]

    def _step(self, node: Node, nodes: Sequence[Node]) -> Step:
        if isinstance(node, Kernel):
            # What it may run beside is the one kernel before it, and nothing else.
            follows_kernel = len(node.after) == 1 and isinstance(nodes[node.after[0]], Kernel)
            return KernelStep(self._driver, node, self._function(node), node.is_serialized and follows_kernel)
        if isinstance(node, Memset):
            return MemsetStep(self._driver, node)
        if isinstance(node, Memcpy):
            return MemcpyStep(self._driver, node)
        assert isinstance(node, Operator)
        return OperatorStep(node, self._view, self._places, self._arena.raw.device)

    def _function(self, node: Kernel) -> int:
        key = (node.artifact, node.name)
        if key not in self._functions:
            self._functions[key] = function_of(self._driver, self._modules[node.artifact], node.name)
        return self._functions[key]

    def _view(self, meta: wire.TensorMeta) -> torch.Tensor:
        return self._arena.view(meta)

    @property
    def has_operators(self) -> bool:
        return any(isinstance(step, OperatorStep) for steps in self._forwards for step in steps)

    def warm_up(self, slot: int) -> None:
        """Once without a graph: libraries make handles and choose kernels at their first use."""
        with torch.cuda.stream(self._stream):
            for step in self._forwards[slot]:
                step.launch(self._stream.cuda_stream, False)
        self._driver.call("cuCtxSynchronize")

    def run(self, slot: int, is_muted: bool = False, left_out: tuple[int, ...] = ()) -> None:
        """One forward alone, with or without own kernels, and without the nodes of these numbers."""
        key = slot, is_muted, left_out
        if key not in self._runs:
            self._runs[key] = self._driver.instantiate(self._graph(slot, is_muted, left_out))
        self._restore_variables()
        self._driver.call("cuGraphLaunch", self._runs[key], self._stream.cuda_stream)
        self._driver.call("cuCtxSynchronize")

    def time(self, slots: tuple[int, ...], is_muted: bool = False, left_out: tuple[int, ...] = ()) -> float:
        """Nanoseconds of forwards over these slots, one after the other behind one flush."""
        chain = self.prepare(slots, is_muted, left_out)
        self._restore_variables()
        self._driver.call("cuCtxResetPersistingL2Cache")
        self._driver.call("cuGraphLaunch", chain, self._stream.cuda_stream)
        self._driver.call("cuCtxSynchronize")
        return self._driver.elapsed_ns(*self._events)

    def prepare(self, slots: tuple[int, ...], is_muted: bool = False, left_out: tuple[int, ...] = ()) -> int:
        """The graph that `time` launches."""
        key = slots, is_muted, left_out
        if key not in self._chains:
            graphs = [self._graph(slot, is_muted, left_out) for slot in slots]
            self._chains[key] = self._flush.chained(self._events, graphs)
        return self._chains[key]

    def _graph(self, slot: int, is_muted: bool, left_out: tuple[int, ...] = ()) -> int:
        key = slot, is_muted, left_out
        if key not in self._graphs:
            steps = self._forwards[slot]
            own = {number for number, step in enumerate(steps) if is_muted and step.is_own}
            with torch.cuda.stream(self._stream):
                self._graphs[key] = self._capture(steps, own | set(left_out))
        return self._graphs[key]

    def _capture(self, steps: list[Step], left_out: Collection[int]) -> int:
        driver, stream = self._driver, self._stream.cuda_stream
        driver.begin_capture(stream)
        try:
            for _ in self._captured(steps, left_out):
                pass
        except BaseException:
            driver.drop_capture(stream)
            raise
        return driver.end_capture(stream)

    def _captured(self, steps: list[Step], left_out: Collection[int]) -> Iterator[list[int]]:
        """The graph nodes that stand for the end of each step."""
        driver, stream = self._driver, self._stream.cuda_stream
        ends: list[list[int]] = []
        last_operator: list[int] = []
        for place, step in enumerate(steps):
            after = [node for number in step.after for node in ends[number]]
            if isinstance(step, OperatorStep):
                after += last_operator
            if place in left_out:
                ends.append(list(dict.fromkeys(after)))
                continue
            driver.set_dependencies(stream, list(dict.fromkeys(after)))
            step.launch(stream, True)
            ends.append(driver.dependencies(stream))
            if isinstance(step, OperatorStep):
                last_operator = ends[-1]
            yield ends[-1]

    def close(self) -> None:
        """Graphs and modules go; nothing of it stays."""
        driver = self._driver
        for graph in (*self._runs.values(), *self._chains.values()):
            driver.call("cuGraphExecDestroy", graph)
        for graph in self._graphs.values():
            driver.call("cuGraphDestroy", graph)
        for event in self._events:
            driver.call("cuEventDestroy_v2", event)
        for _, kept, _ in self._variables:
            driver.call("cuMemFree_v2", kept)
        driver.unload_modules()
        self._runs, self._chains, self._graphs, self._modules, self._variables = {}, {}, {}, {}, []
