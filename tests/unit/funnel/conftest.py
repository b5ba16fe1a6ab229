"""One verifier for all tests of this folder: starting torch takes a second."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kbrl_async.funnel import Verifier, VerifyOptions
from kbrl_async.problems import parse_problem
from kbrl_async.timing import Recipe
from kbrl_async.verifying import BenchOptions
from protocols.records import Problem

PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return x * 2 + 1

def get_inputs():
    return [torch.randn(16, 33)]

def get_init_inputs():
    return []
"""

KERNEL = '''
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

SOURCE = r"""
void f(const float *x, float *y, long n) {
  for (long i = 0; i < n; i++) y[i] = BODY;
  EXTRA
}
"""

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = c_kernel(SOURCE, "f")

    def forward(self, x):
        y = torch.empty_like(x)
        self.kernel(x, y, x.numel())
        return y
'''


def kernel(body: str = "2 * x[i] + 1", extra: str = "") -> str:
    return KERNEL.replace("BODY", body).replace("EXTRA", extra)


QUICK = VerifyOptions(
    bench=BenchOptions(deadline_s=10.0, call_floor_s=1.0, recipe=Recipe(min_pairs=4, max_pairs=6, cap_s=0.2))
)


@pytest.fixture(scope="session")
def problem() -> Problem:
    return parse_problem(PROBLEM, "L1/01_double")


@pytest.fixture(scope="session")
def verifier() -> Iterator[Verifier]:
    with Verifier("cpu", QUICK) as started:
        yield started
