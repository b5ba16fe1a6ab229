"""The summary's arithmetic, from rollouts counted by hand."""

from __future__ import annotations

import io
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.timing import Recipe
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs import summary
from kbrl_async.runs.summary import RunCounters
from kbrl_async.runs.telemetry.by_version import FIELDS, Answers, ScoredAnswer
from protocols.records import Timing
from tests.records import stats

COUNTERS = RunCounters(
    groups_admitted=10, groups_trained=6, groups_filtered=2, groups_dropped_stale=1, groups_failed=1, rollouts=25,
    updates=3, max_staleness=2,
)  # fmt: skip


def kernel(problem: str, speedup: float, lo: float, *, correct: bool = True) -> RolloutStats:
    return RolloutStats(
        problem_id=problem, level=1, reward=1.0, format=True, compiled=True, correct=correct,
        speedup=speedup, speedup_lo=lo, speedup_hi=speedup + 0.5, file=f"kernels/{problem}-{speedup}.py",
    )  # fmt: skip


def wrong(reward: float = 0.0, *, compiled: bool = False) -> RolloutStats:
    return stats(reward, "p", compiled=compiled)


def built(rollouts: list[RolloutStats], **values: Any) -> dict[str, Any]:
    """Of groups that hold one rollout each."""
    answers = Answers([ScoredAnswer(f"g{number}", rollout) for number, rollout in enumerate(rollouts)])
    return summary.build(**{"counters": COUNTERS, "answers": answers, "wall_s": 200.0, "busy": {}, **values})


def test_counters_are_taken_over() -> None:
    made = built([])
    assert (made["groups_admitted"], made["groups_trained"], made["updates"], made["max_staleness"]) == (10, 6, 3, 2)
    assert made["groups_add_up"] is True


def test_why_extensions_were_not_built_the_fast_way_is_counted_and_shown() -> None:
    """Of held-out answers, too; equal reasons together, the commonest first."""
    ways = [("fast",), ("symbol a",), ("fast", "asks for gradients"), ("asks for gradients",), ()]
    made = built([stats(built=way) for way in ways], heldout_before=[stats(built=("symbol a",))] * 2)
    assert made["extensions"] == 6
    assert list(made["built_in_full"].items()) == [("symbol a", 3), ("asks for gradients", 2)]
    assert "of 6 answers with extensions: 3 symbol a, 2 asks for gradients" in printed(made)
    assert "built in full" not in printed(built([stats(built=("fast",))]))


def test_counters_that_do_not_add_up_are_not_hidden() -> None:
    lost = RunCounters(
        groups_admitted=11, groups_trained=6, groups_filtered=2, groups_dropped_stale=1, groups_failed=1, rollouts=0,
        updates=0, max_staleness=0,
    )  # fmt: skip
    made = built([], counters=lost)
    assert made["groups_add_up"] is False
    assert "do not add up" in printed(made)


def test_updates_are_counted_by_the_hour() -> None:
    assert built([])["updates_per_hour"] == 54
    assert built([], wall_s=0.0)["updates_per_hour"] == 0


def test_first_and_last_are_policy_versions_whenever_they_were_scored() -> None:
    late = [msgspec.structs.replace(kernel("a", 2.0, lo), policy_version=1) for lo in (1.5, 0.9)]
    made = built([*late, wrong(compiled=True), wrong()])
    first = [made[f"{name}_first"] for name in FIELDS]
    last = [made[f"{name}_last"] for name in FIELDS]
    assert first == [0.0, 0.5, 0.0, 0.0, 0.0, None]
    assert last == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.5, 2.0])


def test_the_table_says_which_answers_its_figures_are_of() -> None:
    late = [msgspec.structs.replace(wrong(1.0, compiled=True), policy_version=7)] * 2
    text = printed(built([*[wrong()] * 64, *late]))
    assert "First: 64 answers of version 0 (64 groups); last: 2 answers of version 7 (2 groups)." in text
    assert "version 0" in text.splitlines()[2]
    assert "version 7" in text.splitlines()[2]
    assert "0% (0% … 6%)" in text


def test_what_a_revision_before_compared_by_the_time_of_scoring_is_not_shown() -> None:
    old = {"correct_rate_first": 0.0, "correct_rate_last": 0.79, "heldout_correct_rate_after": 0.2, "rollouts": 9}
    text = printed(old)
    assert "79%" not in text
    assert "20%" in text
    assert "failures first; 'kbrl report' shows the run by policy version" in text


def test_a_run_without_rollouts_has_no_rates() -> None:
    assert built([])["correct_rate_last"] is None


def test_heldout_problems_are_shown_before_and_after() -> None:
    made = built([], heldout_before=[wrong(), wrong()], heldout_after=[wrong(), kernel("h", 3.0, 2.0)])
    assert (made["heldout_correct_rate_before"], made["heldout_correct_rate_after"]) == (0.0, 0.5)
    assert made["heldout_speedup_mean_before"] is None
    assert made["heldout_speedup_mean_after"] == pytest.approx(3.0)
    assert built([])["heldout_correct_rate_before"] is None


def test_that_one_of_eight_answers_to_a_heldout_problem_is_right_is_told() -> None:
    made = built([], heldout_before=[wrong()] * 7, heldout_after=[wrong()] * 15 + [kernel("p", 3.0, 2.0)])
    assert made["heldout_pass_at_8_before"] is None, "no problem has eight answers"
    assert made["heldout_pass_at_8_after"] == pytest.approx(0.5)
    assert "pass_at_8" in printed(made)


def test_shares_of_heldout_answers_come_with_their_intervals() -> None:
    made = built([], heldout_before=[wrong()] * 48, heldout_after=[wrong()] * 41 + [kernel("h", 3.0, 2.0)] * 7)
    assert made["heldout_correct_rate_before_95"] == pytest.approx((0.0, 0.0741), abs=1e-4)
    assert made["heldout_correct_rate_after_95"] == pytest.approx((0.0725, 0.2717), abs=1e-4)
    assert "15% (7% … 27%)" in printed(made)
    assert built([])["heldout_correct_rate_after_95"] is None


def test_instances_of_trained_families_are_told_from_families_that_are_held_out() -> None:
    answers = [kernel("L1/i", 3.0, 2.0)] * 8 + [wrong()] * 6 + [kernel("p", 3.0, 2.0)] * 2
    made = built([], heldout_before=[wrong()], heldout_after=answers, kinds={"L1/i": "instance", "p": "family"})
    assert (made["heldout_correct_rate_after"], made["heldout_instance_correct_rate_after"]) == (0.625, 1.0)
    assert (made["heldout_family_correct_rate_after"], made["heldout_family_pass_at_8_after"]) == (0.25, 1.0)
    assert made["heldout_family_correct_rate_after_95"] == pytest.approx((0.0715, 0.5907), abs=1e-4)
    assert "heldout_instance_correct_rate_before" not in made, "none was asked"
    text = printed(made)
    assert "1 of families that are trained on" in text
    assert "1 of families that are not" in text
    alone = printed(built([], heldout_after=answers, kinds={"L1/i": "instance", "p": "instance"}))
    assert "of families" not in alone


def test_heldout_scores_are_shown_with_and_without_flagged_problems() -> None:
    flagged = msgspec.structs.replace(kernel("zeros", 3.0, 2.0), flagged=True)
    made = built([], heldout_before=[wrong(), flagged], heldout_after=[wrong(), flagged])
    assert (made["heldout_correct_rate_after"], made["heldout_filtered_correct_rate_after"]) == (0.5, 0.0)
    assert made["heldout_problems_flagged"] == 1
    assert made["heldout_filtered_correct_rate_after_95"] == pytest.approx((0.0, 0.7935), abs=1e-4)
    assert "without 1 flagged problems" in printed(made)


def test_nothing_is_filtered_where_nothing_is_flagged() -> None:
    made = built([], heldout_before=[wrong()], heldout_after=[wrong()])
    assert not [name for name in made if "heldout_filtered" in name or "flagged" in name]


def test_busy_fractions_are_added_up() -> None:
    made = built([], busy={"sampler-1": 0.9, "learner": 0.4})
    assert made["busy"] == {"sampler-1": 0.9, "learner": 0.4}
    assert made["busy_total"] == pytest.approx(1.3)


def test_best_kernels_are_one_a_problem_by_the_lower_end_of_the_interval() -> None:
    rollouts = [kernel("a", 9.0, 1.1), kernel("a", 3.0, 2.0), kernel("b", 5.0, 4.0), kernel("b", 2.0, 1.9)]
    assert built(rollouts)["best_kernels"] == [
        {"problem": "b", "speedup": 5.0, "lo": 4.0, "hi": 5.5, "file": "kernels/b-5.0.py"},
        {"problem": "a", "speedup": 3.0, "lo": 2.0, "hi": 3.5, "file": "kernels/a-3.0.py"},
    ]


def test_a_kernel_for_a_heldout_problem_is_among_the_best_whenever_it_was_written() -> None:
    """As in the report, and as in kernels/."""
    made = built([], heldout_before=[kernel("L1/h", 3.0, 2.0)], heldout_after=[kernel("L1/h", 2.5, 1.5)])
    assert [(k["problem"], k["speedup"]) for k in made["best_kernels"]] == [("L1/h", 3.0)]


def test_a_speedup_whose_interval_includes_one_is_no_best_kernel() -> None:
    rollouts = [kernel("a", 2.0, 0.9), kernel("b", 50.0, 40.0, correct=False), wrong()]
    assert built(rollouts)["best_kernels"] == []


def test_a_disturbed_measurement_is_not_ranked() -> None:
    wide = msgspec.structs.replace(kernel("a", 90.0, 2.0), speedup_hi=7e11)
    told = msgspec.structs.replace(kernel("b", 9.0, 3.0), disturbed=True)
    made = built([wide, told, kernel("a", 2.0, 1.5)])
    assert [k["speedup"] for k in made["best_kernels"]] == [2.0]
    assert "2 of 3 were disturbed" in printed(made)


def test_the_interval_of_a_kernel_is_called_by_its_own_confidence() -> None:
    assert Timing(2, 1.0, 1.0, 1.0, 1.0, 1.0).confidence == Recipe.of(TimingBench()).confidence == 0.98
    assert "98% interval" in printed(built([kernel("a", 3.0, 2.0)]))


def test_there_are_at_most_ten_best_kernels() -> None:
    best = built([kernel(f"p{number}", 2.0 + number, 1.5 + number) for number in range(12)])["best_kernels"]
    assert [k["problem"] for k in best] == [f"p{number}" for number in range(11, 1, -1)]


def test_more_fields_can_be_given() -> None:
    assert built([], extra={"seed": 4})["seed"] == 4


def test_the_file_reads_back(tmp_path: Path) -> None:
    made = built([kernel("a", 2.0, 1.5)], busy={"broker": 0.1})
    summary.write(tmp_path / "summary.json", made)
    assert summary.read(tmp_path / "summary.json") == made
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


LATE = msgspec.structs.replace(kernel("L1/a", 2.0, 1.5), policy_version=1)


def test_the_table_shows_progress_ends_and_kernels() -> None:
    text = printed(built([wrong(), *[LATE] * 10], busy={"sampler-1": 0.5}))
    for part in (
        "correct_rate",
        "0%",
        "100%",
        "10 = 6 trained, 2 filtered, 1 dropped stale, 1 failed",
        "sampler-1 50%",
    ):
        assert part in text
    assert "1.50 … 2.50" in text


def printed(made: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=140).print(summary.render(made))
    return out.getvalue()


def test_the_versions_name_python_and_what_computes() -> None:
    found = summary.versions()
    assert found["python"] == platform.python_version()
    assert found["torch"] == metadata.version("torch")


def test_a_summary_from_before_is_read_by_the_names_of_today(tmp_path: Path) -> None:
    point = {"versions": [0, 0], "fast_1": 0.25}
    summary.write(tmp_path / "old.json", {"fast_1_last": 0.5, "fast_1_last_95": [0.1, 0.9], "by_version": [point]})
    assert summary.read(tmp_path / "old.json") == {
        "fast_1_proven_last": 0.5, "fast_1_proven_last_95": [0.1, 0.9],
        "by_version": [{"versions": [0, 0], "fast_1_proven": 0.25}],
    }  # fmt: skip
    today = {"fast_1_last": 0.5, "fast_1_proven_last": 0.25}
    summary.write(tmp_path / "new.json", today)
    assert summary.read(tmp_path / "new.json") == today


def table(**fields: Any) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(summary.render(built([]) | fields))
    return console.export_text()


def test_an_interval_of_a_speedup_that_says_nothing_is_not_shown() -> None:
    ends = {"speedup_mean_first": 0.37, "speedup_mean_last": 0.5}
    said = table(**ends, speedup_mean_first_95=[0.001, 10623.0], speedup_mean_last_95=[0.3, 0.8])
    assert "0.37× (too few)" in said
    assert "0.50× (0.30× … 0.80×)" in said


def test_groups_that_were_open_at_the_end_are_told_from_failures() -> None:
    assert "5 failed (3 were open when the run ended)" in table(groups_failed=5, failed_reasons={"run_ended": 3})
    assert "were open" not in table(groups_failed=5, failed_reasons={"worker_lost": 5})


def test_a_small_policy_that_was_cut_is_said_to_be() -> None:
    assert "cut at step 134 of 300 by sft.max_seconds" in table(small_policy_cut="step 134 of 300")
    assert "small policy" not in table()


def test_a_run_without_an_update_says_where_its_answers_ended() -> None:
    found = {"format": {"entered": 90, "passed": 4}, "compile": {"entered": 4, "passed": 1}}
    equal = {"updates": 0, "failed_reasons": {"zero_variance": 11}, "funnel": found}
    assert "86 of 90 answers ended at 'format'" in table(**equal)
    assert "no update" not in table(**equal | {"updates": 1})
    assert "no update" not in table(**equal | {"failed_reasons": {"worker_lost": 11}})
