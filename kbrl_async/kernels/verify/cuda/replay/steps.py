"""One node of a recording, bound to the modules and the arena of this process: `launch` submits it to a stream.

Whatever a recording says, a step stays within what `validation` has allowed; here a kernel's arguments are compared
with what its machine code declares, because the driver reads as many bytes as that says.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

from kbrl_async.kernels.cuda_driver import DEFAULT_SHARED, Arguments, CudaError, Driver, Launch
from kbrl_async.kernels.verify import allowed, values, wire
from kbrl_async.kernels.verify.cuda.arena import BASE
from kbrl_async.kernels.verify.cuda.replay.places import Places
from kbrl_async.kernels.verify.recording import Kernel, Memcpy, Memset, Operator

_PORTABLE_CLUSTER = 8
_ALIGNMENT = 64


class Refused(Exception):  # noqa: N818 - an answer, not an error
    """Why a recording can't be done again here."""


class Step(Protocol):
    """A node that can be launched."""

    after: list[int]
    is_own: bool
    """Of the candidate's own kernels."""

    def launch(self, stream: int, in_graph: bool) -> None: ...


class KernelStep:
    is_own = True

    def __init__(self, driver: Driver, node: Kernel, function: int, may_overlap: bool) -> None:
        self.after = node.after
        self._driver, self._function = driver, function
        self._check(node)
        self._allow(node)
        self._arguments = Arguments([_cell(argument) for argument in node.arguments])
        shape = (node.grid, node.block, node.shared)
        self._plain = Launch(*shape, cluster=node.cluster, cooperative=node.is_cooperative)
        self._overlapping = self._plain
        if may_overlap:
            self._overlapping = Launch(*shape, cluster=node.cluster, cooperative=node.is_cooperative, serialize=True)

    def _check(self, node: Kernel) -> None:
        declared = self._driver.parameter_sizes(self._function)
        if declared != [len(argument) for argument in node.arguments]:
            raise Refused("a kernel was recorded with other arguments than it takes")

    def _allow(self, node: Kernel) -> None:
        if node.shared > DEFAULT_SHARED:
            self._driver.allow_shared(self._function)
        if math.prod(node.cluster) > _PORTABLE_CLUSTER:
            self._driver.allow_large_clusters(self._function)
        if node.carveout >= 0:
            self._driver.prefer_carveout(self._function, node.carveout)

    def launch(self, stream: int, in_graph: bool) -> None:
        launch = self._overlapping if in_graph else self._plain
        self._driver.launch_configured(self._function, launch, stream, self._arguments)


class MemsetStep:
    is_own = False

    def __init__(self, driver: Driver, node: Memset) -> None:
        self.after, self._node, self._driver = node.after, node, driver

    def launch(self, stream: int, in_graph: bool) -> None:
        node = self._node
        pitch = node.pitch or node.width * node.element
        name = {1: "cuMemsetD2D8Async", 2: "cuMemsetD2D16Async", 4: "cuMemsetD2D32Async"}[node.element]
        if node.width:
            self._driver.call(name, BASE + node.place, pitch, node.value, node.width, node.height, stream)


class MemcpyStep:
    is_own = False

    def __init__(self, driver: Driver, node: Memcpy) -> None:
        self.after, self._node, self._driver = node.after, node, driver

    def launch(self, stream: int, in_graph: bool) -> None:
        node = self._node
        if node.size:
            self._driver.call("cuMemcpyDtoDAsync_v2", BASE + node.to, BASE + node.source, node.size, stream)


class OperatorStep:
    is_own = False

    def __init__(
        self, node: Operator, view: Callable[[wire.TensorMeta], torch.Tensor], places: Places, device: torch.device
    ) -> None:
        self.after, self._node, self._places = node.after, node, places
        function = allowed.found(node.name)
        if function is None:
            raise Refused(f"this torch has no {node.name}")
        self._function: Any = function
        given, self._named = values.restore(node.arguments, [view(meta) for meta in node.tensors])
        self._arguments = _with_tensors(function, given)
        self._results = [view(meta) for meta in node.results]
        if not node.tensors and any(argument.name == "device" for argument in function._schema.arguments):
            self._named["device"] = device

    def launch(self, stream: int, in_graph: bool) -> None:
        """On torch's current stream, which is `stream`."""
        self._places.follow(self._node.allocations)
        try:
            found: list[torch.Tensor] = []
            values.flatten(self._function(*self._arguments, **self._named), found)
        finally:
            self._places.follow([])
        if len(found) != len(self._results):
            raise Refused(f"{self._node.name} gives {len(found)} tensors here, and gave {len(self._results)}")
        for got, wanted in zip(found, self._results, strict=True):
            if got.shape != wanted.shape or got.dtype != wanted.dtype:
                raise Refused(f"{self._node.name} gives another tensor here than it gave")
            if got.data_ptr() != wanted.data_ptr() or got.stride() != wanted.stride():
                wanted.copy_(got)


def _with_tensors(function: Any, given: list[Any]) -> list[Any]:
    """A tensor on the host with one number was recorded as that number. Some operators take it so; for others it has to
    be such a tensor again, which is not done for all: two of no dimension have another type together.
    """
    schema = function._schema
    if torch._C._should_allow_numbers_as_tensors(schema.name.removeprefix(allowed.NAMESPACE)):
        return given
    kinds = [str(argument.type) for argument in schema.arguments]
    return [
        torch.tensor(value) if "Tensor" in kind and isinstance(value, (bool, int, float)) else value
        for kind, value in itertools.zip_longest(kinds, given)
    ][: len(given)]


def _cell(argument: bytes) -> Any:
    """Its bytes, at an address that suits any type."""
    block = ctypes.create_string_buffer(len(argument) + _ALIGNMENT)
    place = -ctypes.addressof(block) % _ALIGNMENT
    cell = (ctypes.c_char * max(1, len(argument))).from_buffer(block, place)
    ctypes.memmove(cell, argument, len(argument))
    return cell


def function_of(driver: Driver, modules: list[int], name: str) -> int:
    """:raises Refused: none of the modules has it."""
    for module in modules:
        try:
            return driver.function(module, name)
        except CudaError:
            continue
    raise Refused(f"what was built holds no kernel {name[:80]}")
