"""What a bench takes over from a verifier, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.funnel.build import artifact_paths
from kbrl_async.kernels.verify import Bench
from kbrl_async.kernels.verify.checks import Checker
from kbrl_async.kernels.verify.cpu.own_kernels import OwnKernels
from protocols.records import BenchReport, Candidate, Fault, Problem, Verdict
from tests.candidates import affine, elementwise

PROBLEM = Problem("L1/01_affine", 1, "affine", affine())
RIGHT, WRONG = (Candidate(elementwise(f"2 * x[i] + {offset}"), "c") for offset in (1, 2))
Judge = Callable[..., tuple[BenchReport, str, int]]


@pytest.fixture
def judge(bench: Bench, builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """A report, what was said of its input sets, and how many proofs were asked for."""
    proofs: list[OwnKernels] = []
    honest = OwnKernels.prove

    def counted(self: OwnKernels) -> None:
        proofs.append(self)
        honest(self)

    monkeypatch.setattr(OwnKernels, "prove", counted)

    def run(candidate: Candidate, verified: BenchReport | None = None) -> tuple[BenchReport, str, int]:
        built = builder.build(candidate, PROBLEM)
        proofs.clear()
        paths = artifact_paths(builder.store, built)
        found = bench.evaluate(PROBLEM, candidate, paths, timing=False, verified=verified)
        said = next((stage.detail for stage in found.stages if stage.name == "full_inputs"), "")
        return found, said.partition(";")[0], len(proofs)

    return run


def test_what_a_verifier_has_found_of_the_same_steps_is_taken_over(judge: Judge) -> None:
    first, said, proofs = judge(RIGHT)
    assert (first.verdict.fault, said, proofs) == (Fault.OK, "10 of 10 secret input sets", 1)
    assert first.plan
    told = msgspec.structs.replace(first, verdict=msgspec.structs.replace(first.verdict, evidence="the verifier's"))
    again, said, proofs = judge(RIGHT, told)
    assert (said, proofs) == ("2 of 2 secret input sets", 1)
    assert (again.verdict, again.plan) == (told.verdict, first.plan)


@pytest.mark.parametrize("plan", ["", "0" * 64])
def test_of_other_steps_or_none_everything_is_found_out_here(judge: Judge, plan: str) -> None:
    told = BenchReport(Verdict(Fault.OK, 99, 99), plan=plan)
    found, said, proofs = judge(RIGHT, told)
    assert (found.verdict.passed, said, proofs) == (10, "10 of 10 secret input sets", 1)


def test_a_wrong_candidate_is_wrong_whatever_a_verifier_says_of_it(judge: Judge, bench: Bench) -> None:
    right, _, _ = judge(RIGHT)
    assert judge(WRONG, right)[0].verdict.fault is Fault.INCORRECT


def test_one_that_is_wrong_here_alone_is_wrong_though_its_steps_are_known(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if its recording had come out otherwise: another constant, the same steps."""
    monkeypatch.setattr(Checker, "is_known", property(lambda self: True))
    found, _, proofs = judge(WRONG, BenchReport(Verdict(Fault.OK, 10, 10), plan="0" * 64))
    assert (found.verdict.fault, proofs) == (Fault.INCORRECT, 0)
    assert found.verdict.total == 10


PRODUCT = Problem(
    "L1/02_product",
    1,
    "product",
    """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return x @ self.weight

def get_inputs():
    return [torch.randn(24, 64)]

def get_init_inputs():
    return []
""",
)
KERNEL = """
void f(const float *x, const float *w, const float *a, const float *flag, float *y, long n, long k, long m) {
  for (long i = 0; i < n; i++) for (long j = 0; j < m; j++) {
    float s = a[i * m + j];
    if (flag[0] == 0) { s = 0; for (long l = 0; l < k; l++) s += x[i * k + l] * w[l * m + j]; }
    y[i * m + j] = s;
  }
}
"""
EITHER = f"""
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

SOURCE = {KERNEL!r}

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.flag = torch.full((1,), FLAG)
        self.f = c_kernel(SOURCE, "f")

    def forward(self, x):
        a = (x * self.flag) @ self.weight
        y = torch.empty(24, 64)
        self.f(x, self.weight, a, self.flag, y, 24, 64, 64)
        return y
"""


def test_a_candidate_that_is_its_own_work_at_a_verifier_alone_is_a_decoy(
    bench: Bench, compile_raw: Callable[[str], dict[str, Path]]
) -> None:
    """The same steps, over memory that lasts and says otherwise: by chance, say, or by which GPU it is on."""

    def judged(flag: str, verified: BenchReport | None = None) -> BenchReport:
        candidate = Candidate(EITHER.replace("FLAG", flag), "c")
        return bench.evaluate(PRODUCT, candidate, compile_raw(KERNEL), timing=False, verified=verified)

    honest = judged("0.0")
    assert honest.verdict.fault is Fault.OK, honest.verdict
    assert honest.plan
    found = judged("1.0", honest).verdict
    assert (found.fault, found.rule) == (Fault.CHEATING, "decoy_kernel")
