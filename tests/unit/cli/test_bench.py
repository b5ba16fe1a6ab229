"""`kbrl bench`: what is asked, printed and kept; the measuring itself is tested where it lives."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from kbrl_async import cli
from kbrl_async.cli import bench
from kbrl_async.errors import InfraError
from kbrl_async.kernels.funnel import careful
from kbrl_async.kernels.timing.device import timed_device
from kbrl_async.kernels.timing.methods import ratio
from kbrl_async.kernels.timing.resolution import CaseRow, ResolutionReport, Trial, summarise
from kbrl_async.kernels.verify import Bench
from kbrl_async.lab import self_test
from kbrl_async.lab.self_test import Trials
from protocols.records import BenchReport, Candidate, Fault, Problem, Timing, Verdict
from tests.candidates import elementwise

CASES = self_test.CPU_CASES


def row(name: str, ms: float, false_faster: float = 0.0) -> CaseRow:
    return CaseRow(name, ms, 20, 0.01, false_faster, 0.0, 0.02, 1.0, 30, 0.1, methods={"naive median": 0.2})


def quiet_report(false_faster: float = 0.0, load: float = 0.0) -> ResolutionReport:
    return ResolutionReport("a chip", [row("short", 0.01, false_faster), row("long", 1.0)], load=load)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kbrl-async" / "bench-resolution-a-chip.json"


def answer(monkeypatch: pytest.MonkeyPatch, report: ResolutionReport) -> None:
    monkeypatch.setattr(bench, "measured_report", lambda *_: report)


@pytest.mark.parametrize("words", [[], ["--problem", "L1/1"], ["--aa", "--problem", "L1/1"], ["--aa", "--pairs", "0"]])
def test_wrong_usage_is_said_before_anything_starts(words: list[str]) -> None:
    assert cli.main(["bench", *words]) == 2


def test_the_report_is_kept_and_shown(
    monkeypatch: pytest.MonkeyPatch, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, quiet_report())
    assert cli.main(["bench", "--aa"]) == 0
    assert json.loads(kept.read_text())["hardware"] == "a chip"
    assert "naive median" in capsys.readouterr().out


def test_json_is_one_document_on_stdout(
    monkeypatch: pytest.MonkeyPatch, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, quiet_report())
    assert cli.main(["bench", "--aa", "--json", "--no-save"]) == 0
    assert [found["case"] for found in json.loads(capsys.readouterr().out)["rows"]] == ["short", "long"]
    assert not kept.exists()


def test_a_report_of_a_loaded_host_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, quiet_report(load=0.5))
    assert cli.main(["bench", "--aa"]) == 0
    assert not kept.exists()
    assert "not kept" in capsys.readouterr().out


def test_a_bench_that_claims_what_is_not_there_fails(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    answer(monkeypatch, quiet_report(false_faster=0.05))
    assert cli.main(["bench", "--aa"]) == 1


def test_the_plot_is_well_formed_and_holds_every_kernel_and_method() -> None:
    text = self_test.svg(quiet_report())
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "naive median" in text
    assert "0.01 ms" in text
    assert text.count("<circle") == 6


def test_a_plot_of_nothing_is_still_a_plot() -> None:
    text = self_test.svg(ResolutionReport("a <chip>", []))
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "a &lt;chip&gt;" in text
    assert "<circle" not in text


class FakeBench(Bench):
    """Measures with a bias that depends on nothing."""

    def __init__(self, timing: Timing | None) -> None:
        self.timing, self.seen = timing, list[str]()

    def evaluate(self, problem: Problem, candidate: Candidate, *_: Any, **__: Any) -> BenchReport:
        self.seen.append(problem.name)
        fault = Fault.OK if self.timing else Fault.INCORRECT
        return BenchReport(Verdict(fault), self.timing)


def test_cases_take_turns_and_every_pair_is_a_measurement() -> None:
    fake = FakeBench(Timing(10, 1.0, 0.9, 1.1, 1.0, 1.0))
    trials = Trials("a chip")
    self_test.aa(fake, CASES, 2 * len(CASES), lambda _: None, random.Random(0), trials)
    assert {name: len(found) for name, found in trials.of("aa").items()} == {case.name: 2 for case in CASES}
    assert sorted(fake.seen[: len(CASES)]) == sorted(case.name for case in CASES)


def test_what_was_measured_before_is_not_measured_again() -> None:
    fake, trials = FakeBench(Timing(10, 1.0, 0.9, 1.1, 1.0, 1.0)), Trials("a chip")
    for _ in range(2):
        self_test.aa(fake, CASES, 3, lambda _: None, random.Random(0), trials)
        self_test.ab(fake, "cpu", 1, lambda _: None, trials)
    assert len(fake.seen) == 3 + len(self_test.SLOWER)


def test_measuring_ends_with_its_time() -> None:
    fake, trials = FakeBench(Timing(10, 1.0, 0.9, 1.1, 1.0, 1.0)), Trials("a chip", minutes=0)
    self_test.aa(fake, CASES, 3, lambda _: None, random.Random(0), trials)
    self_test.ab(fake, "cpu", 1, lambda _: None, trials)
    assert fake.seen == []


def test_without_a_terminal_progress_is_lines_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with bench.status_line(Console(stderr=True)) as tell:
        tell("first")
        tell("second")
    assert capsys.readouterr().err == "first\n"


def test_a_known_kernel_that_fails_is_the_benchs_fault() -> None:
    with pytest.raises(InfraError, match="known kernel"):
        self_test.aa(FakeBench(None), CASES, 1, lambda _: None, random.Random(0), Trials("a chip"))


class FlakyBench(FakeBench):
    """A host that fails for a while."""

    def __init__(self, failures: int) -> None:
        super().__init__(Timing(10, 1.0, 0.9, 1.1, 1.0, 1.0))
        self.failures = failures

    def evaluate(self, *args: Any, **named: Any) -> BenchReport:
        if self.failures:
            self.failures -= 1
            raise InfraError("a sandboxed process can't be stopped")
        return super().evaluate(*args, **named)


def test_a_host_that_fails_is_asked_again_and_not_for_ever() -> None:
    trials, case = Trials("a chip"), CASES[0]
    self_test.aa(FlakyBench(2), [case], 1, lambda _: None, random.Random(0), trials)
    assert trials.count("aa", case.name) == 1
    with pytest.raises(InfraError, match="stopped"):
        self_test.aa(FlakyBench(3), [case], 2, lambda _: None, random.Random(0), trials)


def test_what_the_interval_was_widened_by_is_taken_off_again() -> None:
    trial = self_test.trial_of(Timing(10, 1.0, 0.9, 1.1, 1.0, 1.0, resolution=0.1), 1.0)
    assert (trial.lo, trial.hi) == (pytest.approx(0.99), pytest.approx(1.0))


def test_a_slower_candidate_repeats_the_same_work_more_often() -> None:
    case = self_test.slower_case("cpu")
    fake = FakeBench(Timing(10, 1.0, 0.9, 1.1, 1.0, 1.0))
    trials = Trials("a chip")
    self_test.ab(fake, "cpu", 1, lambda _: None, trials)
    assert [round(1 / found[0].truth, 3) for found in trials.of("ab").values()] == [1.005, 1.01, 1.02, 1.05, 1.2]
    candidate, truth = self_test.slower_candidate(case, 240)
    assert truth == 200 / 240
    assert "range(240 - 1)" in candidate.source


def test_truth_rows_are_widened_by_what_a_a_found() -> None:
    trials = {"x": [Trial(s, s / 1.001, s * 1.001, 1.0, 20, 0.1) for s in (0.99, 1.0, 1.01) * 10]}
    made = self_test.report("a chip", trials, {"5 %": [Trial(0.96, 0.955, 0.957, 1.0, 20, 0.1, truth=1 / 1.05)]}, {})
    assert made.truths[0].share == pytest.approx(made.rows[0].share)
    assert made.truths[0].covered == 1.0


def test_other_methods_time_the_same_function_about_right() -> None:
    x = torch.zeros(1 << 14)

    def once() -> None:
        x.add_(1)

    def five_times() -> None:
        for _ in range(5):
            x.add_(1)

    for method in (
        timed_device("cpu").methods().values()
    ):  # most have no guard against other load, which is what we show beside ours
        assert any(1.5 < ratio(method, five_times, once, 0.02) < 15 for _ in range(10))


def test_other_methods_run_beside_ours() -> None:
    assert set(self_test.beside(CASES[0], "cpu", 1, 0.004)) == set(timed_device("cpu").methods())


def test_a_row_says_how_often_the_truth_was_inside() -> None:
    trials = [Trial(1.0, lo, 1.1, 1.0, 10, 0.1) for lo in (0.9, 0.9, 0.9, 1.05)]
    found = summarise("x", trials, 0.0)
    assert (found.covered, found.false_faster) == (0.75, 0.25)


def test_one_kernel_is_timed_with_all_that_a_reward_rests_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text(elementwise("tanhf(x[i])"))
    words = ["--problem", "L1/01_tanh", "--candidate", str(tmp_path / "mine.py"), "--cap", "0.05", "--json"]
    code = cli.main(["bench", *words])
    document = json.loads(capsys.readouterr().out)
    assert (code, document["ok"]) == (0, True)
    assert document["timing"]["n"] >= 2
    assert 0 < document["timing"]["roofline"] < 1.5
    assert (tmp_path / "kbrl-async" / "peaks.json").exists()


def test_a_timing_is_told_with_its_uncertainty_and_its_baselines() -> None:
    timing = Timing(
        40, 2.0, 1.9, 2.1, 1.0, 2.0, stopped="resolved", load=0.25, resolution=0.01, rejected=3, spent_s=0.5,
        roofline=0.4, baselines={"compile": (1.5, 1.4, 1.6)},
    )  # fmt: skip
    text = "\n".join(bench.timing_lines(timing))
    for part in ("40 % of the roofline", "40 pairs in 0.50 s, 3 set aside", "±1.00 %", "over compile: 1.500×"):
        assert part in text


def test_what_a_baseline_took_is_kept_as_a_prior(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    careful.prior_keeper("source", "a chip")("compile", Timing(40, 2.0, 1.9, 2.1, 1.0, 2.0))
    kept = json.loads((tmp_path / "kbrl-async" / "baseline-priors.json").read_text())
    assert list(kept.values()) == [{"ms": 1.0, "eager_ms": 2.0}]
