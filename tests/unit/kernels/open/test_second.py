"""`python -m benchmarks.verification second`: the same module in another way, by every input set."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.harness.crew import rows_of
from benchmarks.verification.cuts import clipped, cut, cuts, halved
from benchmarks.verification.reordered import Reordered, step_by_step
from benchmarks.verification.second import input_bytes, second

X, M, Q = torch.randn(8, 16, 32, 32), torch.randn(33, 65), torch.randn(2, 4, 16, 8)
ADDING: dict[str, Callable[[], Any]] = {
    "linear": lambda: F.linear(M, M, M[:, 0]),
    "matmul": lambda: Q @ Q.transpose(-1, -2),
    "matrix and vector": lambda: M @ M[0],
    "dot": lambda: torch.dot(M[0], M[0]),
    "baddbmm": lambda: torch.baddbmm(X[0], X[0], X[0], beta=0.5, alpha=2),
    "convolution": lambda: F.conv2d(X, X[:, :8, :3, :3].contiguous(), M[0, :8], padding=1, groups=2),
    "depthwise": lambda: F.conv2d(X, X[0, :, :3, :3].unsqueeze(1), groups=16),
    "transposed": lambda: F.conv_transpose2d(X, X[0, :, None, :3, :3].repeat(1, 5, 1, 1), None, 2, 1, 1, groups=2),
    "sum": lambda: X.sum((1, -1), keepdim=True),
    "mean": lambda: X.mean(1),
    "deviation": lambda: X.std((0, 1), unbiased=False),
    "batch norm": lambda: F.batch_norm(X, None, None, M[0, :16], M[1, :16], True),
    "layer norm": lambda: F.layer_norm(X, (32,)),
    "group norm": lambda: F.group_norm(X, 4),
    "softmax": lambda: X.softmax(1),
    "norm": lambda: torch.norm(X, p=2, dim=1),
    "loss": lambda: F.smooth_l1_loss(X, 2 * X),
    "running sum": lambda: X.cumsum(-1),
    "running product": lambda: (X / 8 + 1).cumprod(1),
    "attention": lambda: F.scaled_dot_product_attention(Q, Q, Q, is_causal=True),
    "masked attention": lambda: F.scaled_dot_product_attention(Q, Q, Q, attn_mask=Q[0, 0, :, :1] > -1),
}


@pytest.mark.parametrize("name", ADDING)
def test_another_order_is_the_same_but_for_rounding_errors(name: str) -> None:
    with torch.no_grad(), Reordered() as mode:
        found = ADDING[name]()
    with torch.no_grad():
        wanted = ADDING[name]()
    assert mode.changed > 0
    assert (found.shape, found.dtype, found.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_it_is_another_order() -> None:
    with torch.no_grad(), Reordered():
        found = [ADDING[name]() for name in ("matmul", "convolution", "transposed", "sum", "layer norm", "attention")]
    wanted = [ADDING[name]() for name in ("matmul", "convolution", "transposed", "sum", "layer norm", "attention")]
    assert not any(map(torch.equal, found, wanted))


def test_half_precision_is_added_up_in_fp32_and_rounded_once() -> None:
    many = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    with torch.no_grad(), Reordered():
        assert float(many.sum()) == float(torch.dot(many, many)) == 4096.0


def test_recurrent_layers_are_reordered_step_by_step() -> None:
    layer, given = nn.LSTM(65, 8), M.unsqueeze(1)
    with torch.no_grad(), step_by_step(layer), Reordered() as mode:
        found = layer(given)[0]
    with torch.no_grad():
        torch.testing.assert_close(found, layer(given)[0], rtol=1e-4, atol=1e-5)
    assert mode.changed > len(given)


def test_what_adds_nothing_up_is_as_it_was() -> None:
    integers = torch.arange(64)
    with torch.no_grad(), Reordered() as mode:
        found = [X.relu(), X.amax(1), F.max_pool2d(X, 2), integers.sum(), X[:, :1].sum(1)]
    assert mode.changed == 0
    wanted = [X.relu(), X.amax(1), F.max_pool2d(X, 2), integers.sum(), X[:, :1].sum(1)]
    assert all(map(torch.equal, found, wanted))


SIZES = """
import torch
batch_size, dim = 128, 768
N = 2048 * 2
SHAPE = (4096,)
heads = 12
EPS = 1e-5
NAME = "é 4096"
def get_inputs():
    return [torch.rand(batch_size, 224, 8), torch.rand(N)]  # é
def other():
    return 1000
"""


def test_names_and_inputs_are_cut_and_nothing_else() -> None:
    assert cut(SIZES, halved(64)) == (
        SIZES.replace("128, 768", "(64, 48)").replace("2048 * 2", "64").replace("(4096,)", "(64,)").replace("224", "56")
    )
    assert cut(SIZES, clipped(2), makers=False, only=re.compile("batch")) == SIZES.replace("128, 768", "(2, 2)")


def test_each_way_to_cut_comes_once_and_what_is_small_or_no_python_has_none() -> None:
    found = [text for _, text in cuts(SIZES, 64)]
    assert len(found) == len({*found, SIZES}) - 1 > 3
    assert not [*cuts("heads = 2", 64)]
    assert not [*cuts("def f(:", 64)]


def problem(forward: str, init: str = "pass", inputs: str = "torch.randn(64, SIZE)") -> str:
    return f"""
import torch

SIZE = 1 << 12

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(SIZE, 8)
        {init}

    def forward(self, x):
        return {forward}

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
"""


PROBLEMS = {
    "right": problem("self.linear(x).relu()"),
    "element by element": problem("x.relu()"),
    "other weights": problem("self.linear(x) * self.k", init="self.k = 2 if __name__ == 'candidate' else 3"),
    "random": problem("self.linear(x) + torch.randn_like(x[:, :8])"),
    "fails": problem("self.linear(x)", inputs="1 / 0"),
    "fails here": problem("self.linear(x) if __name__ == 'candidate' else 1 / 0"),
    "no problem": "print('hello')\n",
}


@pytest.mark.long
def test_each_problem_is_a_row_and_a_bad_one_is_no_exception(tmp_path: Path) -> None:
    for name, text in PROBLEMS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "problem.py").write_text(text)
    (tmp_path / "right again").mkdir()
    (tmp_path / "right again" / "problem.py").write_text(PROBLEMS["right"])
    out = tmp_path / "rows.jsonl"
    found = second(problems=tmp_path, ways=("eager", "reordered", "tf32_off"), cut=64, out=out)
    rows = rows_of(out)
    assert {name.removesuffix(" reordered"): row["state"] for name, row in rows.items() if "reordered" in name} == {
        "right": "right", "element by element": "right", "other weights": "wrong", "random": "problem",
        "fails": "problem", "fails here": "failed", "no problem": "problem",
    }  # fmt: skip
    assert (found["ok"], found["asked"], found["left_out"], found["unchanged"]) == (False, 14, ["tf32_off"], 1)
    assert rows["right eager"]["sets"] == rows["right reordered"]["sets"] == rows["right reordered"]["changed"] == 10
    assert {name.partition(" ")[2] for name in found["wrong"]["other weights eager"]} >= {"nominal", "large", "graded"}
    assert re.search(r"off by .* where .* is allowed", found["wrong"]["other weights eager"]["0 nominal"])
    assert rows["right eager"]["kinds"]["nominal"] == 2
    assert "random" in found["not_tried"]["random eager"]
    assert "ZeroDivisionError" in found["not_tried"]["fails here reordered"]


@pytest.mark.long
def test_what_torch_compiles_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(problem("self.linear(x).relu().softmax(1)"))
    found = second(problems=tmp_path, ways=("compiled",), cut=64, out=tmp_path / "rows.jsonl")
    row = rows_of(tmp_path / "rows.jsonl")[f"{tmp_path.name}/one compiled"]
    assert (found["ok"], row["state"], row["sets"]) == (True, "right", 10), row
    assert row["changed"] > 0


def test_problems_are_measured_without_memory_for_their_inputs(tmp_path: Path) -> None:
    whole = problem("x", inputs="torch.randn(1 << 40)")
    (tmp_path / "large.py").write_text(whole)
    (tmp_path / "fails.py").write_text(PROBLEMS["fails"])
    assert input_bytes(tmp_path / "large.py") == 4 << 40 < input_bytes(tmp_path / "fails.py")
