"""Products in fp8 and weights of four bits on a GPU, under the rules `open`: right where a problem's inputs are so or
it gives leave, else wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kbrl_async.kernels.funnel import Verifier, VerifyOptions
from kbrl_async.kernels.funnel.verifier import under
from kbrl_async.kernels.problems import parse_problem
from protocols.records import Candidate, Fault, Verdict
from tests.gpu.low_precision_candidates import (
    FP8_LINEAR,
    FP8_SCALED,
    INT4_LINEAR,
    INT4_PACKED,
    LINEAR,
    PACKED,
    SCALED,
    declaring,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier("cuda:0", under(VerifyOptions(timing=False), "open")) as started:
        yield started


def judged(verifier: Verifier, problem: str, source: str) -> Verdict:
    found = verifier.verify(parse_problem(problem, "L1/01_product"), Candidate(source, "triton")).verdict
    assert found is not None
    return found


RIGHT = {
    "fp8 inputs": (SCALED, FP8_SCALED),
    "int4 inputs": (PACKED, INT4_PACKED),
    "fp8 with leave": (declaring(LINEAR, "float8_e4m3fn"), FP8_LINEAR),
    "int4 with leave": (declaring(LINEAR, "int4"), INT4_LINEAR),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_the_problem_takes_is_right(verifier: Verifier, name: str) -> None:
    verdict = judged(verifier, *RIGHT[name])
    assert (verdict.fault, verdict.rules) == (Fault.OK, "open"), verdict


WRONG = {
    "fp8 without leave": (LINEAR, FP8_LINEAR),
    "int4 without leave": (LINEAR, INT4_LINEAR),
    "int4 where fp8 is allowed": (declaring(LINEAR, "float8_e4m3fn"), INT4_LINEAR),
    "half of the products of fp8 inputs": (SCALED, FP8_SCALED.replace("range(0, K, BLOCK)", "range(0, K // 2, BLOCK)")),
    "low halves of bytes alone": (PACKED, INT4_PACKED.replace("(at % 2) * 4", "(at % 2) * 0")),
    "half of the products, with leave for int4": (
        declaring(LINEAR, "int4"),
        INT4_LINEAR.replace("range(0, K, BLOCK)", "range(0, K // 2, BLOCK)"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_it_does_not_take_is_wrong(verifier: Verifier, name: str) -> None:
    verdict = judged(verifier, *WRONG[name])
    assert verdict.fault is Fault.INCORRECT, verdict
