"""Problems that ask for gradients: compared under secret upstream gradients, proven in the backward."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any
from unittest.mock import Mock

import pytest

from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.funnel.build import artifact_paths
from kbrl_async.kernels.verify import Bench
from kbrl_async.kernels.verify.cpu.replay import CpuReplaySession
from protocols.records import REPLAYED, BenchReport, Candidate, Fault, Problem

Evaluate = Callable[..., BenchReport]
PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(33))

    def forward(self, x):
        return torch.tanh(x) * self.gain

BACKWARD = "inputs"

def get_inputs():
    return [torch.randn(16, 33)]

def get_init_inputs():
    return []
"""
RIGHT = '''
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

FORWARD = """
#include <math.h>
void forward(const float *x, const float *w, float *t, float *y, long rows, long n) {
  for (long r = 0; r < rows; r++) for (long i = 0; i < n; i++) {
    t[r * n + i] = tanhf(x[r * n + i]); y[r * n + i] = t[r * n + i] * w[i];
  }
}
"""
BACKWARD = """
void backward(const float *t, const float *w, const float *g, float *d, long rows, long n) {
  for (long r = 0; r < rows; r++) for (long i = 0; i < n; i++)
    d[r * n + i] = w[i] * g[r * n + i] * (1.0f - t[r * n + i] * t[r * n + i]);
}
"""
go, back = c_kernel(FORWARD, "forward"), c_kernel(BACKWARD, "backward")

class Gained(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        t, y = torch.empty_like(x), torch.empty_like(x)
        go(x, w, t, y, x.shape[0], x.shape[1])
        ctx.save_for_backward(t, w)
        return y

    @staticmethod
    def backward(ctx, g):
        t, w = ctx.saved_tensors
        g = g.contiguous()
        d = torch.empty_like(g)
        back(t, w, g, d, g.shape[0], g.shape[1])
        return d, GAIN

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(33))

    def forward(self, x):
        return Gained.apply(x, self.gain)
'''.replace("GAIN", "(g * t).sum(0)")
IN_TORCH = RIGHT.replace("back(t, w, g, d, g.shape[0], g.shape[1])", "d = w * g * (1 - t * t)")
DECOY = RIGHT.replace(
    "back(t, w, g, d, g.shape[0], g.shape[1])",
    "back(t, w, g, torch.empty_like(g), g.shape[0], g.shape[1]); d = w * g * (1 - t * t)",
)
WRONG = RIGHT.replace("(1.0f -", "(1.01f -")


@pytest.fixture
def judged(bench: Bench, builder: Builder) -> Evaluate:
    def run(source: str, wanted: str = "inputs", **more: Any) -> BenchReport:
        candidate = Candidate(source, "c")
        paths = artifact_paths(builder.store, builder.build(candidate))
        problem = PROBLEM.replace('"inputs"', f'"{wanted}"')
        return bench.evaluate(Problem("L5/01_a", 5, "a", problem), candidate, paths, **more)

    return run


def test_outputs_and_gradients_are_right_and_both_passes_are_timed(judged: Evaluate) -> None:
    report = judged(RIGHT)
    assert report.verdict.fault is Fault.OK, report.verdict.message
    assert report.verdict.trust == REPLAYED
    assert report.timing is not None
    both, forward, *rest = report.timing.workloads
    assert (both.name, both.weight, forward.name, forward.weight) == ("nominal", 1.0, "nominal forward", 0.0)
    assert report.timing.speedup == pytest.approx(both.speedup)
    assert [one.name for one in rest] in ([], ["nominal backward"])


@pytest.mark.parametrize("wanted", ["parameters", "all"])
def test_gradients_of_parameters_are_compared_too(judged: Evaluate, wanted: str) -> None:
    assert judged(RIGHT, wanted, timing=False).verdict.fault is Fault.OK or wanted == "parameters"
    verdict = judged(RIGHT.replace("(g * t).sum(0)", "(g * t).sum(0) * 1.01"), wanted, timing=False).verdict
    assert verdict.fault is Fault.INCORRECT


def test_a_wrong_gradient_is_wrong(judged: Evaluate) -> None:
    assert judged(WRONG, timing=False).verdict.fault is Fault.INCORRECT


@pytest.mark.parametrize(
    ("source", "rule", "words"),
    [
        (IN_TORCH, "no_own_kernel", "no own kernel takes part in the backward"),
        (DECOY, "decoy_kernel", "kernels of the backward switched off"),
    ],
)
def test_a_backward_by_the_library_is_no_work_of_its_own(judged: Evaluate, source: str, rule: str, words: str) -> None:
    verdict = judged(source, timing=False).verdict
    assert (verdict.fault, verdict.rule) == (Fault.CHEATING, rule)
    assert words in verdict.message


@pytest.mark.parametrize("starts", [True, False])
def test_who_forges_only_without_its_backward_is_no_fault_of_the_hosts(
    judged: Evaluate, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    """Its forward's kernels are loaded there, and run in a process that is not the one that was checked."""
    honest = CpuReplaySession.without_backward

    def forged(self: CpuReplaySession, upstream: Collection[int]) -> CpuReplaySession | None:
        session = honest(self, upstream)
        assert session is not None
        if not starts:
            session.close()
            raise session.forged()
        monkeypatch.setattr(session, "call", Mock(side_effect=session.forged()))
        return session

    monkeypatch.setattr(CpuReplaySession, "without_backward", forged)
    verdict = judged(RIGHT, timing=False).verdict
    assert (verdict.fault, verdict.rule) == (Fault.CHEATING, "forged_result")


def test_a_forward_without_gradients_is_told_what_is_missing(judged: Evaluate) -> None:
    verdict = judged(
        RIGHT.replace(
            "Gained.apply(x, self.gain)", "Gained.forward(type('C', (), {'save_for_backward': print}), x, self.gain)"
        ),
        timing=False,
    ).verdict
    assert verdict.fault is Fault.RUNTIME_ERROR
    assert "within a torch.autograd.Function" in verdict.message
