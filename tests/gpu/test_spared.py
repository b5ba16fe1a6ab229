"""A kernel that is clearly slower than its reference: how often it is launched, and what being slow gains nobody."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest

from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.funnel.build import artifact_paths
from kbrl_async.kernels.stages import spans
from kbrl_async.kernels.verify import Bench
from protocols.records import REPLAYED, BenchReport, Candidate, Fault, Problem
from tests.gpu.bench_candidates import ADD, GOOD, nvrtc

pytestmark = pytest.mark.gpu
SPIN = "long long t = clock64(); while (clock64() - t < 20000000) {}"
"""Some twenty milliseconds, as not all blocks run at once."""
ODD = f"if (__float_as_int(x[0]) & 1) {{ {SPIN} }}"
"""For every second draw."""
LARGE_IS_WRONG = "if (i < n && fabsf(x[i]) > 12) out[i] = 0;"
LARGER = ADD.replace("1024, 512", "8192, 2048")
Judge = Callable[..., tuple[BenchReport, str, dict[str, float]]]


@pytest.fixture
def judge(gpu_bench: Bench, gpu_builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """As in training: a report, what is said of its sets, and pieces of the work."""
    numbers = itertools.count()
    monkeypatch.setattr(gpu_bench, "options", msgspec.structs.replace(gpu_bench.options, alone_share=0.0))

    def run(source: str, problem: str = ADD) -> tuple[BenchReport, str, dict[str, float]]:
        posed, candidate = Problem("L1/01_test", 1, "test", problem), Candidate(source, "cuda-nvrtc")
        paths = artifact_paths(gpu_builder.store, gpu_builder.build(candidate, posed))
        pieces = dict[str, float]()
        token = spans.set(pieces)
        found = gpu_bench.evaluate(posed, candidate, paths, group=f"slow{next(numbers)}")
        spans.reset(token)
        said = [stage.detail for stage in found.stages if stage.name == "full_inputs"]
        return found, " then ".join(said), pieces

    return run


@pytest.mark.alone
def test_a_slow_kernel_is_launched_five_times(judge: Judge) -> None:
    """Once to be recorded, on three sets, and in one pair."""
    judge(nvrtc())
    found, said, pieces = judge(nvrtc(f"{SPIN} {GOOD}"))
    assert (found.verdict.fault, found.verdict.trust) == (Fault.OK, REPLAYED), found.verdict
    assert said.startswith("3 of 3 secret input sets, 7 more"), said
    assert found.timing is not None
    assert (found.timing.n, found.timing.stopped) == (1, "slower"), found.timing
    one = found.timing.candidate_ms / 1e3
    assert one > 5e-3, "slow enough to tell"
    assert pieces["recorded"] < 2 * one + 0.05
    assert pieces["run"] < 3.5 * one + 0.05
    whole = sum(stage.seconds for stage in found.stages)
    assert whole < 6 * one + 0.2, found.stages


@pytest.mark.parametrize("body", ["", GOOD.replace("i < n", "i < n && i % 2"), GOOD.replace("shift", "1")])
def test_a_slow_kernel_that_is_wrong_is_wrong_and_written_down_in_full_alike(judge: Judge, body: str) -> None:
    judge(nvrtc())
    found, _, pieces = judge(nvrtc(f"{SPIN} {body}"))
    assert (found.verdict.fault, found.verdict.trust) == (Fault.INCORRECT, REPLAYED), found.verdict
    assert found.verdict.total == 3
    again = {"judged by a second", "judged alone", "recorded otherwise", "recorded with other bytes that last"}
    assert not again & pieces.keys(), pieces


def test_a_slow_decoy_is_a_decoy(judge: Judge) -> None:
    found, _, _ = judge(nvrtc(f"{SPIN} {GOOD}", "x * 2 + y + self.shift"))
    assert (found.verdict.fault, found.verdict.rule) == (Fault.CHEATING, "decoy_kernel"), found.verdict


@pytest.mark.parametrize("number", range(4))
def test_who_is_slow_now_and_then_earns_no_speed_by_fewer_sets(judge: Judge, number: int) -> None:
    """Wrong on large inputs, which it may have been spared: then it was timed as slow, too."""
    found, said, _ = judge(nvrtc(f"{ODD} {GOOD} {LARGE_IS_WRONG}") + f"\n# {number}")
    is_slow = found.timing is not None and found.timing.hi < 0.8
    assert found.verdict.fault is Fault.INCORRECT or is_slow, (found, said)


def test_a_fast_kernel_sees_all_sets(judge: Judge) -> None:
    assert judge(nvrtc())[1].startswith("10 of 10")


@pytest.mark.alone
def test_a_larger_problem_needs_no_other_recorder(judge: Judge) -> None:
    """The one that is there gets more memory, and so does the second."""
    for problem in (ADD, LARGER):
        judge(nvrtc(), problem)
        found, _, _ = judge(nvrtc("if (i < n) out[i] = x[i];"), problem)
        assert (found.verdict.fault, found.verdict.trust) == (Fault.INCORRECT, REPLAYED), found.verdict
    found, _, pieces = judge(nvrtc(), LARGER.replace("8192", "16384"))
    assert (found.verdict.fault, found.verdict.trust) == (Fault.OK, REPLAYED), found.verdict
    assert pieces["a recorder that is ready"] < 0.1, pieces
