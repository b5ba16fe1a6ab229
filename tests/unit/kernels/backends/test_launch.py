"""Launching C kernels outside a sandbox, as a person with a won kernel does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from kbrl_async.errors import MissingTool
from kbrl_async.kernels.backends.c.launch import parameters
from kbrl_async.launch import c_kernel

SOURCE = """
void scale(const float *x, float *y, long n, float factor) { for (long i = 0; i < n; i++) y[i] = x[i] * factor; }
void wide(double *y, double value, int n) { for (int i = 0; i < n; i++) y[i] = value; }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_kernel_is_compiled_on_demand_and_runs() -> None:
    x, y = torch.randn(7), torch.empty(7)
    c_kernel(SOURCE, "scale")(x, y, 7, 2.5)
    assert torch.equal(y, x * 2.5)


def test_declared_doubles_and_ints_are_passed_as_such() -> None:
    y = torch.empty(3, dtype=torch.float64)
    c_kernel(SOURCE, "wide")(y, 0.1, 3)
    assert torch.equal(y, torch.full((3,), 0.1, dtype=torch.float64))


def test_a_launch_costs_few_microseconds() -> None:
    kernel, x = c_kernel(SOURCE, "scale"), torch.zeros(1)
    kernel(x, x, 1, 1.0)
    best = min(_time_of(lambda: kernel(x, x, 1, 1.0)) for _ in range(20))
    assert best < 15e-6  # about 2 µs on a quiet core


def _time_of(call: object) -> float:
    assert callable(call)
    begin = time.thread_time()  # others may have the core
    for _ in range(50):
        call()
    return (time.thread_time() - begin) / 50


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((torch.zeros(4, 4).t(), torch.zeros(16), 16, 1.0), "contiguous"),
        ((torch.zeros(4, device="meta"), torch.zeros(4), 4, 1.0), "CPU"),
        ((torch.zeros(4), torch.zeros(4), 4), "takes 4 arguments"),
        ((torch.zeros(4), torch.zeros(4), 4.5, 1.0), "argument 2"),
        ((4, torch.zeros(4), 4, 1.0), "argument 0 must be a tensor"),
        ((torch.zeros(4), torch.zeros(4), torch.zeros(1), 1.0), "no pointer"),
        ((torch.zeros(4), torch.zeros(4), 4, "x"), "argument 3"),
    ],
)
def test_wrong_arguments_are_named(args: tuple[object, ...], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        c_kernel(SOURCE, "scale")(*args)  # type: ignore[arg-type]


def test_an_undefined_function_is_named() -> None:
    with pytest.raises(ValueError, match="nothing"):
        c_kernel(SOURCE, "nothing")


def test_without_a_compiler_the_cure_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingTool, match="apt-get install gcc"):
        c_kernel(SOURCE, "scale")


def test_parameters_are_parsed_past_comments() -> None:
    assert parameters("void f(const float *x, // in\n long n) {}", "f") == ["const float *x", "long n"]
    assert parameters("void f(void) {}", "f") == []
    assert parameters("void f(long n);", "f") is None
