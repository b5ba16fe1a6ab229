"""Times on a real GPU: what is the same is found the same, what is slower is found as slow as it is."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable

import pytest

from kbrl_async.kernels.timing.cuda.calibration import Calibration
from protocols.records import REPLAYED, BenchReport, Fault, Timing
from tests.gpu.bench_candidates import ADD, INLINE, MATMUL, matmul, nvrtc
from tests.gpu.recorded_candidates import KINDS

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
Judge = Callable[..., BenchReport]


def timed(judge: Judge, problem: str, source: str, backend: str = "torch") -> Timing:
    report = judge(problem, source, backend, timing=True)
    assert report.verdict.fault is Fault.OK, report.verdict
    assert report.timing is not None
    return report.timing


def test_the_same_code_is_as_fast_as_itself(judge: Judge) -> None:
    timing = timed(judge, MATMUL, matmul("return x @ y"))
    assert abs(timing.speedup - 1) < 0.005
    assert timing.lo < 1.005
    assert timing.hi > 0.995
    assert "CUDA graph" in timing.method


def test_twice_the_work_takes_twice_the_time(judge: Judge) -> None:
    timing = timed(judge, MATMUL, matmul("x @ y", "return x @ y"))
    assert 0.49 < timing.speedup < 0.51
    assert not timing.is_faster


def test_one_kernel_instead_of_three_is_faster(judge: Judge) -> None:
    timing = timed(judge, ADD, nvrtc(), "cuda-nvrtc")
    assert timing.is_faster
    assert timing.candidate_ms < 0.02


def test_a_tuned_kernel_is_timed_as_it_was_recorded(judge: Judge) -> None:
    """A recording holds one configuration: tests/gpu/test_recorder.py."""
    tuned = KINDS["triton, tuned"]
    report = judge(tuned.problem, tuned.source, tuned.backend, timing=True)
    assert (report.verdict.fault, report.verdict.trust) == (Fault.OK, REPLAYED), report.verdict
    assert report.timing is not None


def test_an_extension_that_launches_without_a_stream_is_honest_and_timed_as_a_graph(judge: Judge) -> None:
    timing = timed(judge, ADD, INLINE, "cuda")
    assert "CUDA graph" in timing.method
    assert timing.speedup > 1.2


def test_streams_that_are_joined_are_honest(judge: Judge) -> None:
    source = matmul(
        "self.side.wait_stream(torch.cuda.current_stream())",
        "with torch.cuda.stream(self.side): out = x @ y",
        "torch.cuda.current_stream().wait_stream(self.side)",
        "return out",
    )
    assert abs(timed(judge, MATMUL, source).speedup - 1) < 0.02


def test_a_forward_that_reads_back_is_timed_by_events_and_says_so(judge: Judge) -> None:
    timing = timed(judge, MATMUL, matmul("out = x @ y", "float(out[0, 0].item())", "return out"))
    assert "events around an ordinary forward" in timing.method
    assert 0.8 < timing.speedup < 1.1


def test_an_input_that_the_reference_changes_too_may_be_changed(judge: Judge) -> None:
    problem = ADD.replace("return x * 2 + y + self.shift", "return x.mul_(2).add_(y).add_(self.shift)")
    assert timed(judge, problem, problem.replace("class Model(", "class ModelNew(")).n >= 1


def test_our_own_kernel_tells_the_clock_and_repeats_within_two_percent() -> None:
    calibration = Calibration("cuda:0")
    beats = [calibration.beat() for _ in range(30)][10:]
    usual = statistics.median(beat.ns for beat in beats)
    assert all(abs(beat.ns / usual - 1) < 0.02 for beat in beats)
    assert 300 < statistics.median(beat.mhz for beat in beats) < 3000


LOAD = """
import torch
x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
y = x @ x
torch.cuda.synchronize()
print("loaded", flush=True)
while True:
    for _ in range(20):
        y = x @ x
    torch.cuda.synchronize()
"""


def test_a_gpu_that_somebody_else_loads_claims_no_speedup(judge: Judge) -> None:
    with subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "loaded\n"
            timing = timed(judge, MATMUL, matmul("return x @ y"))
        finally:
            other.kill()
    assert not timing.is_faster
    assert "shared" in timing.method
