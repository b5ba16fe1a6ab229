"""The report of the bench against itself: what its shares promise, and whose reports are believed."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from kbrl_async.kernels.timing import Point
from kbrl_async.kernels.timing.resolution import (
    ResolutionReport,
    Trial,
    clock_range,
    file_name,
    for_run,
    load,
    save,
    summarise,
    unresolved,
)


def trials(count: int, between: float, within: float = 0.01, bias: float = 0.0, seed: int = 0) -> list[Trial]:
    """Measurements that differ by more than their own intervals say."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        speedup = math.exp(bias + rng.gauss(0, between) + rng.gauss(0, within))
        made.append(Trial(speedup, speedup * math.exp(-2.33 * within), speedup * math.exp(2.33 * within), 1.0, 20, 0.1))
    return made


def test_what_one_measurement_does_not_show_is_found_in_many() -> None:
    assert unresolved(trials(100, between=0.03)) == pytest.approx(2.576 * 0.03, rel=0.35)


def test_measurements_that_explain_themselves_need_next_to_nothing() -> None:
    assert unresolved(trials(400, between=0.0)) < 0.015


def test_few_measurements_are_trusted_less() -> None:
    assert unresolved(trials(6, 0.03, seed=3)) > 0.03


def test_a_common_bias_is_part_of_it() -> None:
    assert unresolved(trials(100, between=0.0, bias=0.05)) > 0.045


def test_the_widened_intervals_of_other_measurements_claim_almost_nothing() -> None:
    share = unresolved(trials(40, between=0.03, within=0.005))
    row = summarise("other", trials(1000, between=0.03, within=0.005, seed=9), share)
    assert row.false_faster <= 0.01
    assert row.covered >= 0.98


def test_without_the_share_they_would() -> None:
    assert summarise("other", trials(1000, between=0.03, within=0.005, seed=9), 0.0).false_faster > 0.2


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    report = ResolutionReport("a chip", [summarise("x", trials(10, 0.01), foreign=0.2)], load=0.5)
    save(report, tmp_path / "cache" / "report.json")
    assert load(tmp_path / "cache" / "report.json", "a chip") == report
    assert report.points() == (Point(1.0, report.rows[0].share),)


def test_a_report_of_other_hardware_or_half_a_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    save(ResolutionReport("a chip", []), path)
    assert load(path, "another chip") is None
    path.write_text(path.read_text()[:20])
    assert load(path, "a chip") is None
    assert load(tmp_path / "nothing", "a chip") is None


def test_the_clocks_of_a_report_are_a_range() -> None:
    assert clock_range([Trial(1, 1, 1, 1, 1, 1, mhz=m) for m in (1500.0, 1900.0, 1980.0)]) == {
        "min": 1500.0,
        "median": 1900.0,
        "max": 1980.0,
    }


def test_a_run_keeps_the_report_that_its_rewards_were_widened_by(tmp_path: Path) -> None:
    cache, run = tmp_path / "cache", tmp_path / "run"
    assert for_run(cache, run, "a chip") == ()
    old, new = (
        ResolutionReport("a chip", [summarise("x", trials(10, spread), 0.01 + spread)]) for spread in (0.01, 0.05)
    )
    save(old, cache / file_name("a chip"))
    assert for_run(cache, run, "a chip") == old.points()
    save(new, cache / file_name("a chip"))
    assert for_run(cache, run, "a chip") == old.points()
    assert for_run(cache, tmp_path / "next", "a chip") == new.points()


def test_few_runs_widen_but_never_narrow_what_is_assumed_without_any() -> None:
    rows = [summarise("few", trials(5, 0.0), 0.001), summarise("few, wide", trials(5, 0.0), 0.5)]
    assert [point.share for point in ResolutionReport("a chip", rows).points()] == [0.02, 0.5]


def test_a_report_of_a_loaded_host_is_not_quiet() -> None:
    assert not ResolutionReport("a chip", [], load=0.3).is_quiet
