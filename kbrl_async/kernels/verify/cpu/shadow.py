"""Inside the confined child: what operators would make of their inputs if the candidate's own code had written nothing.

::

    an operator is called ─▶ done on what is there: own code sees that, and goes its usual way
                         └─▶ done once more on a shadow of it ─▶ is its result the answer?

A shadow is what the library alone would have made: of an input it is the input; of what an operator made, what it made
of shadows; of what own code wrote, what lay there before. Memory that no operator made and that is no input is own
code's if it changes from call to call, and nobody knows what lay there. A copy that own code makes of an input, or of
what the library made alone, is no work, and is not missing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from kbrl_async.kernels.verify.cpu.trace import OperatorWatch
from kbrl_async.kernels.verify.layouts import Holding, are_answer, have_nearly_all, is_answer, is_moved, runs_of
from kbrl_async.kernels.verify.operators import computes, copies

_MOST = 1 << 28
"""Bytes of storages, and a quarter of it of results, that are kept."""
_MOST_PARTS = 4096
_POISON = 0x7F
_FRESH = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_GIVEN = ("aten::lift_fresh", "aten::lift")
"""What they are given was made of numbers that Python has."""
_is_tensor, _equal, _no_bytes = torch.is_tensor, torch.equal, torch.empty(0, dtype=torch.uint8)
_flatten, _unflatten = tree_flatten, tree_unflatten
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_PROCESSOR = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class _Memory:
    """Of one storage, as bytes: what an operator left there, and its shadow."""

    def __init__(self, left: torch.Tensor, shadow: torch.Tensor) -> None:
        self.left, self.shadow = left, shadow


class ShadowWatch(OperatorWatch):  # type: ignore[no-untyped-call] # torch's own hook is not typed
    """`answer`: what forward makes of `inputs`, which lie there still. `constants`: see `unknown`."""

    def __init__(
        self,
        answer: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        constants: dict[int, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(set())
        self._given = [tensor.clone() for tensor in inputs]
        self._constants = constants or {}
        self.unknown: dict[int, torch.Tensor] = {}
        """Bytes of storages by address, of which neither inputs nor operators say where they come from."""
        self._memory: dict[int, _Memory] = {}
        self._made: list[torch.Tensor] = []
        """By the library alone, and as it was really made."""
        self._parts: dict[str, list[torch.Tensor]] = {}
        self._holding = Holding(answer, inputs)
        self._answered = ""
        for tensor in inputs:
            if _is_plain(tensor):
                self._know(tensor, _bytes(tensor))

    @property
    def answered(self) -> str:
        """An operator that has the answer, or its larger part, of what the library alone made."""
        for name, parts in self._parts.items():
            if not self._answered and self._holding.adds(functools.partial(_are_together, parts)):
                self._answered = name
        return self._answered

    def constant(self) -> dict[int, torch.Tensor]:
        """What lies in unknown memory now, to be compared with what lies there in another call."""
        return {place: block.clone() for place, block in self.unknown.items()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_looking:
            return function(*args, **(kwargs or {}))
        leaves, tree = _flatten((args, kwargs or {}))
        name = function.name().partition(".")[0]
        if not name.startswith("aten::") and _has_kernel(function.name(), "CPU"):
            with self:  # what a candidate's own operator calls, too
                return function.redispatch(_PROCESSOR, *args, **(kwargs or {}))
        if (
            _only_views(function._schema)
            or not name.startswith("aten::")
            or not all(_is_plain(leaf) for leaf in leaves if _is_tensor(leaf))
        ):
            return super().__torch_dispatch__(function, types, args, kwargs)
        self._is_looking = True
        try:
            shadows = [self._shadow(leaf, name in _GIVEN) if _is_tensor(leaf) else leaf for leaf in leaves]
        finally:
            self._is_looking = False
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self._is_looking = True
        try:
            self._again(function, name, leaves, result, _unflatten(shadows, tree))
        finally:
            self._is_looking = False
        return result

    def _again(self, function: Any, name: str, leaves: list[Any], result: Any, shadows: Any) -> None:
        given = {_place(leaf) for leaf in leaves if _is_tensor(leaf)}
        real = [leaf for leaf in _flatten(result)[0] if _is_tensor(leaf) and _is_plain(leaf)]
        try:
            found = [leaf for leaf in _flatten(function(*shadows[0], **shadows[1]))[0] if _is_tensor(leaf)]
        except Exception:  # of what lies where own code has not written, it can make nothing
            found = []
        is_made = [one.shape for one in found] == [one.shape for one in real]
        if not is_made or name.rpartition("::")[2] in _FRESH:
            found = [_nonsense(item) for item in real]
        for item, shadow in zip(real, found, strict=True):
            if _place(item) not in given:
                self._know(item, _laid_out(shadow, item))
            elif not is_made and (known := self._memory.get(_place(item))):
                _write(_part(known.shadow, item), shadow)
        for leaf in leaves:
            if _is_tensor(leaf) and function._schema.is_mutable and (known := self._memory.get(_place(leaf))):
                _write(_part(known.left, leaf), leaf)
        self._tell(name, real, found)

    def _tell(self, name: str, real: list[torch.Tensor], found: list[torch.Tensor]) -> None:
        if not computes(name) and not copies(name):
            return
        for item, shadow in zip(real, found, strict=True):
            if not self._answered and self._tells(name, shadow):
                self._answered = name
            if computes(name) and _equal(item, shadow):
                _keep(self._made, item)
            if computes(name) and sum(map(len, self._parts.values())) < _MOST_PARTS:
                _keep(self._parts.setdefault(name, []), shadow)

    def _tells(self, name: str, item: torch.Tensor) -> bool:
        if copies(name):
            return self._holding.moves(lambda wanted: is_moved(item, wanted, self._given))
        return self._holding.adds(lambda wanted: is_answer(item, wanted))

    def _shadow(self, tensor: torch.Tensor, is_given: bool) -> torch.Tensor:
        """Where there is none yet it is made."""
        known = self._memory.get(_place(tensor))
        if known is None or known.left.numel() != tensor.untyped_storage().nbytes():
            known = self._unknown(tensor, is_given)
        shadow, left = _part(known.shadow, tensor), _part(known.left, tensor)
        if not _equal_bits(left, tensor) and self._is_copy(tensor):
            _write(shadow, tensor)
            _write(left, tensor)
        return shadow

    def _unknown(self, tensor: torch.Tensor, is_given: bool) -> _Memory:
        block = _bytes(tensor)
        self.unknown[block.data_ptr()] = block
        before = self._constants.get(block.data_ptr())
        if is_given or (before is not None and _equal(before, block)) or self._is_copy(tensor):
            return self._know(tensor, block)
        return self._know(tensor, _laid_out(_nonsense(tensor), tensor))

    def _know(self, tensor: torch.Tensor, shadow: torch.Tensor) -> _Memory:
        """`shadow`: bytes, as many as its storage has."""
        block = _bytes(tensor)
        self._memory.pop(block.data_ptr(), None)
        self._memory[block.data_ptr()] = made = _Memory(block.clone(), shadow.clone())
        while len(self._memory) > 1 and sum(known.left.numel() for known in self._memory.values()) > _MOST:
            del self._memory[next(iter(self._memory))]
        return made

    def _is_copy(self, tensor: torch.Tensor) -> bool:
        """Of an input, or of what the library made alone, in whatever order."""
        alike = [one for one in (*self._given, *self._made) if one.numel() == tensor.numel() > 1]
        return any(is_answer(tensor, one) for one in alike)


def _only_views(schema: Any) -> bool:
    found = schema.returns
    return bool(found) and not schema.is_mutable and all(one.alias_info is not None for one in found)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if _is_plain(tensor) else 0


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that it is a part of."""
    return _no_bytes.new_empty(0).set_(tensor.untyped_storage())


def _part(block: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """What lies in these bytes where `tensor` lies in its storage."""
    flat = tensor.new_empty(0).set_(block.untyped_storage(), 0, (block.numel() // tensor.element_size(),), (1,))
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _laid_out(shadow: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a storage like `tensor`'s, with `shadow` in its place."""
    block = _bytes(tensor).clone().fill_(_POISON if tensor.is_floating_point() else 0)
    _write(_part(block, tensor), shadow)
    return block


def _write(part: torch.Tensor, value: torch.Tensor) -> None:
    """Of what is expanded, each place once."""
    for along in range(part.dim()):
        if part.stride(along) == 0 and part.size(along) > 1:
            part, value = part.narrow(along, 0, 1), value.narrow(along, 0, 1)
    part.copy_(value)


def _nonsense(tensor: torch.Tensor) -> torch.Tensor:
    """What nobody has written: large numbers; of whole ones zeros, which are places everywhere."""
    made = torch.zeros_like(tensor)
    return made.fill_(3.3e38 if tensor.dtype.itemsize > 2 else 6e4) if tensor.is_floating_point() else made


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """A NaN is one."""
    return _equal(one, other) or _equal(_as_bytes(one), _as_bytes(other))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _keep(results: list[torch.Tensor], item: torch.Tensor) -> None:
    if sum(one.numel() * one.element_size() for one in results) + item.numel() * item.element_size() <= _MOST // 4:
        results.append(item.clone())


def _are_together(parts: list[torch.Tensor], wanted: torch.Tensor) -> bool:
    """Whether an operator's results have it among them, in parts or within a larger one."""
    runs = runs_of([part.numel() for part in parts], wanted.numel())
    return any(are_answer(parts[run], wanted) for run in runs) or have_nearly_all(parts, wanted)
