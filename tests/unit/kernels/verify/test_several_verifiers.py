"""On a device that several verifiers share a call takes as much longer as there are: no verdict hangs on neighbours."""

from __future__ import annotations

import contextlib

import pytest

from kbrl_async.kernels.problems import parse_problem
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify.bench import Bench
from kbrl_async.kernels.verify.cpu.device import CpuDevice
from kbrl_async.kernels.verify.options import bench_options
from protocols.records import Candidate, Fault

PROBLEM = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x)

def get_inputs():
    return [torch.randn(16, 8)]

def get_init_inputs():
    return []
"""
SLOW = """
import time

class ModelNew(Model):
    def forward(self, x):
        end = time.process_time() + .3
        while time.process_time() < end:
            pass
        return torch.tanh(x)
"""


@pytest.mark.parametrize(("verifiers", "fault"), [(1, Fault.TIMEOUT), (20, Fault.OK)])
def test_a_call_may_take_longer_where_others_are_on_the_device(
    zygote: Zygote, monkeypatch: pytest.MonkeyPatch, verifiers: int, fault: Fault
) -> None:
    monkeypatch.setattr(CpuDevice, "verifiers", verifiers)
    options = bench_options(TimingBench(deadline_s=10.0), call_floor_s=0.15, replay=False)
    with contextlib.closing(Bench(zygote, options)) as bench:
        problem = parse_problem(PROBLEM, "L1/19_tanh")
        found = bench.evaluate(problem, Candidate(PROBLEM + SLOW, "torch"), {}, timing=False)
    assert found.verdict.fault is fault, found.verdict
