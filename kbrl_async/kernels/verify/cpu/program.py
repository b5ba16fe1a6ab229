"""What one forward on a CPU consists of, as data that a process without any of the candidate's Python does again (I5).

::

    inputs, constants ─▶ steps: Operator (of torch) · Call (of a built C function) ─▶ outputs

Every tensor is a value with a number: first the inputs, then the constants, then what steps make. There are no
addresses, so nothing has to be moved: whoever does it again allocates by the same operators. A program is written by
whoever may lie, and nothing in it is believed: a wrong one gives wrong results. `read` holds what a replay needs to
hold: known operators, functions of the candidate's own artifacts, values that exist, constants within their blocks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Annotated, Any, Literal

import msgspec
import torch

from kbrl_async.kernels.verify import replies, values, wire
from kbrl_async.kernels.verify.cpu.library import operator, writes
from kbrl_async.kernels.verify.replies import Malformed

MAX_STEPS = 2048
MAX_CONSTANTS = 2048
_MOST = 1 << 40
_NAME = re.compile(r"[A-Za-z_]\w{0,255}")
Count = Annotated[int, msgspec.Meta(ge=0)]
Kind = Literal["tensor", "long", "float", "double"]


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Memory that lasts from call to call, such as weights."""

    place: Count
    """Address in the recorder."""
    size: Count
    is_written: bool
    """A step may write to it; else it is mapped so that nobody can."""


class Constant(msgspec.Struct, frozen=True, array_like=True):
    block: Count
    meta: wire.TensorMeta
    """Its place is an offset in the block."""


class OperatorCall(msgspec.Struct, frozen=True, tag="operator"):
    name: str
    """`aten::mm`, `aten::add.Tensor`."""
    arguments: wire.Tree
    """`["L", [positional, named]]`, tensors by number; without device and pinning."""
    results: wire.Tree
    """The numbers of its results: one, or a list of them."""


class Call(msgspec.Struct, frozen=True, tag="call"):
    """One call of a function of a built shared object."""

    artifact: str
    name: str
    arguments: list[tuple[Kind, int | float]]
    """A tensor's number, or a C number."""


Step = OperatorCall | Call
_NO_WORK = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "detach",
        "view",
        "_unsafe_view",
        "as_strided",
        "t",
        "transpose",
        "permute",
        "squeeze",
        "unsqueeze",
        "expand",
        "select",
        "slice",
    )
)
"""Operators that touch no element."""


class CpuProgram(msgspec.Struct, frozen=True):
    inputs: Count
    blocks: list[Block]
    constants: list[Constant]
    steps: list[Step]
    tree: wire.Tree
    """What forward returns, tensors by number."""

    @property
    def is_compiled(self) -> bool:
        """Only built functions compute; operators of torch allocate or make views, at most."""
        return all(isinstance(step, Call) or step.name.partition(".")[0] in _NO_WORK for step in self.steps)

    @property
    def given(self) -> int:
        """Values that are there before the first step."""
        return self.inputs + len(self.constants)

    @property
    def shape(self) -> tuple[object, ...]:
        """Everything but addresses: equal for two recordings of the same work."""
        blocks = [(block.size, block.is_written) for block in self.blocks]
        return self.inputs, blocks, self.constants, self.steps, self.tree


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(CpuProgram).decode


def read(data: bytes, artifacts: Collection[str]) -> CpuProgram:
    """:raises Malformed: it is no program over these artifacts, whatever it is instead."""
    try:
        program: CpuProgram = decode(data)
        _check(program, artifacts)
    except Malformed:
        raise
    except Exception as error:  # the decoder raises what it likes: RecursionError, UnicodeDecodeError
        raise Malformed(f"{type(error).__name__}: {error}"[:200]) from error
    return program


def _check(program: CpuProgram, artifacts: Collection[str]) -> None:
    _demand(len(program.steps) <= MAX_STEPS, "too many steps")
    _demand(max(program.inputs, len(program.constants), len(program.blocks)) <= MAX_CONSTANTS, "too many constants")
    _demand(sum(block.size for block in program.blocks) < _MOST, "too much memory")
    for constant in program.constants:
        meta = constant.meta
        end = meta.place + replies.extent(meta) * values.dtype_of(meta.dtype).itemsize
        _demand(end <= program.blocks[constant.block].size, "a constant lies outside of its block")
        _demand(len(meta.shape) == len(meta.strides), "strides do not fit the shape")
    known = set(range(program.given))
    for step in program.steps:
        _demand(all(number in known for number in used(step)), "a value is used before it is made")
        if isinstance(step, Call):
            _demand(step.artifact in artifacts and bool(_NAME.fullmatch(step.name)), "no function of its own")
            known_kinds = all(type(n) is int or kind in ("float", "double") for kind, n in step.arguments)
            _demand(known_kinds, "a tensor or a whole number is none")
        else:
            _demand(operator(step.name) is not None, f"{step.name[:80]} is not replayed")
            _demand(step.arguments[0] == "L" and len(step.arguments[1]) == 2, "no arguments")
            _demand(step.arguments[1][0][0] == "L" and step.arguments[1][1][0] == "D", "no arguments")
            _demand(all(map(_NAME.fullmatch, step.arguments[1][1][1])), "no argument's name")
            known.update(_made(step.results))
    _demand(all(number in known for number in numbers(program.tree)), "an output was not made")


def calls_behind(program: CpuProgram, inputs: Collection[int]) -> set[int]:
    """Places of the calls whose arguments depend on these inputs. All that it is given it may write."""
    reached, found = set(inputs), set[int]()
    for place, step in enumerate(program.steps):
        if not reached.intersection(used(step)):
            continue
        if isinstance(step, Call):
            found.add(place)
            reached.update(used(step))
        else:
            reached.update(_made(step.results))
            changed = [one for at, one in enumerate(step.arguments[1][0][1]) if writes(step.name, at)]
            reached.update(number for one in changed for number in numbers(one))
    return found


def used(step: Step) -> list[int]:
    """Numbers of the values that a step reads or writes."""
    if isinstance(step, Call):
        return [int(number) for kind, number in step.arguments if kind == "tensor"]
    return list(numbers(step.arguments))


def numbers(tree: wire.Tree, depth: int = 0) -> Iterator[int]:
    """Of the tensors in it. `Malformed` where it is no tree."""
    _demand(isinstance(tree, list) and len(tree) == 2 and depth <= values.MAX_DEPTH, "no tree")
    kind, body = tree
    if kind == "T":
        _demand(type(body) is int and 0 <= body < 1 << 20, "no value's number")
        yield body
    elif kind == "V":
        _demand(type(body) in values.PLAIN, "no plain value")
    elif kind == "Y":
        setting(body)
    else:
        is_dict = kind == "D" and type(body) is dict and all(type(key) is str for key in body)
        _demand(is_dict or (kind in ("L", "U") and type(body) is list), "no tree")
        for item in body.values() if is_dict else body:
            yield from numbers(item, depth + 1)


def _made(results: wire.Tree) -> list[int]:
    """One value, or a flat list of values and of what is none."""
    found = list(numbers(results))
    is_flat = results[0] in ("T", "V") or (
        results[0] in ("L", "U") and all(item[0] in ("T", "V") for item in results[1])
    )
    _demand(is_flat, "results in results")
    return found


def setting(name: object) -> Any:
    """A dtype, layout or memory format of torch by its name. `Malformed` where it is none."""
    found = getattr(torch, name, None) if type(name) is str else None
    _demand(isinstance(found, (torch.dtype, torch.layout, torch.memory_format)), "no dtype or layout")
    return found


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise Malformed(what)
