"""From a run folder, whole or not, to plain data."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from kbrl_async.errors import UserError
from kbrl_async.lab.report import read_run
from kbrl_async.lab.report.kernels import best_turns
from kbrl_async.lab.report.model import AFTER, BEFORE, BestKernel, ReportedTurn, RunData
from kbrl_async.lab.report.reading import WallClock
from kbrl_async.lab.report.sections import kernels
from kbrl_async.runs.archive.archive import ArchiveWriter, GroupEnd, TurnRow
from tests.records import stats


@pytest.fixture
def copy(run_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_folder, tmp_path / "copy"))


def test_every_scored_turn_is_there_once_with_the_times_of_its_stages(run: RunData) -> None:
    assert len(run.training) == run.summary["rollouts"] == 384
    assert len({(turn.stats.rollout_id, turn.stats.turn) for turn in run.training}) == 384
    for turn in run.turns:
        assert turn.asked is not None
        assert turn.at is not None
        moments = [turn.asked, *(moment for span in turn.spans for moment in (span.started, span.finished))]
        assert moments == sorted(moments)
        assert 0 <= turn.asked <= turn.at <= run.duration + 60


def test_updates_have_their_groups_and_times(run: RunData) -> None:
    assert [update.version for update in run.updates] == [1, 2, 3]
    assert all(len(update.group_ids) == 8 for update in run.updates)
    assert all(update.start is not None and update.start < update.at for update in run.updates)
    assert run.curves["entropy"][0] == (1.0, 0.4)


def test_held_out_rollouts_are_apart_from_those_of_training(run: RunData) -> None:
    assert len(run.phase(BEFORE)) == len(run.phase(AFTER)) == 12
    assert not {s.problem_id for s in run.phase(BEFORE)} & {turn.stats.problem_id for turn in run.training}


def test_staleness_is_the_batch_s_version_minus_the_writer_s(run: RunData) -> None:
    ages = {turn.stats.staleness for turn in run.training}
    assert ages <= {0, 1, 2}
    assert len(ages) > 1


def test_the_best_kernel_has_its_source_and_the_reference_s(run: RunData) -> None:
    best = run.kernels[0]
    assert best.speedup == 50.0
    assert best.source.startswith("</script>")
    assert "class Model(" in best.reference
    assert best.candidate_ms == pytest.approx(0.002)


def test_what_fired_is_counted(run: RunData) -> None:
    assert sum(run.rules.values()) == sum(
        turn.stats.fault in ("static_violation", "cheating") for turn in run.turns
    )  # fmt: skip


def test_secrets_of_the_configuration_stay_where_they_are(run: RunData) -> None:
    assert "api_key: '***'" in run.config
    assert "hidden-value" not in run.config


def test_a_torn_log_line_costs_itself_only(run: RunData) -> None:
    assert [line.event for line in run.log] == ["slow <b>step</b>"]


def test_a_run_from_before_the_archive_has_all_but_single_rollouts_times(copy: Path, run: RunData) -> None:
    (copy / "rollouts.sqlite").unlink()
    old = read_run(copy)
    assert len(old.training) == len(run.training)
    assert not any(turn.spans for turn in old.turns)
    assert {turn.stats.staleness for turn in old.training} == {turn.stats.staleness for turn in run.training}
    assert any("no archive" in words for words in old.missing)


def test_the_archive_alone_gives_the_same_turns(copy: Path, run: RunData) -> None:
    (copy / "aggregator.sqlite").unlink()
    alone = read_run(copy)
    assert len(alone.training) == len(run.training)
    assert len(alone.phase(AFTER)) == 12
    assert sum(turn.stats.correct for turn in alone.turns) == sum(turn.stats.correct for turn in run.turns)
    assert [update.group_ids for update in alone.updates] == [update.group_ids for update in run.updates]


def test_damaged_files_cost_their_part_and_are_named(copy: Path) -> None:
    for name in ("rollouts.sqlite", "aggregator.sqlite", "summary.json", "config.yaml"):
        (copy / name).write_bytes(b"\x00 not what it was: [")
    (copy / "metrics" / "system.jsonl").unlink()
    left = read_run(copy)
    assert left.turns == []
    assert len(left.missing) == 5


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run folder"):
        read_run(tmp_path)


def test_a_file_named_by_data_is_read_from_the_run_folder_only(copy: Path, tmp_path: Path) -> None:
    from kbrl_async.lab.report.kernels import text_in

    (tmp_path / "secret.py").write_text("a secret")
    (copy / "kernels" / "here.py").write_text("a kernel")
    assert text_in(copy, "kernels/here.py") == "a kernel"
    assert text_in(copy, "../secret.py") == ""
    assert text_in(copy, str(tmp_path / "secret.py")) == ""


def test_a_pause_between_two_starts_stays_where_it_was() -> None:
    clock = WallClock([(10.0, 110.0), (20.0, 1120.0)])
    assert [clock(at) for at in (5.0, 10.0, 15.0, 25.0)] == [105.0, 110.0, 1115.0, 1125.0]
    assert WallClock([])(3.0) == 3.0


def test_the_archive_alone_leaves_out_groups_of_which_it_can_t_tell_that_they_are_whole(tmp_path: Path) -> None:
    def row(group: str, version: int, status: str = "ok") -> TurnRow:
        key = f"{group}.r{next(numbers)}"
        return TurnRow(task_id=key, group_id=group, rollout_id=key, policy_version=version, status=status)

    numbers = itertools.count()
    rows = [*(row("g0", 0) for _ in range(8)), *(row("g1", 3) for _ in range(5)), row("g2", 2), row("g3", 1)]
    with ArchiveWriter(tmp_path / "rollouts.sqlite") as archive:
        for each in [*rows, row("g0", -1, "worker_lost")]:
            archive.add(each)
        ends = [("g0", "trained", ""), ("g2", "dropped_stale", "stale"), ("g3", "failed", "run_ended")]
        archive.ended([GroupEnd(group, "L1/a", outcome, reason) for group, outcome, reason in ends])
    answers = read_run(tmp_path).answers
    assert (answers.unfinished, answers.dropped) == ({"g1": 2, "g3": 0}, {"g2"})
    assert answers.lost == {"worker_lost": 1}
    assert len(answers.listed) == 15


def test_disturbed_measurements_are_not_ranked_and_how_many_there_are_is_said() -> None:
    wide = stats(1.0, "L1/a", correct=True, speedup=90.0, speedup_lo=2.0, speedup_hi=7e11)
    told = stats(1.0, "L1/b", correct=True, speedup=9.0, speedup_lo=1.0, speedup_hi=9.5, disturbed=True)
    sound = stats(1.0, "L1/a", correct=True, speedup=1.5, speedup_lo=1.4, speedup_hi=1.6)
    turns = [ReportedTurn(each) for each in (wide, told, sound)]
    assert [turn.stats.speedup for turn in best_turns(turns)] == [1.5]
    made = kernels.make(RunData(name="r", turns=turns, kernels=[BestKernel("L1/a", 1.5, 1.4, 1.6)]))
    assert "rank nowhere: 2." in made
    assert "98\u00a0% interval" in made
