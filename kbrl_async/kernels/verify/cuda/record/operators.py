"""Which operators of torch a forward calls while it is captured, each with the graph nodes that it made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kbrl_async.kernels.verify import allowed, values, wire
from kbrl_async.kernels.verify.cuda.record.graph import NotRecordable
from kbrl_async.kernels.verify.cuda.record.heap import Heap

_LEFT_OUT = frozenset({"device", "layout", "pin_memory"})
_NAMESPACES = ("aten", "prims")
_HOST_NUMBERS = (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64)
Place = Callable[[torch.Tensor], wire.TensorMeta]
"""Where a tensor lies in the arena. `NotRecordable` where it lies elsewhere."""


class OperatorSpan(msgspec.Struct, frozen=True):
    """An operator that made nodes `first` … `last`−1 of the graph."""

    first: int
    last: int
    name: str
    arguments: Any
    tensors: list[wire.TensorMeta]
    results: list[wire.TensorMeta]
    allocations: list[tuple[int, int]]
    within: int = -1
    """As `graph.Raw` says."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """While it is entered, `steps` grows. `count` says how many nodes the graph has by now."""

    def __init__(self, count: Callable[[], int], place: Place, heap: Heap) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._count, self._place, self._heap = count, place, heap
        self.steps: list[OperatorSpan] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. Where torch keeps its compiler away, the first call imports it for four seconds."""
        return False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace not in _NAMESPACES:  # the candidate's own, or a wrapper: what it calls is seen by itself
            with self:
                return op.redispatch(_keys_of(args), *args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in op.tags and not drops_nothing(op, args, kwargs or {}):
            self._refuse(f"{op.name()} draws random numbers")  # before torch finds its generator in the wrong state
        first, self._heap.log = self._count(), []
        try:
            result = op(*args, **(kwargs or {}))
        finally:
            log, self._heap.log = self._heap.log, None
        last = self._count()
        if last > first:
            try:
                self.steps.append(self._step(first, last, op, args, kwargs or {}, result, log or []))
            except NotRecordable as refusal:
                self._refuse(str(refusal))
        return result

    def _refuse(self, why: str) -> None:
        raise NotRecordable(why)

    def _step(
        self, first: int, last: int, op: Any, args: Any, kwargs: Any, result: Any, log: list[tuple[int, int]]
    ) -> OperatorSpan:
        name = op.name()
        if not allowed.is_allowed(name):
            raise NotRecordable(f"{name} is none of the operators that are done again")
        given: list[torch.Tensor] = []
        results: list[torch.Tensor] = []
        named = {key: _plain(value) for key, value in kwargs.items() if key not in _LEFT_OUT}
        try:
            tree = values.flatten([[_plain(value) for value in args], named], given)
            values.flatten(result, results)
        except TypeError as error:
            raise NotRecordable(f"{name}: {error}") from error
        places = [self._place(tensor) for tensor in given]
        asked = self._heap.passing(log, {tensor.untyped_storage().data_ptr() for tensor in results})
        return OperatorSpan(first, last, name, tree, places, [self._place(tensor) for tensor in results], asked)


def _keys_of(args: Any) -> Any:
    """What an operator's own function for these arguments is registered under; by its name alone, we would be asked."""
    devices = [value.device.type for value in args if isinstance(value, torch.Tensor)]
    binding: Any = torch._C
    return binding.DispatchKeySet(binding._parse_dispatch_key((devices or ["cuda"])[0].upper()))


def drops_nothing(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether it would only draw numbers for a dropout that is off."""
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given == 0)
    return False


def _plain(value: Any) -> Any:
    """A number that lies in a tensor on the host becomes one."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() == 0:
        return value.item() if value.dtype in _HOST_NUMBERS else value
    return value
