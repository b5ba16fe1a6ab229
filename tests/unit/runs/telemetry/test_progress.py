"""How far a run is, for those who watch it: written by its services, read by viewers, never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.runs.telemetry import progress
from kbrl_async.runs.telemetry.progress import MAKING, TRAINING, Progress, Reporter
from tests.unit.services.log import Log


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "metrics").mkdir()
    return tmp_path


@pytest.fixture
def clock() -> Clock:
    return Clock()


def told(run_dir: Path) -> Progress:
    found = progress.read(run_dir)
    assert found is not None
    return found


def test_what_is_told_is_read(run_dir: Path, clock: Clock) -> None:
    assert progress.read(run_dir) is None
    Reporter(run_dir, Log(), clock).tell(MAKING, "step 3 of 300", 0.01)
    assert told(run_dir) == Progress(MAKING, "step 3 of 300", 0.01, 1000.0)
    progress.forget(run_dir)
    assert progress.read(run_dir) is None


def test_what_is_left_goes_by_the_pace_of_the_phase(run_dir: Path, clock: Clock) -> None:
    reporter = Reporter(run_dir, Log(), clock)
    reporter.tell(MAKING, "", 0.9)
    reporter.tell(TRAINING, "update 7 of 14", 0.5)
    clock.now += 20
    reporter.tell(TRAINING, "update 9 of 14", 0.6)
    assert told(run_dir).eta_s == pytest.approx(80.0)
    clock.now += 15
    reporter.tell(TRAINING, "update 9 of 14", 0.6)
    assert told(run_dir).eta_s == pytest.approx(65.0), "between two updates time goes on"


def test_a_limit_of_time_ends_a_phase_earlier(run_dir: Path, clock: Clock) -> None:
    Reporter(run_dir, Log(), clock).tell(TRAINING, "update 0 of 14", 0.0, limit_s=42.0)
    assert told(run_dir).eta_s == 42.0


def test_a_viewer_counts_on_and_says_nothing_once_the_time_is_over() -> None:
    seen = Progress(TRAINING, "", 0.5, 1000.0, eta_s=30.0)
    assert (seen.left_s(1010.0), seen.left_s(1031.0)) == (20.0, None)


def test_log_lines_come_at_a_modest_rate_and_at_each_new_phase(run_dir: Path, clock: Clock) -> None:
    log = Log()
    reporter = Reporter(run_dir, log, clock)
    for step in range(70):
        reporter.tell(MAKING, f"step {step}", step / 100)
        clock.now += 1
    reporter.tell(TRAINING, "update 0 of 14", 0.0)
    assert [(line.facts["phase"], line.facts["now"]) for line in log.lines] == [
        (MAKING, "step 0"), (MAKING, "step 30"), (MAKING, "step 60"), (TRAINING, "update 0 of 14"),
    ]  # fmt: skip
    assert log.lines[1].facts["eta_s"] == 70


def test_a_picture_that_can_not_be_written_is_lost_and_nothing_else(tmp_path: Path, clock: Clock) -> None:
    Reporter(tmp_path / "no such folder", Log(), clock).tell(MAKING, "step 1", 0.0)
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "progress.json").write_text("{")
    assert progress.read(tmp_path) is None
