"""In a run, sanitizers look at a share of correct kernels and at every new best one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kbrl_async.errors import InfraError
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.sanitize.parts import Sanitized
from kbrl_async.kernels.backends.sanitize.sanitize import Sanitizer, SanitizerFinding
from kbrl_async.kernels.funnel import SpotChecks, Verifier
from kbrl_async.kernels.funnel.verifier import VerifyOptions
from protocols.records import BenchReport, Candidate, Fault, Problem, Verdict
from tests.records import timing
from tests.unit.kernels.funnel.conftest import QUICK, kernel

FINDING = SanitizerFinding("sanitizer:heap-buffer-overflow", "write of 4 bytes", "line 5")
CANDIDATE = Candidate("", "c")


def report(lo: float, fault: Fault = Fault.OK) -> BenchReport:
    return BenchReport(Verdict(fault), timing(lo + 0.1))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Sanitized | Exception]:
    """What sanitizers will say, first to last; then nothing."""
    said: list[Sanitized | Exception] = []

    def run(*_: object) -> Sanitized:
        answer = said.pop(0) if said else Sanitized(ran=("asan",))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(Sanitizer, "run", run)
    return said


def checks(tmp_path: Path, share: float) -> SpotChecks:
    return SpotChecks(Sanitizer(ArtifactStore(tmp_path)), share, random.Random(0))


@pytest.mark.usefixtures("runs")
def test_every_new_best_kernel_is_checked_and_a_share_of_the_others(tmp_path: Path, problem: Problem) -> None:
    spot = checks(tmp_path, 1e-9)
    for lo, total in ((1.0, 1), (0.9, 1), (1.5, 2), (1.5, 2)):
        spot.check(problem, CANDIDATE, {}, report(lo))
        assert spot.checked == total
    often = checks(tmp_path, 0.5)
    for _ in range(200):
        often.check(problem, CANDIDATE, {}, report(0.1))
    assert 60 < often.checked < 140


@pytest.mark.usefixtures("runs")
def test_nothing_is_checked_unless_asked_and_never_a_wrong_kernel(tmp_path: Path, problem: Problem) -> None:
    off, on = checks(tmp_path, 0.0), checks(tmp_path, 1.0)
    off.check(problem, CANDIDATE, {}, report(9.0))
    on.check(problem, CANDIDATE, {}, report(9.0, Fault.INCORRECT))
    assert (off.checked, on.checked) == (0, 0)


def test_a_finding_takes_the_verdict_and_the_timing(
    tmp_path: Path, problem: Problem, runs: list[Sanitized | Exception]
) -> None:
    runs.append(Sanitized((FINDING,), ("asan",)))
    spot = checks(tmp_path, 1.0)
    found = spot.check(problem, CANDIDATE, {}, report(2.0))
    assert (found.verdict.fault, found.verdict.rule, found.timing) == (Fault.ILLEGAL_ACCESS, FINDING.rule, None)
    assert (spot.found, found.stages[-1].name) == (1, "sanitize")


def test_a_sanitizer_that_fails_costs_no_verdict(
    tmp_path: Path, problem: Problem, runs: list[Sanitized | Exception]
) -> None:
    runs.append(InfraError("lost"))
    spot = checks(tmp_path, 1.0)
    assert spot.check(problem, CANDIDATE, {}, report(2.0)) == report(2.0)
    assert (spot.checked, spot.failed) == (0, 1)


def test_one_element_too_far_passes_without_and_fails_with_sanitizers(problem: Problem, verifier: Verifier) -> None:
    hidden = kernel(extra="y[n] = 0;")
    assert verifier.verify(problem, hidden, timing=False).ok
    options = VerifyOptions(timing=False, sanitize=True, bench=QUICK.bench)
    with Verifier("cpu", options) as strict:
        result = strict.verify(problem, hidden)
        assert (result.fault, result.verdict.rule) == (Fault.ILLEGAL_ACCESS, "sanitizer:heap-buffer-overflow")
        assert result.stages[-1].name == "sanitize"
        assert strict.verify(problem, kernel()).sanitizers == ("asan", "ubsan")
