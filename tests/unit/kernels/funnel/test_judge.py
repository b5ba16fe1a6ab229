"""The bench half: other baselines beside eager, what is gone from the store, and signs of life while it compiles."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kbrl_async.errors import InfraError
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.funnel import Judge, judge
from kbrl_async.kernels.funnel.judge import ticking
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import bench_options
from protocols.records import BenchReport, BuildReport, Candidate, Fault, Problem, Timing, Verdict
from tests.records import timing

PROBLEM, CANDIDATE = Problem("L1/1_a", 1, "1_a", ""), Candidate("", "c")
RIGHT = BenchReport(Verdict(Fault.OK), timing(2.0))
BUILT = BuildReport(Fault.OK)


class Fake:
    def __init__(self, _bench: Any) -> None: ...

    def beside(self, _problem: Problem, timing: Timing, names: tuple[str, ...]) -> tuple[Timing, dict[str, str]]:
        return msgspec.structs.replace(timing, baselines=dict.fromkeys(names, (1.1, 1.0, 1.2))), {}


def made(monkeypatch: pytest.MonkeyPatch, folder: Path, names: Sequence[str], report: BenchReport = RIGHT) -> Judge:
    monkeypatch.setattr(judge, "Baselines", Fake)
    monkeypatch.setattr(judge, "Bench", lambda *_, **__: SimpleNamespace(evaluate=lambda *_, **__: report))
    return Judge(ArtifactStore(folder), bench_options(TimingBench()), baselines=names)


def test_a_correct_kernel_gets_its_speedups_over_the_baselines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = made(monkeypatch, tmp_path, ["compile"]).judge(PROBLEM, CANDIDATE, BUILT)
    assert report.timing is not None
    assert report.timing.baselines == {"compile": (1.1, 1.0, 1.2)}


def test_what_was_not_timed_and_what_nobody_asked_for_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = BenchReport(Verdict(Fault.INCORRECT))
    assert made(monkeypatch, tmp_path, ["compile"], wrong).judge(PROBLEM, CANDIDATE, BUILT) == wrong
    assert made(monkeypatch, tmp_path, []).judge(PROBLEM, CANDIDATE, BUILT) == RIGHT


def test_a_timed_kernel_is_profiled_where_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = msgspec.structs.replace(BUILT, remarks=("line 4: not vectorised",))
    report = made(monkeypatch, tmp_path, []).judge(PROBLEM, CANDIDATE, built, profile=True)
    assert "loop in line 4: not vectorised" in report.profile
    assert made(monkeypatch, tmp_path, []).judge(PROBLEM, CANDIDATE, built).profile == ""


def test_what_is_gone_from_the_store_or_is_for_another_processor_is_no_fault_of_the_candidate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = made(monkeypatch, tmp_path, [])
    with pytest.raises(InfraError, match="no longer in the store"):
        bench.judge(PROBLEM, CANDIDATE, BuildReport(Fault.OK, {"unit": "0" * 64}))
    with pytest.raises(InfraError, match="newer processor"):
        bench.judge(PROBLEM, CANDIDATE, BuildReport(Fault.OK, cpu="avx9"))


def test_long_work_shows_life_and_stops_doing_so() -> None:
    ticked = threading.Event()
    with ticking(ticked.set, period_s=0.001):
        assert ticked.wait(30)
    assert not any(thread.name == "ticking" for thread in threading.enumerate())
