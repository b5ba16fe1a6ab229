"""Impossible times in a bench: with peaks that make any time impossible, an honest candidate is accused; else not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.stages import StageClock
from kbrl_async.kernels.timing.roofline import Peaks
from kbrl_async.kernels.verify import Bench
from kbrl_async.kernels.verify.checks import Checker
from kbrl_async.kernels.verify.floor import counted
from kbrl_async.kernels.verify.options import Tick
from protocols.records import BenchReport, Candidate, Fault, Problem, Timing
from tests.unit.kernels.verify.conftest import SCALE_AND_SHIFT
from tests.unit.kernels.verify.test_bench import patient

SLOW_MEMORY = Peaks("chip", memory_gbs=1e-6, cache_gbs=1e-6, cache_bytes=0, fp32_gflops=1.0)
FAST_MEMORY = Peaks("chip", memory_gbs=1e6, cache_gbs=1e6, cache_bytes=0, fp32_gflops=1.0)
PROBLEM = Problem("L1/01_x", 1, "x", SCALE_AND_SHIFT)
SAME = Candidate(SCALE_AND_SHIFT.replace("class Model(", "class ModelNew("), "torch")
BYTES = 2 * 16 * 33 * 4
BETWEEN = Peaks("chip", memory_gbs=BYTES / 10e6, cache_gbs=BYTES / 10e6, cache_bytes=0, fp32_gflops=1.0)
"""Its floor is ten milliseconds: less than `REFERENCE_MS`, more than `CANDIDATE_MS`."""
CANDIDATE_MS, REFERENCE_MS = 2.0, 12.0
"""What `Told` says of each measurement: on a busy host a real one of 16 × 33 numbers took nine milliseconds."""


class Told(Bench):
    """Measures, and then reports other times."""

    def measure(self, checker: Checker, tick: Tick, clock: StageClock) -> Timing | None:
        found = super().measure(checker, tick, clock)
        assert found is not None
        return msgspec.structs.replace(
            found, speedup=REFERENCE_MS / CANDIDATE_MS, candidate_ms=CANDIDATE_MS, reference_ms=REFERENCE_MS
        )


def judge(
    zygote: Zygote,
    peaks: Peaks | None,
    problem: Problem = PROBLEM,
    probe: Callable[[], Peaks | None] | None = None,
    kind: type[Bench] = Told,
) -> BenchReport:
    with contextlib.closing(kind(zygote, patient(peaks=peaks))) as bench:
        bench.probe = probe
        return bench.evaluate(problem, SAME, {})


def test_a_time_that_memory_forbids_twice_is_evidence_of_cheating(zygote: Zygote) -> None:
    report = judge(zygote, BETWEEN)
    assert (report.verdict.fault, report.verdict.rule) == (Fault.CHEATING, "impossible_time")
    assert "at least" in report.verdict.message


def test_peaks_that_the_reference_beats_too_accuse_nobody(zygote: Zygote) -> None:
    assert judge(zygote, SLOW_MEMORY).verdict.fault is Fault.OK


def test_peaks_that_were_measured_on_a_busy_host_accuse_nobody(zygote: Zygote) -> None:
    report = judge(zygote, BETWEEN, PROBLEM, lambda: FAST_MEMORY)
    assert report.verdict.fault is Fault.OK
    assert report.timing is not None
    assert report.timing.roofline == pytest.approx(BYTES / 1e12 / CANDIDATE_MS, rel=0.01)


def test_where_peaks_can_not_be_measured_again_nobody_is_accused(zygote: Zygote) -> None:
    assert judge(zygote, BETWEEN, PROBLEM, lambda: None).verdict.fault is Fault.OK


def test_peaks_are_measured_before_the_first_timing_and_in_a_window(zygote: Zygote) -> None:
    heard: list[str] = []

    @contextlib.contextmanager
    def window() -> Iterator[None]:
        heard.append("window")
        yield

    def probe() -> Peaks:
        heard.append("probe")
        return FAST_MEMORY

    with contextlib.closing(Told(zygote, patient())) as bench:
        bench.probe, bench.quiet = probe, window
        timed = [bench.evaluate(PROBLEM, SAME, {}).timing for _ in range(2)]
    assert heard == ["window", "probe", "window", "window"]
    assert all(timing is not None and timing.roofline is not None for timing in timed)


def test_peaks_once_measured_are_kept_where_they_can_not_be_measured_again(zygote: Zygote) -> None:
    found = [FAST_MEMORY, None]
    with contextlib.closing(Bench(zygote, patient())) as bench:
        bench.probe = lambda: found.pop(0)
        assert bench.measure_peaks() is FAST_MEMORY
        assert bench.measure_peaks() is None
        assert bench.peaks is FAST_MEMORY


def test_a_possible_time_says_how_near_it_is_to_the_roofline(zygote: Zygote) -> None:
    timing = judge(zygote, FAST_MEMORY, kind=Bench).timing
    assert timing is not None
    assert timing.roofline == pytest.approx(BYTES / 1e12 / timing.candidate_ms, rel=0.01)


def test_a_degenerate_problem_can_not_accuse(zygote: Zygote) -> None:
    flagged = msgspec.structs.replace(PROBLEM, flags=("independent",))
    assert judge(zygote, BETWEEN, flagged).verdict.fault is Fault.OK


def test_flops_are_counted_in_a_confined_child() -> None:
    linear = SCALE_AND_SHIFT.replace("x * 2 + self.shift", "x @ x.T")
    work = counted(msgspec.structs.replace(PROBLEM, source=linear))
    assert work is not None
    assert (work.flops, work.bytes) == (2 * 16 * 33 * 16, (16 * 33 + 16 * 16) * 4)


def test_without_peaks_nothing_is_said(zygote: Zygote) -> None:
    report = judge(zygote, None)
    assert report.verdict.fault is Fault.OK
    assert report.timing is not None
    assert report.timing.roofline is None
