"""What is read from a reference: its hashes see through names and style, and hostile source is refused."""

from __future__ import annotations

import random

import pytest

from kbrl_async.kernels.syntax import Unreadable, read
from kbrl_async.kernels.syntax.operations import operations
from kbrl_async.kernels.syntax.scope import Scope
from tests.retrieval_corpus import mutated, reference
from tests.unit.rollouts.retrieval.making import module

BASE = module("x = F.relu(x)", "x = x * 2.0")


@pytest.mark.parametrize(
    "other",
    [
        BASE.replace("        return x\n", "        return x  # done\n"),
        BASE.replace("x", "tensor_1").replace("tensor_1 = F", "tensor_1 = F"),
        BASE.replace("2.0", "0.125"),
        BASE.replace("randn(8, 8)", "randn(1024, 3, 7)"),
        BASE.replace("class Model(nn.Module):", 'class Model(nn.Module):\n    """It scales."""\n'),
        BASE.replace("import torch.nn.functional as F", "import torch.nn.functional as Fn").replace(
            "F.relu", "Fn.relu"
        ),
        BASE.replace("super().__init__()", "super(Model, self).__init__()"),
        BASE.replace("def forward(self, x):", "def forward(self, x: torch.Tensor) -> torch.Tensor:"),
        BASE.replace("Model", "ScaledRelu"),
    ],
)
def test_comments_names_constants_sizes_and_docstrings_do_not_change_the_code_hash(other: str) -> None:
    assert other != BASE
    assert read(other).code_hash == read(BASE).code_hash


@pytest.mark.parametrize(
    "other", [BASE.replace("relu", "gelu"), BASE.replace("x * 2.0", "x + 2.0"), module("x = x * 2")]
)
def test_other_operations_change_both_hashes(other: str) -> None:
    assert read(other).code_hash != read(BASE).code_hash
    assert read(other).chain_hash != read(BASE).chain_hash


SPELLINGS = [
    module("return nn.functional.relu(x) * 3"),
    module("return torch.relu(x).mul(3)"),
    module("x = x.relu_()", "x *= 3"),
    module("y = self.act(x)", "return y * 3").replace("__init__()\n", "__init__()\n        self.act = nn.ReLU()\n"),
    module("return self.both(x)").replace(
        "    def forward", "    def both(self, y):\n        return torch.relu(y) * 3\n\n    def forward"
    ),
    module("return helper(x) * 3") + "\n\ndef helper(a):\n    return F.relu(a)\n",
    module("return Inner()(x) * 3")
    .replace("return Inner()(x)", "return self.inner(x)")
    .replace("__init__()\n", "__init__()\n        self.inner = Inner(4 * 2)\n", 1)
    + "\n\nclass Inner(nn.Module):\n    def forward(self, a):\n        return F.relu(a)\n",
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_chain_of_operations_does_not_depend_on_how_they_are_written(spelling: str) -> None:
    assert operations(Scope(spelling)) == ("relu", "mul")


def test_sequentials_and_lists_of_layers_count_as_what_they_hold() -> None:
    stacked = module("x = self.net(x)", "for layer in self.layers:", "    x = layer(x)").replace(
        "__init__()\n",
        "__init__()\n        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU())\n"
        "        self.layers = nn.ModuleList([nn.LayerNorm(8)])\n",
    )
    assert operations(Scope(stacked)) == ("linear", "gelu", "layernorm")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def broken(:", "does not parse"),
        ("x = 1\0", "does not parse"),
        ("x = 1\n", "no module with a forward"),
        ("class Model:\n    pass\n", "no module with a forward"),
        (BASE + "\ny = " + "-" * 20_000 + "1", "nests too deeply"),
        (BASE.replace("x * 2.0", "+".join(["x"] * 3000)), "nests too deeply"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_reason(source: str, reason: str) -> None:
    with pytest.raises(Unreadable) as caught:
        read(source)
    assert caught.value.reason == reason


def test_functions_that_call_each_other_for_ever_cost_little() -> None:
    looping = module("x = self.a(x)") + "\n"
    calls = "".join(f"    def {n}(self, x):\n        return self.a(self.b(self.a(self.b(x))))\n\n" for n in "ab")
    assert read(looping.replace("    def forward", calls + "    def forward")).code_hash


def test_a_source_with_bad_escapes_is_read_without_a_warning() -> None:
    assert read(BASE + "\nPATTERN = '\\d'\n").code_hash == read(BASE).code_hash


def test_a_mutated_copy_runs_the_same_chain() -> None:
    rng = random.Random(0)
    for number in range(30):
        source = reference(rng, f"Net{number}")
        assert read(mutated(rng, source)).chain_hash == read(source).chain_hash
