"""A GPU's peaks, and whom they accuse: nobody who is honest, whatever was going on when they were first measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.timing import roofline
from kbrl_async.kernels.timing.peaks import peaks_of
from kbrl_async.kernels.timing.roofline import Peaks
from kbrl_async.kernels.verify import Bench, bench_options
from kbrl_async.kernels.verify.bench import zygote_for
from protocols.records import Candidate, Fault, Problem

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
DISTURBED = Peaks("gpu", memory_gbs=100.0, cache_gbs=45.0, cache_bytes=50 << 20, fp32_gflops=1000.0)
"""As a GPU gave them that three benches and an engine were starting on."""
CHAIN = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        for _ in range(40):
            x = torch.relu(x)
        return x

def get_inputs():
    return [torch.randn(8192, 8192)]

def get_init_inputs():
    return []
"""
ONCE = CHAIN.replace("Model(", "ModelNew(").replace("range(40)", "range(1)")


@pytest.fixture
def bench() -> Iterator[Bench]:
    options = bench_options(TimingBench(), device="cuda:0", peaks=DISTURBED)
    with zygote_for("cuda:0") as zygote, contextlib.closing(Bench(zygote, options)) as made:
        yield made


def test_peaks_are_those_of_a_gpu(tmp_path: Path) -> None:
    found = peaks_of("cuda:0", tmp_path, "gpu", again=True)
    assert found is not None
    assert 200 < found.memory_gbs < 20_000
    assert found.cache_gbs == pytest.approx(4 * found.memory_gbs)
    assert 5_000 < found.fp32_gflops < found.half_gflops


def test_a_fast_kernel_is_not_accused_by_peaks_of_a_busy_gpu(bench: Bench, tmp_path: Path) -> None:
    bench.probe = lambda: peaks_of("cuda:0", tmp_path, "gpu", again=True)
    report = bench.evaluate(Problem("L1/01_chain", 1, "chain", CHAIN), Candidate(ONCE, "torch"), {})
    assert report.verdict.fault is Fault.OK, report.verdict
    assert report.timing is not None
    assert report.timing.speedup > 10
    assert report.timing.roofline == pytest.approx(0.85, abs=0.3)


def test_without_another_measurement_it_would_be(bench: Bench) -> None:
    report = bench.evaluate(Problem("L1/01_chain", 1, "chain", CHAIN), Candidate(ONCE, "torch"), {})
    assert report.verdict.rule == roofline.RULE
