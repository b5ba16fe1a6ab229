"""Launch plans of backend `c` are built, run and judged like any candidate, without any Python of theirs."""

from __future__ import annotations

import pytest

from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.verify import Bench
from protocols.records import BenchReport, Candidate, Fault, Problem

PROBLEM = """
import torch
import torch.nn as nn
class Model(nn.Module):
    def __init__(self, features, slope):
        super().__init__()
        self.linear = nn.Linear(features, 5)
        self.slope = slope
    def forward(self, x):
        return torch.nn.functional.leaky_relu(self.linear(x), self.slope)
def get_inputs():
    return [torch.randn(9, 7)]
def get_init_inputs():
    return [7, 0.1]
"""
PLAN = '''
SOURCE = r"""
void linear(const float *x, const float *w, const float *b, float *y, long rows, long k, long n, float slope) {
    for (long r = 0; r < rows; r++)
        for (long j = 0; j < n; j++) {
            float s = b[j];
            for (long i = 0; i < k; i++) s += x[r * k + i] * w[j * k + i];
            y[r * n + j] = s > 0 ? s : s * slope;
        }
}
"""
PLAN = {
    "inputs": ["x"],
    "init": ["features", "slope"],
    "kernels": {"linear": {"source": SOURCE}},
    "sizes": {"rows": "x.shape[0]", "n": 5},
    "buffers": {"y": {"shape": ["rows", "n"]}},
    "steps": [{
        "kernel": "linear",
        "args": ["x", "param:linear.weight", "param:linear.bias", "y", "rows", "features", "n", "slope"],
    }],
    "outputs": ["y"],
}
'''


def judge(builder: Builder, bench: Bench, source: str, timing: bool = False) -> BenchReport:
    problem, candidate = Problem("L1/01_plan", 1, "plan", PROBLEM), Candidate(source, "c")
    report = builder.build(candidate, problem)
    assert report.fault is Fault.OK, report
    paths = {key: builder.store.path(address) for key, address in report.artifacts.items()}
    return bench.evaluate(problem, candidate, paths, timing=timing)  # type: ignore[arg-type]


def test_a_right_plan_passes_with_the_references_weights_and_is_timed(builder: Builder, bench: Bench) -> None:
    report = judge(builder, bench, PLAN, timing=True)
    assert report.verdict.fault is Fault.OK, report.verdict
    assert report.timing is not None


@pytest.mark.parametrize(
    ("old", "new", "fault", "message"),
    [
        ('"slope"],\n    }', '"slope * 2"],\n    }', Fault.INCORRECT, "wrong"),
        ('"shape": ["rows", "n"]', '"shape": ["n", "rows"]', Fault.INCORRECT, "shape"),
        ("x[r * k + i] *", "x[r * k + i + 100000000000] *", Fault.ILLEGAL_ACCESS, "memory"),
        ("param:linear.bias", "param:bias", Fault.RUNTIME_ERROR, "no parameter 'bias'"),
        ("for (long r = 0;", "for (;;) for (long r = 0;", Fault.TIMEOUT, "no result"),
    ],
)
def test_what_is_wrong_with_a_plan_is_named(
    builder: Builder, bench: Bench, old: str, new: str, fault: Fault, message: str
) -> None:
    assert old in PLAN
    verdict = judge(builder, bench, PLAN.replace(old, new)).verdict
    assert verdict.fault is fault, verdict
    assert message in verdict.message
