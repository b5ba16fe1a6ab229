"""The staleness study's own parts: how old samples are, which arms there are, and how outcomes become a table."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from benchmarks.harness import with_figures
from benchmarks.staleness.__main__ import CORRECTIONS, DEFAULT, NONE, SETTINGS, STALENESS, planned, read
from benchmarks.staleness.arm import (
    Arm,
    ArmResult,
    Verdicts,
    config_of,
    evaluated_versions,
    source_version,
    with_advantages,
)
from benchmarks.staleness.report import (
    MARKS,
    SettingFigures,
    findings,
    hardest,
    has_diverged,
    interval,
    picture,
    reward_table,
    stability_table,
    worst_late_batch,
)
from kbrl_async.learning.settings import CORRECTIONS as CORRECTION_DOOR
from kbrl_async.learning.settings import LOSSES
from kbrl_async.runs.config import Config
from kbrl_async.runs.planning import plan_of
from protocols.records import BenchReport, BuildReport, Candidate, Fault, Problem, Verdict
from tests.records import sample

PROBLEM = Problem("L1/01_relu", 1, "relu", "class Model: ...")


def outcome(correction: str, staleness: int, seed: int, reward: float, *, before: float = 0.3) -> ArmResult:
    history = [{"reward": r, "correct": r, "ess": 0.9, "mismatch_kl": 0.1} for r in (0.3, 0.9, 0.2, 0.5)]
    history = [{**h, "grad_norm_max": 1.0, "ratio_max": 2.0, "entropy": 0.2} for h in history]
    after = {"reward": reward, "correct": reward, "compiled": 1.0}
    begun = {"reward": before, "correct": before, "compiled": 1.0}
    return ArmResult(Arm("hard", correction, staleness, seed), 4, begun, after, history, {}, 10)


class TestTheForcedAge:
    def test_every_update_trains_on_samples_exactly_s_versions_old_once_there_are_any(self) -> None:
        assert [source_version(update, 2) for update in range(6)] == [0, 0, 0, 1, 2, 3]

    def test_without_staleness_samples_are_of_the_policy_that_is_trained(self) -> None:
        assert [source_version(update, 0) for update in range(4)] == [0, 1, 2, 3]

    def test_the_last_versions_are_evaluated_but_never_the_one_it_began_with(self) -> None:
        assert evaluated_versions(20, 3) == [18, 19, 20]
        assert evaluated_versions(2, 3) == [1, 2]


def test_every_group_of_an_update_is_trained_on_and_one_without_differences_has_advantages_of_0() -> None:
    rules = plan_of(Config()).buffer
    samples = {
        name: [sample(f"{name}.r{n}", reward) for n, reward in enumerate(rewards)]
        for name, rewards in {"differs": (1.0, 0.0), "alike": (1.0, 1.0)}.items()
    }
    differs, alike = with_advantages(dict.fromkeys(samples, PROBLEM), samples, 3, rules)
    assert [one.advantage > 0 for one in differs.samples] == [True, False]
    assert [one.advantage for one in alike.samples] == [0.0, 0.0]


class TestThePlan:
    def test_every_correction_and_loss_of_the_project_is_an_arm(self) -> None:
        words = {word for arm in CORRECTIONS.values() for word in arm}
        assert {f"corrections={name}" for name in CORRECTION_DOOR.ours} <= words
        assert {f"loss={name}" for name in LOSSES.ours} - words == {
            "loss=grpo",
            "loss=tis",
            "loss=importance_sampling",
        }  # others by these names

    def test_every_arm_is_a_configuration_that_the_project_accepts(self, tmp_path: Path) -> None:
        for setting in SETTINGS.values():
            for words in CORRECTIONS.values():
                config = config_of(setting, words, 1, str(tmp_path))
                assert config.loss in " ".join(words)

    def test_the_grid_is_whole_and_names_no_arm_twice(self) -> None:
        arms = planned(list(SETTINGS), list(CORRECTIONS), STALENESS, [0, 1])
        assert len({arm.key for arm in arms}) == len(arms) == len(SETTINGS) * len(CORRECTIONS) * 5 * 2
        assert {arm.staleness for arm in arms} == {0, 1, 2, 4, 8}

    def test_the_default_is_the_configurations_default(self) -> None:
        assert Config().loss == DEFAULT
        assert NONE in CORRECTIONS


class TestVerdicts:
    def test_a_source_keeps_its_verdict_for_its_problem_only(self, tmp_path: Path) -> None:
        verdicts, candidate = Verdicts(tmp_path / "verdicts.sqlite"), Candidate("int x;", "c")
        frames: list[BuildReport | BenchReport] = [
            BuildReport(Fault.OK, {"a": "b"}),
            BenchReport(Verdict(Fault.INCORRECT, 2, 5, "words")),
        ]
        verdicts.put(PROBLEM, candidate, frames)
        assert verdicts.get(PROBLEM, candidate) == [
            BuildReport(Fault.OK),
            BenchReport(Verdict(Fault.INCORRECT, 2, 5)),
        ]
        assert verdicts.get(msgspec.structs.replace(PROBLEM, source="other"), candidate) is None
        assert verdicts.get(PROBLEM, Candidate("int y;", "c")) is None
        verdicts.close()


class TestTheReport:
    def test_an_arm_counts_once_and_the_first_file_wins(self, tmp_path: Path) -> None:
        files = {"first": [outcome("none", 4, 0, 0.1)], "then": [outcome("none", 4, s, 0.9) for s in (0, 1)]}
        for name, outcomes in files.items():
            (tmp_path / name).write_bytes(b"\n".join(map(msgspec.json.encode, outcomes)))
        merged = read([tmp_path / name for name in (*files, "missing")])
        assert merged == [outcome("none", 4, 0, 0.1), outcome("none", 4, 1, 0.9)]

    def test_a_row_of_a_worker_that_died_is_no_outcome(self, tmp_path: Path) -> None:
        row = {"name": "none", "state": "ok", **msgspec.to_builtins(outcome("none", 0, 0, 0.5))}
        (tmp_path / "rows").write_bytes(b'{"name": "x", "state": "host"}\n' + msgspec.json.encode(row))
        assert read([tmp_path / "rows"]) == [outcome("none", 0, 0, 0.5)]

    def test_the_interval_is_students(self) -> None:
        mean, half = interval([1.0, 2.0, 3.0])
        assert mean == 2.0
        assert half == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
        assert math.isnan(interval([1.0])[1])

    def test_the_change_is_taken_within_a_seed(self) -> None:
        figures = SettingFigures([outcome("none", s, seed, seed / 10 - s / 40) for s in (0, 4) for seed in (5, 6, 7)])
        assert figures.change("none", 4) == pytest.approx([-0.1] * 3)

    def test_tables_hold_a_line_for_each_correction_and_a_column_for_each_staleness(self) -> None:
        figures = SettingFigures([outcome(c, s, seed, 0.5) for c in ("none", "tis") for s in (0, 4) for seed in (0, 1)])
        lines = reward_table(figures, ["none", "tis"]).splitlines()
        assert lines[0] == "| correction | S=0 | S=4 | S=4 less S=0, paired |"
        assert lines[3] == "| tis | .50 ± .00 | .50 ± .00 | .00 ± .00 |"
        stability = stability_table(figures, ["none", "tis", "absent"], 4).splitlines()
        assert len(stability) == 4
        assert "0 of 2" in stability[2]

    def test_the_words_follow_from_the_figures(self) -> None:
        kept = [outcome("dppo_tv", s, seed, 0.8 + seed / 100 * (1 - s)) for s in (0, 4) for seed in (0, 1, 2)]
        lost = [outcome("none", s, seed, 0.8 - s / 5 + seed / 100) for s in (0, 4) for seed in (0, 1, 2)]
        without, default, between = findings(SettingFigures([*kept, *lost]), "none", "dppo_tv")
        assert without.startswith("Without correction, S=4 changes the final reward by −.80")
        assert without.endswith("outside noise.")
        assert default.endswith("within noise.")
        assert "a difference; 3 of 3 uncorrected runs and 0 of 3 corrected" in between

    def test_the_hard_setting_is_the_one_in_which_most_was_tried(self) -> None:
        easy = outcome("none", 0, 0, 0.5)
        easy = msgspec.structs.replace(easy, arm=msgspec.structs.replace(easy.arm, setting="default"))
        assert hardest([easy, outcome("none", 0, 0, 0.5), outcome("tis", 0, 0, 0.5)]) == "hard"

    def test_a_run_that_is_worse_than_its_first_policy_or_not_finite_has_diverged(self) -> None:
        assert has_diverged(outcome("none", 4, 0, 0.2))
        assert not has_diverged(outcome("none", 4, 0, 0.4))
        assert has_diverged(msgspec.structs.replace(outcome("none", 4, 0, 0.4), failure="loss is nan"))

    def test_the_worst_late_batch_is_of_the_second_half(self) -> None:
        assert worst_late_batch(outcome("none", 4, 0, 0.4)) == 0.2

    def test_the_picture_names_its_corrections(self) -> None:
        figures = SettingFigures([outcome(c, s, 0, 0.5) for c in ("none", "tis") for s in (0, 4)])
        drawn = picture(figures, ["none", "tis"], "Final reward")
        assert drawn.startswith("<svg")
        assert ">none<" in drawn
        assert ">tis<" in drawn

    def test_a_page_keeps_its_words_around_the_figures(self) -> None:
        page = f"words\n{MARKS[0]}\nold\n{MARKS[1]}\nmore\n"
        assert with_figures(page, MARKS, "new") == page.replace("old", "new")
        with pytest.raises(ValueError, match="needs the lines"):
            with_figures("words", MARKS, "new")
