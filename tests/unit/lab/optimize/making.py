"""Attempts, judgements and results for tests."""

from __future__ import annotations

from kbrl_async.kernels.funnel import Result
from kbrl_async.lab.optimize.tree import Judgement
from protocols.records import Fault, Problem, StageReport, Timing, Verdict

SOURCE = """\
import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)


def get_inputs():
    return [torch.randn(8, 8)]


def get_init_inputs():
    return []
"""
PROBLEM = Problem("L0/my_module", 0, "my_module", SOURCE)


def right(lo: float) -> Judgement:
    category = "fast" if lo > 1 else "slow"
    return Judgement(Fault.OK, category, passed=10, total=10, speedup=lo * 1.1, lo=lo, hi=lo * 1.2)


def wrong(category: str = "mismatch", passed: int = 0) -> Judgement:
    faults = {"mismatch": Fault.INCORRECT, "compile": Fault.COMPILE_ERROR, "cheating": Fault.CHEATING}
    total = 10 if category == "mismatch" else 0
    return Judgement(faults[category], category, passed=passed, total=total, message="no")


def result(fault: Fault = Fault.OK, lo: float = 2.0) -> Result:
    verdict = Verdict(fault, passed=10, total=10, message="" if fault is Fault.OK else "values differ")
    timing = Timing(20, lo * 1.1, lo, lo * 1.2, 1.0, lo * 1.1, hardware="a CPU") if fault is Fault.OK else None
    return Result("L0/my_module", "c", "cpu", verdict, (StageReport("timing", fault, 0.1),), timing)
