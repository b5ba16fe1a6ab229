"""What a policy is worth goes by who wrote the answers, whenever and in whatever order they were scored."""

from __future__ import annotations

import math
import random

import pytest
from scipy.stats import binomtest, t

from kbrl_async.evaluation.proportions import clustered_mean, clustered_share, wilson
from kbrl_async.rollouts.buffer.events import Admitted, BatchTrained, RolloutScored
from kbrl_async.runs.commands import Command, RolloutEnded
from kbrl_async.runs.settling import SettledVersions, note
from kbrl_async.runs.telemetry import by_version
from kbrl_async.runs.telemetry.by_version import (
    Answers,
    ScoredAnswer,
    Tally,
    VersionRange,
    ends,
    fields,
    points,
    sentence,
    settled,
)
from protocols.records import VERIFIER
from tests.records import stats
from tests.slow_bench import COMPILES, CORRECT, SlowBench, tenths


def answers(version: int, groups: int, correct: int = 0, size: int = 8, begin: int = 0) -> list[ScoredAnswer]:
    """Groups of one version, each with as many correct answers."""
    return [
        ScoredAnswer(f"g{begin + g}", stats(float(r < correct), correct=r < correct, compiled=True,
                                            policy_version=version, rollout_id=f"v{version}.g{begin + g}.r{r}"))
        for g in range(groups)
        for r in range(size)
    ]  # fmt: skip


# ── intervals ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("hits", "total"), [(0, 48), (7, 48), (31, 192), (64, 64), (1, 1)])
def test_wilson_is_scipy_s(hits: int, total: int) -> None:
    found = binomtest(hits, total).proportion_ci(0.95, method="wilson")
    assert wilson(hits, total) == pytest.approx((found.low, found.high), abs=1e-9)


def test_groups_that_do_not_differ_are_as_many_tries_as_they_have_answers() -> None:
    groups = [[True, False] * 4] * 8
    assert clustered_share(groups) == pytest.approx(wilson(32, 64, t.ppf(0.975, 7)))


def test_groups_that_are_all_right_or_all_wrong_are_one_try_each() -> None:
    """Var = k/(k−1)·Σ(hᵢ − p·n)²/N² = 16/15·16·4²/128² = .25/15, of independent tries .25/128: deff = 128/15."""
    groups = [[True] * 8] * 8 + [[False] * 8] * 8
    assert clustered_share(groups) == pytest.approx(wilson(7.5, 15, t.ppf(0.975, 15)))


def test_one_group_says_next_to_nothing() -> None:
    low, high = clustered_share([[True] * 4 + [False] * 4])
    assert high - low > 0.85
    assert clustered_mean([[1.0, 2.0]]) is None


def test_a_mean_s_interval_is_student_s_over_equal_groups() -> None:
    groups = [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0], [5.0, 6.0]]
    half = t.ppf(0.975, 3) * (14 / 3) ** 0.5 / 2
    assert clustered_mean(groups) == pytest.approx((2.5 - half, 2.5 + half))


# ── first and last ────────────────────────────────────────────────────────────────────────────────────────────────


def test_first_is_version_0_and_last_are_as_many_versions_as_it_takes() -> None:
    made = [*answers(0, 24, 1), *answers(1, 8, 3), *answers(2, 7, 4), *answers(3, 6, 5, begin=50)]
    two = ends(settled(Answers(made)))
    assert two.first
    assert two.last
    assert (two.first.versions, len(two.first.answers)) == ("version 0", 192)
    assert (two.last.versions, len(two.last.answers)) == ("versions 2–3", 104)
    assert two.first.figures()["correct_rate"].value == 1 / 8
    assert two.last.figures()["correct_rate"].value == pytest.approx((7 * 4 + 6 * 5) / 104)


def test_few_answers_of_a_version_are_taken_together_with_the_next_ones() -> None:
    made = [answer for version in range(8) for answer in answers(version, 4, version, begin=10 * version)]
    two = ends(settled(Answers(made)))
    assert two.first
    assert two.last
    assert (two.first.versions, two.last.versions) == ("versions 0–1", "versions 6–7")


def test_last_are_a_tenth_of_a_long_run() -> None:
    made = [answer for version in range(100) for answer in answers(version, 8, begin=10 * version)]
    two = ends(settled(Answers(made)))
    assert two.first
    assert two.last
    assert (two.first.versions, two.last.versions) == ("version 0", "versions 90–99")


def test_first_and_last_share_no_version_however_few_answers_there_are() -> None:
    two = ends(settled(Answers([*answers(0, 2), *answers(1, 2, begin=5), *answers(2, 2, begin=9)])))
    assert two.first
    assert two.last
    assert (two.first.versions, two.last.versions) == ("version 0", "versions 1–2")
    alone = ends(settled(Answers(answers(3, 2))))
    assert alone.first
    assert alone.last is None


def test_a_run_without_answers_has_no_figures() -> None:
    made = fields(Answers())
    assert (made["correct_rate_first"], made["versions_last"], made["by_version"]) == (None, None, [])
    assert made["first_and_last"] == "No version has all of its answers yet."


def test_the_order_of_scoring_changes_no_figure() -> None:
    made = [answer for version in range(6) for answer in answers(version, 12, version, begin=20 * version)]
    mixed = list(made)
    random.Random(0).shuffle(mixed)
    survivors_last = sorted(made, key=lambda answer: answer.stats.correct)
    assert fields(Answers(made)) == fields(Answers(mixed)) == fields(Answers(survivors_last))


def test_figures_come_with_their_intervals() -> None:
    part = ends(settled(Answers(answers(0, 24, 1)))).first
    assert part
    found = part.figures()
    assert found["correct_rate"].interval == pytest.approx(wilson(24, 192, t.ppf(0.975, 23)))
    assert found["reward_mean"].interval == pytest.approx((1 / 8, 1 / 8))
    assert "speedup_mean" not in found
    fast = [
        ScoredAnswer(a.group_id, stats(1.0, correct=True, speedup=2.0 ** (i % 2 * 2 - 1)))
        for i, a in enumerate(part.answers)
    ]
    speedup = by_version.VersionRange(0, 0, fast).figures()["speedup_mean"]
    assert speedup.value == pytest.approx(1.0)
    assert speedup.interval == pytest.approx((1.0, 1.0))


def test_predictions_of_verdicts_are_no_kernels() -> None:
    made = [*answers(0, 8, 4), ScoredAnswer("g0", stats(1.0, role=VERIFIER, rollout_id="v0.g0.r0", turn=1))]
    assert fields(Answers(made))["answers_first"] == 64


def test_a_rollout_s_turns_count_for_the_version_that_wrote_its_first() -> None:
    """Only who failed has a second turn: of a version's own turns the later ones are the hard cases."""
    first = answers(0, 8, 4)
    second = [
        ScoredAnswer(a.group_id, stats(0.0, policy_version=1, turn=1, rollout_id=a.stats.rollout_id))
        for a in first
        if not a.stats.correct
    ]
    found = settled(Answers([*second, *first]))
    assert list(found.versions) == [0]
    made = fields(Answers([*second, *first]))
    assert (made["success_rate_first"], made["success_rate_last"], made["avg_turns"]) == (0.5, None, 1.5)
    assert "the version that wrote a rollout's first turn" in made["first_and_last"]


def test_a_curve_has_neighbours_together() -> None:
    made = [answer for version in range(10) for answer in answers(version, 1 + version % 2, begin=10 * version)]
    found = settled(Answers(made))
    assert [part.versions for part in points(found, least=20)][:2] == ["versions 0–1", "versions 2–3"]
    assert len(points(found)) == 10
    assert len(points(found, most=4)) == 4
    assert sum(len(part.answers) for part in points(found, most=4, least=50)) == len(made)


# ── what is left out ──────────────────────────────────────────────────────────────────────────────────────────────


def test_groups_that_lack_answers_and_the_versions_that_wrote_in_them_are_left_out_and_counted() -> None:
    made = [*answers(0, 24), *answers(4, 8, begin=30), *answers(5, 8, begin=40), *answers(6, 3, 8, begin=50)]
    lacks = Answers(made, {"g47": 5, "g52": 6}, frozenset({"g30"}), {"worker_lost": 2})
    found = settled(lacks)
    assert {version: len(members) for version, members in found.versions.items()} == {0: 192, 4: 56}
    assert (found.unfinished, found.later, found.dropped, found.horizon) == (16, 72, 8, 5)
    assert sentence(lacks, found) == (
        "First: 192 answers of version 0 (24 groups); last: 56 answers of version 4 (7 groups). Left out: 16 of groups "
        "that had not ended, 72 of version 5 and later, which wrote in such groups, too, 8 of groups that were dropped "
        "as too old before they were complete. Lost by infrastructure, so no answers: 2 worker_lost."
    )
    assert fields(lacks)["answers_left_out"] == 96


def test_a_tally_tells_open_groups_from_dropped_and_from_whole_ones() -> None:
    tally = Tally()
    for number in range(4):
        tally.admitted(f"g{number}", 2, number)
    tally.answered("g0", stats(policy_version=0, rollout_id="g0.r0"))
    tally.ended("g0")
    tally.ended("g0", "stale")
    tally.answered("g2", stats(policy_version=1, rollout_id="g2.r0"))
    tally.ended("g2")
    tally.ended("g1")
    tally.ended("g1")
    tally.swept(["g1", "g2"])
    found = tally.answers()
    assert found.dropped == {"g2"}
    assert found.lost == {"stale": 1}
    assert found.unfinished == {"g3": 2}, "its sampler may be a version behind, as one was before"


# ── a policy that never changes, a bench that is slow for what is correct ─────────────────────────────────────────


@pytest.mark.parametrize("seed", range(5))
def test_a_policy_that_never_changes_shows_no_progress(seed: int) -> None:
    run = SlowBench(updates=14, seed=seed)
    before, after = tenths(run.scored)
    assert after - before > 0.5, "in the order of scoring it seems to learn"
    made = run.summary(tallied(run))
    for name, truth in (("correct_rate", CORRECT), ("compile_rate", COMPILES)):
        for which in ("first", "last"):
            low, high = made[f"{name}_{which}_95"]
            assert low - 0.04 < truth < high + 0.04
        first, last = made[f"{name}_first_95"], made[f"{name}_last_95"]
        assert max(first[0], last[0]) < min(first[1], last[1]), "the intervals overlap"
    assert made["answers_left_out"] == 0
    assert made["versions_first"] == [0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_is_cut_off_is_not_judged_by_what_was_quick(seed: int) -> None:
    run = SlowBench(updates=40, seed=seed, until_s=300.0)
    made = run.summary(tallied(run))
    low, high = made["correct_rate_last_95"]
    assert low - 0.04 < CORRECT < high + 0.04
    assert made["answers_left_out"] > 64
    everything = settled(Answers(tallied(run).listed))
    newest = [a.stats.correct for v in list(everything.versions)[-2:] for a in everything.versions[v]]
    assert math.fsum(newest) / len(newest) < CORRECT - 0.1, "with the open groups it seems to get worse"


# ── while it goes on ──────────────────────────────────────────────────────────────────────────────────────────────


def told_live(run: SlowBench) -> tuple[list[VersionRange], int]:
    """What is told after each update and at the end, and how many answers were kept at most."""
    live, told, most = SettledVersions(), list[VersionRange](), 0
    for entry in run.entries:
        live.note([entry])
        if isinstance(entry, BatchTrained):
            told += live.new(entry.version)
        most = max(most, len(live))
    return [*told, *live.new()], most


@pytest.mark.parametrize("until_s", [math.inf, 300.0], ids=["to its end", "cut off"])
def test_each_version_is_told_once_with_all_of_its_answers_as_soon_as_they_are_in(until_s: float) -> None:
    run = SlowBench(updates=40, until_s=until_s)
    told, most = told_live(run)
    whole = settled(tallied(run)).versions
    assert [part.last for part in told] == list(whole)
    assert [part.figures() for part in told] == [VersionRange(v, v, listed).figures() for v, listed in whole.items()]
    assert most < 8 * 8 * 8, "it remembers what is open, not the run"


def test_a_version_that_more_groups_may_be_written_by_is_not_told_yet() -> None:
    def group(name: str, admitted: int, written: int) -> list[Command]:
        answer = RolloutEnded(f"{name}.r0", name, stats(1.0, policy_version=written, rollout_id=f"{name}.r0"))
        return [Admitted(name, "L1/a", 1, 1, admitted, 0.0), answer, RolloutScored(name, f"{name}.r0", [], 1.0)]

    live = SettledVersions()
    live.note([*group("g0", 0, 0), *group("g1", 1, 1)])
    assert [part.last for part in live.new(1)] == [0]
    live.note(group("g2", 2, 1))
    assert live.new(2) == [], "a sampler was a version behind: it may be again"
    assert [(part.last, len(part.answers)) for part in live.new()] == [(1, 2)]


def test_what_is_told_first_is_not_what_was_quick() -> None:
    told = [told_live(SlowBench(updates=14, seed=seed))[0][0] for seed in range(24)]
    assert {part.last for part in told} == {0}
    assert math.fsum(part.figures()["correct_rate"].value for part in told) / 24 == pytest.approx(CORRECT, abs=0.03)


def tallied(run: SlowBench) -> Answers:
    tally = Tally()
    for entry in run.entries:
        note(tally, entry)
    return tally.answers()
