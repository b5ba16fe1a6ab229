"""Kernels written by rule: right wherever the rule says that it can follow, and silent elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kbrl_async.lab.optimize.following import Unfollowed
from kbrl_async.lab.optimize.transcribing import transcriptions

torch.set_num_threads(1)

IMPORTS = "import math\nimport torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n"
HEAD = f"{IMPORTS}SCALE = 1 / math.sqrt(2)\n\n\n"


def module(forward: str, arguments: str = "x", inputs: str = "torch.randn(5, 33)", init: str = "") -> str:
    made = f"    def __init__(self):\n        super().__init__()\n{init}" if init else ""
    body = "\n".join("        " + line for line in forward.splitlines())
    return (
        f"{HEAD}class Model(nn.Module):\n{made}    def forward(self, {arguments}):\n{body}\n\n\n"
        f"def get_inputs():\n    return [{inputs}]\n\n\ndef get_init_inputs():\n    return []\n"
    )


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))


def check(source: str, candidate: str) -> None:
    """The candidate's module gives what the problem's gives."""
    problem: dict[str, Any] = {}
    solution: dict[str, Any] = {}
    exec(source, problem)
    exec(candidate, solution)
    torch.manual_seed(3)
    inputs = problem["get_inputs"]()
    old, new = problem["Model"](), solution["ModelNew"]()
    new.load_state_dict(old.state_dict())
    with torch.no_grad():
        expected, got = old(*inputs), new(*inputs)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5)


TWO = "torch.randn(5, 33), torch.rand(5, 33)"
WEIGHT = "        self.weight = nn.Parameter(torch.rand(33))\n        self.bias = nn.Parameter(torch.rand(33))\n"
FOLLOWED = {
    "chain": module("x = x * 0.5\nx = F.gelu(x)\nreturn torch.tanh(x) + 1"),
    "row vector": module("return F.gelu(x + b) + y", "x, b, y", f"torch.randn(5, 33), torch.randn(33), {TWO[:18]}"),
    "column": module("return x * y", "x, y", "torch.randn(5, 33), torch.randn(5, 1)"),
    "softmax": module("return torch.softmax(x * SCALE + y, dim=-1)", "x, y", TWO),
    "log_softmax": module("return F.log_softmax(x, dim=-1) * 2"),
    "huber": module(
        "e = (x - y).abs()\nl = torch.where(e < 1.0, 0.5 * e * e, e - 0.5)\nreturn l.mean(dim=-1)", "x, y", TWO
    ),
    "total": module("return ((x - y) ** 2).mean()", "x, y", TWO),
    "keepdim": module("m = x.mean(dim=-1, keepdim=True)\nreturn (x - m) / (x.std(dim=-1, keepdim=True) + 1e-3)"),
    "three dimensions": module("return x.amax(-1)", inputs="torch.randn(2, 3, 17)"),
    "layer_norm": module("return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias)", init=WEIGHT),
    "rms_norm": module("return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight", init=WEIGHT),
    "module": module("return self.act(x).clamp(min=0.1)", init="        self.act = nn.SiLU()\n"),
    "logsumexp": module("return torch.logsumexp(x, dim=-1, keepdim=True)"),
    "augmented": module("x += 1\nx *= y\nreturn F.softplus(x)", "x, y", TWO),
    "number of self": module("return x * self.by", init="        self.by = 3.0 * math.pi\n"),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_it_follows_it_writes_right(name: str) -> None:
    source = FOLLOWED[name]
    if name == "augmented":
        source = source.replace("x += 1", "x = x + 1")  # in place would change the inputs of the comparison
    check(source, transcriptions(source)[0])


def test_both_variants_are_right() -> None:
    made = transcriptions(FOLLOWED["softmax"])
    assert ["Ofast" in text for text in made] == [True, False]
    check(FOLLOWED["softmax"], made[1])


def test_layouts_that_the_inputs_do_not_show_are_all_offered() -> None:
    made = transcriptions(module("return x + y", "x, y", "*make()"))
    reads = {line.strip() for text in made for line in text.splitlines() if "out[r" in line}
    assert {"y[r * cols + c]" in line or "y[c]" in line or "y[0]" in line for line in reads} == {True}
    assert len(reads) == 3


@pytest.mark.parametrize(
    "forward",
    [
        "return x @ x.T",
        "return torch.cumsum(x, dim=-1)",
        "return x.sum(dim=0)",
        "return x[:, 1:]",
        "if x.sum() > 0:\n    return x\nreturn -x",
        "return F.dropout(x)",
        "return torch.softmax(x, dim=0)",
        "return x - x.mean(dim=-1)",
        "return x - x.mean()",
        "return x * x.shape[0]",
        "return F.softplus(x, beta=2)",
        "return self.linear(x)",
        "return 3.0",
    ],
)
def test_what_it_can_not_follow_it_says(forward: str) -> None:
    with pytest.raises(Unfollowed):
        transcriptions(module(forward, init="        self.linear = nn.Linear(3, 3)\n"))


def test_a_kernel_s_file_stands_alone(tmp_path: Path) -> None:
    source = module("return x * self.by", init="        self.by = 2.0\n").replace("(self)", "(self, by: 'Thing' = 2.0)")
    assert "Thing" not in transcriptions(source)[0]
