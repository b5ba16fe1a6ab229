"""`exclude`: ids, and what a policy's answers never or always solved."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.runs.archive.archive import FILE, ArchiveWriter, TurnRow
from kbrl_async.runs.config import load, to_yaml
from kbrl_async.runs.planning import plan_of
from kbrl_async.runs.problems import excluded_told, problems_of
from protocols.messages import Status

HARD, EASY, BETWEEN, SELDOM = "L1/01_gelu", "L1/02_relu", "L1/03_gelu", "L1/09_tanh"


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    """Four answers to each of three problems; three, all wrong, to the last; and one that no verdict was had of."""
    folder = tmp_path / "probe"
    folder.mkdir()
    right = {HARD: [0, 0, 0, 0], EASY: [1, 1, 1, 1], BETWEEN: [0, 0, 0, 1], SELDOM: [0, 0, 0]}
    rows = [
        TurnRow(
            task_id=f"{id_}#{n}", group_id=id_, rollout_id=f"{id_}#{n}", problem_id=id_, correct=bool(ok), reward=1.0
        )
        for id_, answers in right.items()
        for n, ok in enumerate(answers)
    ]
    lost = TurnRow(
        task_id="lost", group_id=SELDOM, rollout_id="lost", problem_id=SELDOM, status=Status.WORKER_LOST.value
    )
    with ArchiveWriter(folder / FILE) as archive:
        for row in [*rows, lost]:
            archive.add(row)
    return folder


def test_a_folder_stands_for_what_its_answers_never_or_always_solved(probe: Path) -> None:
    assert load(overrides=[f"exclude={probe},L2/07_x,{HARD}"]).exclude == [HARD, EASY, "L2/07_x"]


def test_a_rollout_is_solved_by_any_of_its_turns(probe: Path) -> None:
    with ArchiveWriter(probe / FILE) as archive:
        turn = TurnRow(
            task_id="again", group_id=HARD, rollout_id=f"{HARD}#0", turn=1, problem_id=HARD, correct=True, reward=1.0
        )
        archive.add(turn)
    assert load(overrides=[f"exclude={probe}"]).exclude == [EASY]


def test_a_run_keeps_the_ids_when_the_folder_is_gone(probe: Path, tmp_path: Path) -> None:
    stored = tmp_path / "config.yaml"
    stored.write_text(to_yaml(load(overrides=[f"exclude={probe}"])))
    (probe / FILE).unlink()
    assert load([stored]).exclude == [HARD, EASY]
    stored.write_text("exclude:\n  - L1/a\n  - L1/b\n")
    assert load([stored]).exclude == ["L1/a", "L1/b"]


def test_blanks_and_empty_items_of_a_written_list_are_left_out(tmp_path: Path) -> None:
    stored = tmp_path / "config.yaml"
    stored.write_text("exclude:\n  - ' L1/a '\n  - ''\n")
    assert load([stored]).exclude == ["L1/a"]


def test_a_folder_without_answers_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no answers"):
        load(overrides=[f"exclude={tmp_path}"])


def test_what_is_excluded_is_evaluated_where_it_is_held_out_and_never_trained_on() -> None:
    everything = plan_of(load())
    first, heldout = everything.training[0].problem_id, everything.heldout[0].problem_id
    plan = plan_of(load(overrides=[f"exclude={first},{heldout}"]))
    assert [p.problem_id for p in plan.training] == [p.problem_id for p in everything.training[1:]]
    assert plan.heldout == everything.heldout


def test_how_many_are_excluded_is_said_and_what_excludes_nothing_or_everything_is_refused() -> None:
    config = load()
    found = problems_of(config, config.levels)
    ids = [p.problem_id for p in found]
    assert "1 of 44" in excluded_told(load(overrides=[f"exclude={plan_of(config).training[0].problem_id}"]), found)
    assert excluded_told(config, found) == ""
    with pytest.raises(ConfigError, match="no training problems of this run, and no folders"):
        excluded_told(load(overrides=["exclude=runs/evals/mistyped"]), found)
    with pytest.raises(ConfigError, match="leaves no problem"):
        excluded_told(load(overrides=[f"exclude={','.join(ids)}"]), found)
