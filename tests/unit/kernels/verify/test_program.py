"""Programs: what a forward is written down as, what is read of one that somebody lies in, and that it does the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from kbrl_async.kernels.verify.cpu import program, tape
from kbrl_async.kernels.verify.cpu.compiled import Compiler
from kbrl_async.kernels.verify.cpu.library import operator
from kbrl_async.kernels.verify.cpu.program import Block, Call, Constant, CpuProgram, OperatorCall
from kbrl_async.kernels.verify.replies import Malformed
from kbrl_async.kernels.verify.wire import TensorMeta

Forward = Callable[[torch.Tensor], Any]
WEIGHT = torch.randn(5, 4)


def recorded(forward: Forward, x: torch.Tensor) -> CpuProgram:
    found = tape.record(lambda: forward(x), [x])[1]
    assert isinstance(found, CpuProgram), found
    return program.read(program.encode(found), ())


def constants_of(work: CpuProgram) -> list[torch.Tensor]:
    """Read where the program says that they are: this process is the recorder's."""
    return [
        (WEIGHT if tuple(one.meta.shape) == (5, 4) else WEIGHT.t()).as_strided(one.meta.shape, one.meta.strides)
        for one in work.constants
    ]


def view_without_operator(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y.data.mul_(2)
    return y


def let_go(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    first, second = x.chunk(2, dim=1)
    top = torch.max(first, dim=1)
    return top.values, [second * 2, (x * 3).sum()]


FORWARDS: dict[str, Forward] = {
    "one operator": torch.sigmoid,
    "several results, kept and not": let_go,
    "in place": lambda x: torch.empty_like(x).copy_(x).add_(1),
    "weights, and a view of them": lambda x: torch.nn.functional.linear(x, WEIGHT) + (x @ WEIGHT.t()),
    "named arguments and words": lambda x: torch.nn.functional.gelu(x, approximate="tanh").to(torch.float64),
    "infinity": lambda x: torch.where(x > 0, x, float("-inf")),
    "a list of tensors": lambda x: torch.cat([x, x * 2], dim=1),
    "a view that no operator made": view_without_operator,
    "an input as it came": lambda x: {"x": x, "n": 3},
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_program_does_what_was_recorded_on_other_inputs_too(name: str) -> None:
    work = recorded(FORWARDS[name], torch.randn(3, 4))
    x = torch.randn(3, 4)
    found, wanted = Compiler(work, constants_of(work), {}).forward()(x.clone()), FORWARDS[name](x.clone())
    same: Any = torch.testing.assert_close
    same(found, wanted, rtol=0, atol=0)


def test_two_recordings_of_the_same_work_are_of_one_shape() -> None:
    one, other = (recorded(torch.sigmoid, torch.randn(3, 4)) for _ in range(2))
    assert one.shape == other.shape
    assert recorded(torch.tanh, torch.randn(3, 4)).shape != one.shape


REFUSED: dict[str, tuple[Forward, str]] = {
    "a value read back": (lambda x: x * float(x.sum()), "reads a value back"),
    "chance": (lambda x: torch.nn.functional.dropout(x, 0.5), "aten::"),
    "other memory under a tensor": (lambda x: torch.empty(3).set_(x.untyped_storage()), "aten::set_"),
    "an object": (lambda x: object(), "object"),
    "a swallowed refusal": (lambda x: (x.sum().item(), x)[1], "reads a value back"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_recorded_is_refused_in_words(name: str) -> None:
    forward, word = REFUSED[name]
    x = torch.randn(3, 4)
    found = tape.record(lambda: forward(x), [x])[1]
    assert isinstance(found, str)
    assert word in found


@pytest.mark.parametrize("name", ["aten::mm", "aten::add.Tensor", "aten::_softmax", "aten::copy_", "aten::max.dim"])
def test_operators_whose_result_depends_on_their_arguments_are_on_the_list(name: str) -> None:
    assert operator(name) is not None


@pytest.mark.parametrize(
    "name",
    [
        *("aten::set_.source_Tensor", "aten::from_file", "aten::rand", "aten::bernoulli", "aten::_local_scalar_dense"),
        *("aten::resize_", "aten::nothing", "aten::mm.nothing", "prim::print", "mine::mm", "aten::__class__", "", "::"),
        *("aten::nonzero", "aten::mm\0", "aten::data_ptr"),
    ],
)
def test_all_others_are_not(name: str) -> None:
    assert operator(name) is None


SIGMOID = OperatorCall("aten::sigmoid", ["L", [["L", [["T", 0]]], ["D", {}]]], ["T", 1])
GOOD = CpuProgram(1, [], [], [SIGMOID], ["T", 1])
META = TensorMeta("float32", (2, 2), (2, 1), 0)


def altered(**changes: Any) -> CpuProgram:
    return msgspec.structs.replace(GOOD, **changes)


LIES: dict[str, CpuProgram] = {
    "a value before it is made": altered(
        steps=[msgspec.structs.replace(SIGMOID, arguments=["L", [["L", [["T", 7]]], ["D", {}]]])]
    ),
    "an output that was not made": altered(tree=["T", 9]),
    "an unknown operator": altered(steps=[msgspec.structs.replace(SIGMOID, name="aten::from_file")]),
    "another's function": altered(steps=[Call("b" * 64, "f", [])]),
    "a name that is code": altered(steps=[Call("a" * 64, "f()", [])]),
    "half a tensor": altered(steps=[Call("a" * 64, "f", [("tensor", 0.5)])]),
    "a constant outside of its block": altered(
        blocks=[Block(4096, 15, False)], constants=[Constant(0, META)], tree=["T", 0]
    ),
    "a constant of no block": altered(constants=[Constant(3, META)], tree=["T", 0]),
    "a dtype that is none": altered(
        blocks=[Block(4096, 16, False)],
        constants=[Constant(0, msgspec.structs.replace(META, dtype="nn"))],
        tree=["T", 0],
    ),
    "a block without end": altered(blocks=[Block(4096, 1 << 62, False)]),
    "too many steps": altered(steps=[SIGMOID] * 3000),
    "a name of an argument that is code": altered(
        steps=[msgspec.structs.replace(SIGMOID, arguments=["L", [["L", [["T", 0]]], ["D", {"a=1, b": ["V", 1]}]]])]
    ),
    "a setting that is a function": altered(
        steps=[msgspec.structs.replace(SIGMOID, arguments=["L", [["L", [["Y", "load"]]], ["D", {}]]])]
    ),
    "results in results": altered(steps=[msgspec.structs.replace(SIGMOID, results=["L", [["L", [["T", 1]]]]])]),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_malformed(name: str) -> None:
    assert program.read(program.encode(GOOD), ()) == GOOD
    with pytest.raises(Malformed):
        program.read(program.encode(LIES[name]), ["a" * 64])


def test_whatever_the_bytes_are_they_are_a_program_or_malformed() -> None:
    rng, good = random.Random(0), bytearray(program.encode(recorded(let_go, torch.randn(3, 4))))
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            assert isinstance(program.read(bytes(data[: rng.randrange(len(data)) or None]), ()), CpuProgram)
        except Malformed:
            continue


def test_operators_that_touch_no_element_leave_all_of_the_work_to_compiled_code() -> None:
    call = Call("k.so", "run", [])
    made = CpuProgram(1, [], [], [OperatorCall("aten::empty_like", ["L", []], ["V", 1]), call], ["V", 1])
    assert made.is_compiled
    for name in ("aten::mm", "aten::add.Tensor", "aten::copy_", "aten::zeros"):
        assert not CpuProgram(1, [], [], [OperatorCall(name, ["L", []], ["V", 1]), call], ["V", 1]).is_compiled
