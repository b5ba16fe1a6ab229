"""Inside the candidate's confined child: one run of forward, written down as a `program.Program`.

::

    forward ─▶ ATen operators (dispatch mode) · calls of built functions (`RECORDER.tape`) ─▶ Program, or why none

The candidate's Python runs in this process and may write whatever it likes here: a program is a proposal. What can't be
written down (a value read back to Python, an operator that is not on the list) is refused in words.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kbrl_async.kernels.backends.c.launch import CKernel
from kbrl_async.kernels.backends.launch.recorder import RECORDER
from kbrl_async.kernels.verify import values, wire
from kbrl_async.kernels.verify.cpu import library
from kbrl_async.kernels.verify.cpu.program import Block, Call, Constant, CpuProgram, Kind, OperatorCall, Step
from kbrl_async.kernels.verify.cpu.trace import is_replaced

_KINDS: dict[type, Kind] = {ctypes.c_int64: "long", ctypes.c_float: "float", ctypes.c_double: "double"}
_SAID = {
    "_local_scalar_dense": "forward reads a value back to Python",
    "item": "forward reads a value back to Python",
}
_SETTINGS = (torch.dtype, torch.layout, torch.memory_format)
_PLACES = ("device", "pin_memory")


class Unrecordable(Exception):  # noqa: N818 - a reason, not an error
    """Why this forward is no program, in words."""


def record(forward: Callable[[], Any], inputs: list[torch.Tensor]) -> tuple[Any, CpuProgram | str]:
    """`forward()`, and what it consisted of, or why that can't be said."""
    tape = Tape(inputs)
    RECORDER.tape = tape.called
    try:
        with tape:
            result = forward()
    finally:
        RECORDER.tape = None
    return result, tape.program(result)


class Tape(TorchDispatchMode):
    """Every tensor that it met stays alive while it is written, so that neither objects nor addresses come twice."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's is not typed
        self._inputs = len(inputs)
        self._numbers: dict[int, int] = {}
        self._first: dict[int, tuple[int, torch.dtype]] = {}
        """The first value in each storage."""
        self._met: list[torch.Tensor] = []
        self._constants: list[torch.Tensor] = []
        self._written: set[int] = set()
        """Storages that a step may write to."""
        self._steps: list[Step] = []
        self._refused = ""
        for tensor in inputs:
            self._number(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the method below, and its first call imports the whole compiler

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self._refused:
            try:
                self._operator(function, args, kwargs or {}, result)
            except (Unrecordable, TypeError) as why:
                self._refused = str(why)
        return result

    def _operator(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = function.name()
        if is_replaced(function):
            raise Unrecordable(f"the operator {name} is one of the candidate's own")
        if library.operator(name) is None:
            base = name.partition("::")[2].partition(".")[0]
            raise Unrecordable(_SAID.get(base, f"the operator {name} is not replayed"))
        if str(kwargs.get("device") or "cpu").partition(":")[0] != "cpu":
            raise Unrecordable(f"{name} is asked for on {kwargs['device']}")
        named = {key: item for key, item in kwargs.items() if key not in _PLACES}
        for place, item in enumerate(args):
            if isinstance(item, torch.Tensor) and library.writes(name, place):
                self._written.add(_storage(item))
        for key, item in named.items():
            if isinstance(item, torch.Tensor) and library.writes(name, 0, key):
                self._written.add(_storage(item))
        arguments = ["L", [["L", [self._tree(item) for item in args]], self._tree(named)]]
        self._steps.append(OperatorCall(name, arguments, self._tree(result, is_new=True)))

    def called(self, kernel: CKernel, args: tuple[Any, ...], given: list[Any]) -> None:
        """One call of a built function: `args` as forward gave them, `given` as C gets them."""
        if self._refused:
            return
        arguments: list[tuple[Kind, int | float]] = []
        for place, (arg, value) in enumerate(zip(args, given, strict=True)):
            if isinstance(arg, torch.Tensor):
                arguments.append(("tensor", self._number(arg)))
                if not kernel.only_reads(place):
                    self._written.add(_storage(arg))
            else:
                arguments.append((_KINDS[type(value)], value.value))
        self._steps.append(Call(kernel.key, kernel.name, arguments))

    def _tree(self, item: Any, is_new: bool = False) -> wire.Tree:
        if isinstance(item, torch.Tensor):
            return ["T", self._number(item, is_new)]
        if isinstance(item, _SETTINGS):
            return ["Y", str(item).removeprefix("torch.")]
        if isinstance(item, (list, tuple)):
            return ["L" if isinstance(item, list) else "U", [self._tree(one, is_new) for one in item]]
        if isinstance(item, dict):
            return ["D", {str(key): self._tree(item[key], is_new) for key in item}]
        if type(item) in values.PLAIN:
            return ["V", item]
        raise Unrecordable(f"a {type(item).__name__} is no argument that is replayed")

    def _number(self, tensor: torch.Tensor, is_new: bool = False) -> int:
        known = self._numbers.get(id(tensor))
        if known is not None:
            return known
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise Unrecordable("a tensor is not a dense one on the CPU")
        first = self._first.get(_storage(tensor))
        if not is_new and len(self._met) >= self._inputs:
            if first is None or first[0] < 0:
                return self._constant(tensor)
            self._view(tensor, *first)
        return self._meet(tensor)

    def _meet(self, tensor: torch.Tensor, number: int | None = None) -> int:
        number = len(self._met) - len(self._constants) if number is None else number
        self._met.append(tensor)
        self._numbers[id(tensor)] = number
        self._first.setdefault(_storage(tensor), (number, tensor.dtype))
        return number

    def _constant(self, tensor: torch.Tensor) -> int:
        """It was there before forward: counted from −1 downwards until all are known."""
        self._constants.append(tensor)
        return self._meet(tensor, -len(self._constants))

    def _view(self, tensor: torch.Tensor, base: int, dtype: torch.dtype) -> None:
        """A view that no operator made, as `.data` is."""
        if dtype is not tensor.dtype:
            raise Unrecordable("memory is read as another type")
        where = [list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]
        shape, strides, offset = (values.flatten(one, []) for one in where)
        number = len(self._met) - len(self._constants)
        arguments = ["L", [["L", [["T", base], shape, strides, offset]], ["D", {}]]]
        self._steps.append(OperatorCall("aten::as_strided", arguments, ["T", number]))

    def program(self, result: Any) -> CpuProgram | str:
        """All of it, or why there is none."""
        try:
            tree = self._refused or self._tree(result)
        except (Unrecordable, TypeError) as why:
            return str(why)
        if self._refused:
            return self._refused
        blocks, constants = self._blocks()
        steps = [self._renumbered(step) for step in self._steps]
        return CpuProgram(self._inputs, blocks, constants, steps, self._final(tree))

    def _blocks(self) -> tuple[list[Block], list[Constant]]:
        places: dict[int, int] = {}
        blocks: list[Block] = []
        constants: list[Constant] = []
        for tensor in self._constants:
            key, storage = _storage(tensor), tensor.untyped_storage()
            if key not in places:
                places[key] = len(blocks)
                blocks.append(Block(storage.data_ptr(), storage.nbytes(), key in self._written))
            offset = int(tensor.storage_offset()) * tensor.element_size()
            constants.append(Constant(places[key], values.describe(tensor.detach(), offset)))
        return blocks, constants

    def _renumbered(self, step: Step) -> Step:
        if isinstance(step, OperatorCall):
            return OperatorCall(step.name, self._final(step.arguments), self._final(step.results))
        given = [(kind, self._place(int(n)) if kind == "tensor" else n) for kind, n in step.arguments]
        return Call(step.artifact, step.name, given)

    def _final(self, tree: wire.Tree) -> wire.Tree:
        kind, body = tree
        if kind == "T":
            return ["T", self._place(body)]
        if kind in ("L", "U"):
            return [kind, [self._final(item) for item in body]]
        return [kind, {key: self._final(item) for key, item in body.items()}] if kind == "D" else tree

    def _place(self, number: int) -> int:
        """Inputs, then constants, then what was made."""
        if number < 0:
            return self._inputs - number - 1
        return number if number < self._inputs else number + len(self._constants)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
