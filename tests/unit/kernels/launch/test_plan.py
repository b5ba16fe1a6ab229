"""Launch plans: read as data, checked, and run without any Python of the candidate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kbrl_async.kernels.backends.launch import plan_module as plan
from kbrl_async.kernels.backends.launch.plan import PlanError

SOURCE = """
void scale(const float *x, float *y, long n, float factor) { for (long i = 0; i < n; i++) y[i] = x[i] * factor; }
void add_row(const float *y, const float *row, float *z, long rows, long cols) {
    for (long i = 0; i < rows * cols; i++) z[i] = y[i] + row[i % cols];
}
"""
PLAN = f"""
"A plan."
SOURCE = {SOURCE!r}
PLAN = {{
    "inputs": ["x"],
    "init": ["factor"],
    "sizes": {{"rows": "x.shape[0]", "cols": "x.shape[1]", "n": "rows * cols"}},
    "kernels": {{"scale": {{"source": SOURCE}}, "shift": {{"source": SOURCE, "name": "add_row"}}}},
    "buffers": {{"y": {{"shape": ["n"]}}, "z": {{"shape": ["rows", "cols"]}}}},
    "steps": [
        {{"kernel": "scale", "args": ["x", "y", "n", "factor * 2"]}},
        {{"kernel": "shift", "args": ["y", "param:linear.bias", "z", "rows", "cols"]}},
    ],
    "outputs": ["z"],
}}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder: Path = tmp_path_factory.getbasetemp() / "kernels"  # one for all tests: each kernel is compiled once
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def made(text: str = PLAN, *init: float) -> plan.PlanModule:
    loaded = plan.load(text)
    assert loaded is not None
    module = loaded.ModelNew(*(init or (1.5,)))
    module.take_weights({"linear.bias": torch.tensor([1.0, 2.0, 3.0])})
    return module


def test_a_plan_computes_what_its_steps_say() -> None:
    module, bias = made(), torch.tensor([1.0, 2.0, 3.0])
    for rows in (2, 5, 2):
        x = torch.randn(rows, 3)
        assert torch.equal(module(x), x * 3 + bias)


def test_outputs_are_new_in_each_call() -> None:
    module, x = made(), torch.randn(2, 3)
    first = module(x)
    kept = first.clone()
    module(x + 1)
    assert torch.equal(first, kept)


def test_inputs_need_not_be_contiguous() -> None:
    x = torch.randn(3, 2).t()
    assert torch.equal(made()(x), x * 3 + torch.tensor([1.0, 2.0, 3.0]))


def test_a_module_is_no_plan_and_a_plan_is_not_executed(tmp_path: Path) -> None:
    assert plan.load("PLAN = {}\nclass ModelNew: pass") is None
    assert plan.load("x = 'PLAN'") is None
    touched = tmp_path / "touched"
    hostile = PLAN.replace('"A plan."', f"open({str(touched)!r}, 'w')")
    with pytest.raises(PlanError, match="nothing but NAME = literal"):
        plan.load(hostile)
    assert not touched.exists()


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('"inputs": ["x"]', '"inputs": ["x", "x"]', "given twice"),
        ('"inputs": ["x"]', '"inputs": [__import__("os")]', "no literal"),
        ('"inputs": ["x"]', '"imputs": ["x"]', "imputs|inputs"),
        ('"kernel": "scale"', '"kernel": "other"', "no kernel of the plan"),
        ('"outputs": ["z"]', '"outputs": ["w"]', "no buffer"),
        ('"shape": ["n"]', '"shape": ["n"], "dtype": "complex64"', "complex64"),
        ("factor * 2", "factor ** 2", "only numbers"),
        ('"A plan."', "import os", "line 2"),
        ('"A plan."', "def f(): pass", "line 2"),
        ("SOURCE, ", '"__global__ void f() {}", ', "of C and of CUDA"),
        ('"A plan."', "def", "syntax"),
    ],
)
def test_what_can_not_run_is_named(old: str, new: str, error: str) -> None:
    assert old in PLAN
    with pytest.raises(PlanError, match=error):
        plan.read(PLAN.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("param:linear.bias", "param:linear.wait", "no parameter 'linear.wait'"),
        ('"n": "rows * cols"', '"n": "rows * columns"', "'columns'"),
        ('"shape": ["n"]', '"shape": ["n - 100"]', "whole numbers"),
        ('"shape": ["n"]', '"shape": ["n * 100000000000"]', "bytes"),
    ],
)
def test_what_a_shape_shows_to_be_wrong_is_named(old: str, new: str, error: str) -> None:
    assert old in PLAN
    with pytest.raises(PlanError, match=error):
        made(PLAN.replace(old, new, 1))(torch.randn(2, 3))


def test_missing_arguments_are_named() -> None:
    loaded = plan.load(PLAN)
    assert loaded is not None
    with pytest.raises(PlanError, match="1 constructor arguments, there are 0"):
        loaded.ModelNew()
    with pytest.raises(PlanError, match="1 inputs, forward got 2"):
        made()(torch.randn(2, 3), 1)
