"""Whether long answers are dropped as too old more often than short ones."""

from __future__ import annotations

from kbrl_async.runs import summary
from kbrl_async.runs.telemetry import stale
from kbrl_async.runs.telemetry.by_version import Tally
from tests.records import stats


def tally(groups: int, swept_from: int) -> Tally:
    """Groups of four whose answers have as many tokens as their number; from one on they are dropped."""
    made = Tally()
    for number in range(groups):
        name = f"g{number}"
        made.admitted(name, 4, 0, f"L1/{number}")
        for _ in range(4):
            made.answered(name, stats(problem_id=f"L1/{number}", tokens=number))
            made.ended(name)
        if number >= swept_from:
            made.swept([name])
    return made


def test_the_share_of_each_quarter_is_shown_and_an_unequal_one_warned_of() -> None:
    found = tally(40, 30).answers()
    parts = stale.by_length(found.ages, found.listed)
    assert [part.share for part in parts] == [0.0, 0.0, 0.0, 1.0]
    assert [part.tokens for part in parts] == [9, 19, 29, 39]
    assert "policy is taught short answers" in stale.warning(parts)


def test_equal_shares_and_few_groups_are_no_reason_to_warn() -> None:
    found = tally(40, 0).answers()
    assert stale.warning(stale.by_length(found.ages, found.listed)) == ""
    few = tally(12, 9).answers()
    assert stale.warning(stale.by_length(few.ages, few.listed)) == ""
    assert stale.by_length(tally(40, 40).answers().ages, found.listed) == []


def test_stragglers_and_what_was_too_old_to_be_dispatched_count_one_by_one() -> None:
    made = Tally()
    made.admitted("g0", 4, 0, "L1/a")
    made.ended("g0", "stale")
    made.ended("g0", "worker_lost")
    made.swept(["g0"], whole=False)
    assert made.answers().ages["g0"].stale == 3


def test_a_group_without_answers_is_as_long_as_its_problems_others() -> None:
    made = tally(39, 39)
    made.admitted("late", 4, 0, "L1/38")
    made.swept(["late"])
    found = made.answers()
    assert [part.share > 0 for part in stale.by_length(found.ages, found.listed)] == [False, False, False, True]


def test_it_is_in_the_summary_and_on_its_screen() -> None:
    counters = summary.RunCounters(
        groups_admitted=40, groups_trained=30, groups_filtered=0, groups_dropped_stale=10, groups_failed=0,
        rollouts=160, updates=4, max_staleness=1,
    )  # fmt: skip
    content = summary.build(counters=counters, answers=tally(40, 30).answers(), wall_s=1.0, busy={})
    assert [part["share"] for part in content["stale_by_length"]] == [0.0, 0.0, 0.0, 1.0]
    assert "Raise hold_s" in content["stale_warning"]
    rows = summary.run_table(content).columns
    assert "warning" in list(rows[0].cells)
