"""Honest candidates in many styles pass check, build and bench; a defence that fails one of them is a bug."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.verify import Bench
from protocols.records import Candidate, Fault, Problem, Verdict
from tests.unit.kernels.verify.honest_problems import SOFTMAX
from tests.unit.kernels.verify.honest_styles import STYLES, rows, softmax
from tests.unit.kernels.verify.honest_unusual import UNUSUAL

Judge = Callable[[str, str], Verdict]


@pytest.fixture(scope="module")
def judge(bench: Bench, builder: Builder) -> Judge:
    def run(problem: str, source: str) -> Verdict:
        candidate = Candidate(source, "c")
        report = builder.build(candidate)
        assert report.fault is Fault.OK, report.message
        paths = {key: builder.store.path(address) for key, address in report.artifacts.items()}
        assert None not in paths.values()
        return bench.evaluate(Problem("L1/02_honest", 1, "honest", problem), candidate, paths, timing=False).verdict

    return run


def test_there_are_enough_of_them() -> None:
    assert len(STYLES) >= 60
    assert len(UNUSUAL) >= 50


@pytest.mark.parametrize("style", STYLES | UNUSUAL)
def test_honest_styles_pass(judge: Judge, style: str) -> None:
    problem, source = (STYLES | UNUSUAL)[style]
    verdict = judge(problem, source)
    assert verdict.fault is Fault.OK, f"{verdict.rule}: {verdict.message} ({verdict.evidence})"
    assert "own kernels: " in verdict.evidence
    assert verdict.kernelbench is True
    assert verdict.tolerance_note


def test_a_wrong_kernel_is_told_where_and_how_much(judge: Judge) -> None:
    verdict = judge(SOFTMAX, softmax(rows().replace("long r = 0", "long r = 1")))
    assert verdict.fault is Fault.INCORRECT
    assert "of 804 values are wrong" in verdict.message
    assert verdict.max_abs_error is not None
    assert verdict.hint
    assert verdict.kernelbench is False
