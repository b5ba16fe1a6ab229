"""The grammar's careful answers really are right: compiled and verified. And its slips really are wrong."""

from __future__ import annotations

import contextlib
import ctypes
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import Bench, bench_options
from kbrl_async.kernels.verify.bench import zygote_for
from kbrl_async.lab.small_policy.author import CAREFUL, Author, Habits
from kbrl_async.lab.small_policy.families import blocks
from kbrl_async.lab.small_policy.families.source import render_answer
from kbrl_async.lab.small_policy.specs import SPECS
from kbrl_async.rollouts.prompts import extract
from protocols.records import BenchReport, Candidate, Fault
from tests.suite import suite

SUITE = {problem.problem_id: problem for problem in suite(1, 2, 3)}


class Judge:
    def __init__(self, builder: Builder, bench: Bench) -> None:
        self.builder, self.bench = builder, bench

    def __call__(self, key: str, habits: Habits, *, timing: bool = False) -> BenchReport:
        author = Author(random.Random(0), habits)
        spec = SPECS[key]
        answer = extract(render_answer(spec.module(), spec.answer(author), author))
        report = self.builder.build(Candidate(answer.source, "c"))
        assert report.fault is Fault.OK, report.message
        paths = {unit: self.builder.store.path(address) for unit, address in report.artifacts.items()}
        found = {unit: path for unit, path in paths.items() if path is not None}
        return self.bench.evaluate(SUITE[key], Candidate(answer.source, "c"), found, timing=timing)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    store = ArtifactStore(Path(tmp_path_factory.mktemp("store")))
    options = bench_options(TimingBench(deadline_s=20.0), call_floor_s=5.0)
    with (
        Builder(store) as builder,
        zygote_for("cpu") as zygote,
        contextlib.closing(Bench(zygote, options)) as bench,
    ):
        yield Judge(builder, bench)


@pytest.mark.parametrize("key", sorted(SPECS))
def test_the_careful_answer_is_correct(judge: Judge, key: str) -> None:
    verdict = judge(key, CAREFUL).verdict
    assert (verdict.fault, verdict.passed) == (Fault.OK, verdict.total), verdict.message


@pytest.mark.parametrize("slip", ["bound", "formula", "index"])
def test_an_answer_with_a_slip_is_not_correct(judge: Judge, slip: str) -> None:
    import msgspec

    verdict = judge("L1/13_softmax", msgspec.structs.replace(CAREFUL, **{slip: 1.0})).verdict
    assert verdict.fault is not Fault.OK


@pytest.mark.parametrize("m", [1, 3, 4])
@pytest.mark.parametrize("n", [1, 5, 8])
def test_a_product_in_tiles_is_right_at_every_edge(dense: ctypes.CDLL, m: int, n: int) -> None:
    x, w, d, out = torch.randn(m, 7), torch.randn(n, 7), torch.randn(n), torch.full((m, n), torch.nan)
    dense.dense(*(ctypes.c_void_p(t.data_ptr()) for t in (x, w, d, out)), *map(ctypes.c_long, (m, n, 7)))
    torch.testing.assert_close(out, x @ w.T + d)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("dense")
    lines = blocks.dense(Author(random.Random(0), CAREFUL), "restrict ")
    (folder / "dense.c").write_text("\n".join(lines).removeprefix("static "))
    subprocess.run(["gcc", "-shared", "-fPIC", folder / "dense.c", "-o", folder / "dense.so"], check=True)
    return ctypes.CDLL(str(folder / "dense.so"))
