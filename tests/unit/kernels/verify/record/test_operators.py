"""Which operators are written down, on tensors of the host: where they lie is asked of a stand-in."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kbrl_async.kernels.verify import values, wire
from kbrl_async.kernels.verify.cuda.record.graph import NotRecordable
from kbrl_async.kernels.verify.cuda.record.heap import Heap
from kbrl_async.kernels.verify.cuda.record.operators import OperatorSpan, Watch, drops_nothing


class Nodes:
    """Counts as if each operator that computes made one node: the counter is asked twice for each."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> int:
        self.asked += 1
        return self.asked // 2


def place(tensor: torch.Tensor) -> wire.TensorMeta:
    return values.describe(tensor, 0)


def steps_of(count: object, forward: object) -> list[OperatorSpan]:
    watch = Watch(count, place, Heap())  # type: ignore[arg-type]
    with watch:
        forward()  # type: ignore[operator]
    return watch.steps


def test_an_operator_is_written_down_with_its_nodes_arguments_and_results() -> None:
    x = torch.ones(2, 3)
    (step,) = steps_of(Nodes(), lambda: torch.sum(x, 1, dtype=torch.float64))
    assert (step.name, step.first, step.last) == ("aten::sum.dim_IntList", 0, 1)
    positional, named = values.restore(step.arguments, [x])
    assert positional[0] is x
    assert positional[1] == [1]
    assert named == {"dtype": torch.float64}
    assert [meta.shape for meta in step.results] == [(2,)]


def test_what_makes_no_node_is_not_written_down() -> None:
    assert steps_of(lambda: 0, lambda: torch.ones(2, 3).view(6)[1:].t()) == []


def test_device_and_layout_are_left_out() -> None:
    (step,) = steps_of(Nodes(), lambda: torch.zeros(3, device="cpu", dtype=torch.int32))
    assert values.restore(step.arguments, []) == [[[3]], {"dtype": torch.int32}]


def test_a_number_in_a_tensor_of_the_host_is_a_number() -> None:
    x, factor = torch.ones(2), torch.tensor(2.5)
    (step,) = steps_of(Nodes(), lambda: x * factor)
    assert len(step.tensors) == 1
    assert values.restore(step.arguments, [x])[0][1] == 2.5


def test_random_numbers_are_refused_and_a_dropout_that_is_off_draws_none() -> None:
    with pytest.raises(NotRecordable, match="aten::rand_like draws random numbers"):
        steps_of(Nodes(), lambda: torch.rand_like(torch.ones(2)))
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert torch.Tag.nondeterministic_seeded in attention.tags
    q = torch.ones(1, 1, 16, 8)
    assert drops_nothing(attention, (q, q, q), {})
    assert drops_nothing(attention, (q, q, q, 0.0), {})
    assert not drops_nothing(attention, (q, q, q), {"dropout_p": 0.5})
    assert not drops_nothing(torch.ops.aten.rand_like.default, (q,), {})


def test_an_operator_that_nobody_does_again_is_refused_by_name() -> None:
    with pytest.raises(NotRecordable, match=r"aten::\S+ is none of the operators"):
        steps_of(Nodes(), lambda: torch.linalg.eigvals(torch.eye(3)))


def test_what_a_candidates_own_operator_calls_is_seen_by_itself() -> None:
    library = torch.library.Library("kbrl_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: torch.add(x, x), "CPU")
    x = torch.ones(2)
    steps = steps_of(Nodes(), lambda: torch.ops.kbrl_test.twice(x))
    assert [step.name for step in steps] == ["aten::add.Tensor"]


def test_watching_does_not_import_torchs_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from kbrl_async.kernels.verify.cuda.record.heap import Heap\n"
        "from kbrl_async.kernels.verify.cuda.record.operators import Watch\n"
        "x = torch.ones(2)\n"
        "with Watch(lambda: 0, None, Heap()):\n"
        "    x + 1\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
