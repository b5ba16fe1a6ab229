"""One verifier for all tests of this folder: starting torch takes a second."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kbrl_async.kernels.funnel import Verifier, VerifyOptions
from kbrl_async.kernels.problems import parse_problem
from kbrl_async.kernels.settings import CompileFarm, TimingBench
from kbrl_async.kernels.timing import Recipe
from kbrl_async.kernels.verify import bench_options
from protocols.records import Problem
from tests.candidates import affine, elementwise

PROBLEM = affine()


def kernel(body: str = "2 * x[i] + 1", extra: str = "") -> str:
    return elementwise(body, after=extra)


QUICK = VerifyOptions(
    farm=CompileFarm(nice=0, rules="strict"),
    bench=bench_options(
        TimingBench(deadline_s=10.0),
        call_floor_s=1.0,
        recipe=Recipe.of(TimingBench(min_pairs=4, max_pairs=6, cap_s=0.2)),
    ),
)


@pytest.fixture(scope="session")
def problem() -> Problem:
    return parse_problem(PROBLEM, "L1/01_double")


@pytest.fixture(scope="session")
def verifier() -> Iterator[Verifier]:
    with Verifier("cpu", QUICK) as started:
        yield started
