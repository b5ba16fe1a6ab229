"""A verifier under the rules `open`, as `kbrl verify` has it, but brief."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kbrl_async.kernels.funnel import Verifier, VerifyOptions
from kbrl_async.kernels.funnel.verifier import under
from kbrl_async.kernels.problems import parse_problem
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import bench_options
from protocols.records import Problem
from tests.candidates import affine

_BENCH = bench_options(TimingBench(deadline_s=10.0), call_floor_s=1.0)


@pytest.fixture(scope="session")
def problem() -> Problem:
    """`2 * x + 1`."""
    return parse_problem(affine(), "L1/01_double")


@pytest.fixture(scope="session")
def free() -> Iterator[Verifier]:
    with Verifier("cpu", under(VerifyOptions(timing=False, bench=_BENCH), "open")) as started:
        yield started


@pytest.fixture(scope="session")
def strict() -> Iterator[Verifier]:
    with Verifier("cpu", under(VerifyOptions(timing=False, bench=_BENCH), "strict")) as started:
        yield started
