"""From a person's file or name to a problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kbrl_async.errors import ProblemError, UserError
from kbrl_async.lab.optimize.targets import Given, UserModule, read_target
from kbrl_async.rollouts.prompts import render_prompt
from tests.unit.lab.optimize.making import SOURCE

LAYERS = '''\
from __future__ import annotations

import math
import os

import torch
import torch.nn.functional as F
from torch import nn

SCALE = 1.0 / math.sqrt(4)
open("IMPORTED", "w").close()


def helper(x):
    return x * SCALE


def scaled_gelu(x: torch.Tensor, bias, approximate="none"):
    """Doc."""
    y = helper(x + bias)
    return F.gelu(y, approximate=approximate)


class Shift(nn.Module):
    """Adds what it was made with."""

    def __init__(self, by: float, cols: int = 4):
        super(Shift, self).__init__()
        self.by = nn.Parameter(torch.full((cols,), by))

    def forward(self, x):
        return x + self.by


def make():
    return [torch.ones(2, 4)]


def variadic(*x):
    return x[0]
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layers.py").write_text(LAYERS)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "deep.py").write_text("import torch\n\n\ndef inputs():\n    return (torch.zeros(3, 4),)\n")
    return tmp_path


def computed(target: UserModule, source: str = "") -> torch.Tensor:
    """What the problem's module gives on the problem's inputs."""
    names: dict[str, Any] = {}
    exec(source or target.problem.source, names)
    model = names["Model"](*names["get_init_inputs"]())
    result: torch.Tensor = model(*names["get_inputs"]())
    return result


def test_a_file_in_the_contract_is_taken_as_it_stands(folder: Path) -> None:
    (folder / "my_module.py").write_text(SOURCE)
    target = read_target("my_module.py")
    assert (target.kind, target.problem.source, target.stem) == ("file", SOURCE, "my_module")


@pytest.mark.parametrize("place", ["layers.py:scaled_gelu", "layers:scaled_gelu"])
def test_a_function_computes_the_same_as_a_model(folder: Path, place: str) -> None:
    target = read_target(place, Given("torch.ones(2, 4), torch.ones(4)"))
    assert (target.kind, target.arguments) == ("function", ("x", "bias"))
    assert torch.equal(computed(target), torch.nn.functional.gelu(torch.ones(2, 4)))


def test_the_policy_reads_the_function_s_own_lines(folder: Path) -> None:
    shown = read_target("layers:scaled_gelu", Given("torch.ones(2, 4), torch.ones(4)")).shown
    prompt = render_prompt("compact", shown)
    assert "class Model(nn.Module):" in prompt
    assert "y = helper(x + bias)" in prompt
    assert "def helper" in shown.source


def test_a_class_computes_the_same_under_its_new_name(folder: Path) -> None:
    target = read_target("layers:Shift", Given("torch.ones(2, 4)", init="0.5"))
    assert target.kind == "class"
    assert torch.equal(computed(target), torch.full((2, 4), 1.5))
    assert torch.equal(computed(target, target.shown.source), torch.full((2, 4), 1.5))


@pytest.mark.parametrize(("maker", "shape"), [("layers:make", (2, 4)), ("make", (2, 4)), ("pkg.deep:inputs", (3, 4))])
def test_inputs_may_come_from_a_function(folder: Path, maker: str, shape: tuple[int, int]) -> None:
    target = read_target("layers:Shift", Given(inputs_from=maker, init="1.0"))
    assert computed(target).shape == shape


def test_only_what_is_needed_goes_along_and_nothing_is_run(folder: Path) -> None:
    source = read_target("layers:scaled_gelu", Given("torch.ones(2, 4), torch.ones(4)")).problem.source
    assert "import math" in source
    assert "import os" not in source
    assert "Shift" not in source
    assert not (folder / "IMPORTED").exists()


@pytest.mark.parametrize(
    ("place", "given", "says"),
    [
        ("nowhere.py", Given(), r"no file nowhere\.py"),
        ("no.such.module:f", Given(), "no file or module"),
        ("layers.py", Given(), "does not define Model, get_inputs, get_init_inputs"),
        ("layers:scaled_gelu", Given(), r"no inputs to run it on\. Give example inputs"),
        ("layers:scaled_gelu", Given("torch.ones("), "--inputs 'torch.ones.' does not parse"),
        ("layers:scaled_gelu", Given("1, 2, 3, 4"), "takes 3 arguments, and 4 inputs"),
        ("layers:missing", Given("torch.ones(2)"), r"no function or class missing\. It defines: helper, scaled_gelu"),
        ("layers:variadic", Given("torch.ones(2)"), r"takes \*args"),
        ("layers:Shift", Given(inputs_from="layers:nothing"), "defines no nothing"),
    ],
)
def test_what_is_missing_is_said_with_its_cure(folder: Path, place: str, given: Given, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_target(place, given)


def test_a_neighbour_can_not_go_along(folder: Path) -> None:
    (folder / "pkg" / "near.py").write_text("from .deep import inputs\n\n\ndef f(x):\n    return inputs()[0] + x\n")
    with pytest.raises(UserError, match=r"near\.py:1 imports a neighbour"):
        read_target("pkg.near:f", Given("torch.ones(2)"))


def test_a_file_that_does_not_parse_is_named_with_its_line(folder: Path) -> None:
    (folder / "broken.py").write_text("class Model(:\n")
    with pytest.raises(ProblemError, match=r"broken\.py:1 does not parse"):
        read_target("broken.py")
