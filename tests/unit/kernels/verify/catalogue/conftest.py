"""The bench as the catalogue asks it: usually, afresh, in no time, and with no walls."""

from __future__ import annotations

import contextlib
import math
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kbrl_async.kernels.backends.c import launch
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.timing import Recipe
from kbrl_async.kernels.verify import Bench, BenchOptions, bench_options
from kbrl_async.kernels.verify.cpu.device import PRELOAD
from protocols.records import BenchReport, Candidate, Problem
from tests.unit.kernels.verify.catalogue.exploits import C_SOURCE, LINEAR, MODEL, PROBLEM, Judge, Run

BRIEF = Recipe.of(TimingBench(min_pairs=4, max_pairs=4, cap_s=60.0), warmup=0, suspicious=math.inf)
"""Four pairs once, so at least nine timed calls, however loaded the host is: some attacks begin with the sixth."""


def watching_options(**more: Any) -> BenchOptions:
    """Of a bench that judges candidates in their own process: what guards there is needed where none is recorded."""
    return bench_options(TimingBench(deadline_s=10.0), call_floor_s=1.0, replay=False, **more)


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    target = tmp_path_factory.mktemp("raw") / "kernel.so"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(target), "-lm"]
    subprocess.run(command, input=C_SOURCE.encode(), check=True)
    return {launch.source_key(C_SOURCE): target}


@pytest.fixture
def run(watching: Bench, artifacts: dict[str, Path]) -> Run:
    """Straight to the bench: what static checks would say before is not asked."""

    def judge(source: str, problem: str = PROBLEM, *, timing: bool = False, on: Bench | None = None) -> BenchReport:
        one = Problem("L1/03_catalogue", 1, "catalogue", problem)
        return (on or watching).evaluate(one, Candidate(source, "c"), artifacts, timing=timing)

    return judge


@pytest.fixture
def fresh(zygote: Zygote) -> Iterator[Bench]:
    """A bench without references: for defences that shape a reference's secret sets."""
    with contextlib.closing(Bench(zygote, watching_options())) as made:
        yield made


@pytest.fixture(scope="module")
def brief(zygote: Zygote) -> Iterator[Bench]:
    """Times hardly at all."""
    recipe = Recipe.of(TimingBench(min_pairs=2, max_pairs=2, cap_s=0.01), warmup=0)
    with contextlib.closing(Bench(zygote, watching_options(recipe=recipe))) as made:
        yield made


@pytest.fixture(scope="module")
def open_bench() -> Iterator[Bench]:
    """A bench whose children are not confined at all."""
    preload = (*PRELOAD, "tests.unit.kernels.verify.unconfined")
    with (
        Zygote(preload) as zygote,
        contextlib.closing(Bench(zygote, watching_options())) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def replaying(zygote: Zygote) -> Iterator[Bench]:
    options = bench_options(TimingBench(deadline_s=10.0), call_floor_s=1.0, recipe=BRIEF)
    with contextlib.closing(Bench(zygote, options)) as made:
        yield made


@pytest.fixture
def judge(replaying: Bench, compile_raw: Callable[[str], dict[str, Path]]) -> Judge:
    """A candidate of a C source of its own, timed."""

    def run(
        c_source: str, forward: str, init: str = "pass", problem: str = LINEAR, on: Bench | None = None
    ) -> BenchReport:
        source = MODEL.format(
            source=c_source, init=textwrap.indent(init, " " * 8), forward=textwrap.indent(forward, " " * 8)
        )
        one = Problem("L1/04_replayed", 1, "replayed", problem)
        return (on or replaying).evaluate(one, Candidate(source, "c"), compile_raw(c_source))

    return run


@pytest.fixture(scope="module")
def watched(zygote: Zygote) -> Iterator[Bench]:
    with contextlib.closing(Bench(zygote, watching_options(recipe=BRIEF))) as made:
        yield made
