"""Progression of rewards and choice of problems by moving rates."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kbrl_async.rollouts.curriculum import BatchRates, CurriculumTracker
from kbrl_async.rollouts.settings import Curriculum
from protocols.records import Problem, Strictness

EASY = [Problem(f"L1/{i}", 1, "e", "", difficulty=0.2) for i in range(4)]
HARD = [Problem(f"L2/{i}", 2, "h", "", difficulty=0.8) for i in range(2)]


def curriculum(kind: Any = "uniform", window: int = 2) -> CurriculumTracker:
    return CurriculumTracker(Curriculum(kind=kind, window=window), [*EASY, *HARD], seed=1)


def drawn(made: CurriculumTracker, count: int = 400, excluded: frozenset[str] = frozenset()) -> Counter[str]:
    return Counter(made.pick(n, excluded).problem_id for n in range(count))


def test_rewards_go_from_compiling_to_being_right_to_being_fast_and_say_why() -> None:
    made = curriculum()
    assert made.batch_trained(BatchRates(0.9, 0.1)) == []
    assert made.batch_trained(BatchRates(0.9, 0.1)) == ["stage1 → stage2: compiled 90% over the last 2 batches"]
    assert made.batch_trained(BatchRates(0.9, 0.6)) == []
    assert made.batch_trained(BatchRates(0.9, 0.6)) == ["stage2 → stage3: correct 60% over the last 2 batches"]
    for _ in range(4):
        made.batch_trained(BatchRates(0.0, 0.0))
    assert made.stage == "stage3"


def test_one_lucky_batch_moves_nothing() -> None:
    made = curriculum(window=3)
    for rates in (BatchRates(0.2, 0.0), BatchRates(1.0, 1.0), BatchRates(0.2, 0.0)):
        assert made.batch_trained(rates) == []
    assert made.stage == "stage1"


def test_harder_levels_come_in_as_the_easier_ones_are_solved() -> None:
    made = curriculum("levels")
    before = sum(count for key, count in drawn(made).items() if key.startswith("L2")) / 400
    for _ in range(2 * 10):
        made.batch_trained(BatchRates(0.0, 0.45))
    assert made.share == 0.5
    after = sum(count for key, count in drawn(made).items() if key.startswith("L2")) / 400
    assert before == pytest.approx(0.1, abs=0.05)
    assert after == pytest.approx(0.5, abs=0.08)


def trained(made: CurriculumTracker, right: dict[str, float], groups: int) -> Counter[str]:
    """How often each problem was met in so many groups of eight answers, four under way at a time."""
    open_, met = [], Counter[str]()
    for count in range(groups):
        chosen = made.pick(count, frozenset()).problem_id
        made.began(chosen)
        met[chosen] += 1
        open_.append(chosen)
        if len(open_) == 4:
            for problem_id in open_:
                for number in range(8):
                    made.observe(problem_id, 0, correct=number < 8 * right[problem_id])
                made.ended(problem_id)
            made.batch_trained(BatchRates(1.0, 0.5))
            open_ = []
    return met


def many(visits: int, count: int = 120) -> tuple[CurriculumTracker, dict[str, float]]:
    """A third of them always solved, a third never, a third half of the time."""
    problems = [Problem(f"L1/{number}", 1, "p", "") for number in range(count)]
    right = {problem.problem_id: (0.0, 0.5, 1.0)[number % 3] for number, problem in enumerate(problems)}
    return CurriculumTracker(Curriculum(kind="learnable", visits=visits), problems, seed=1), right


def test_learnable_problems_are_met_as_often_as_asked_and_solved_ones_once() -> None:
    made, right = many(visits=4)
    met = trained(made, right, 120)
    between = [times for problem_id, times in met.items() if right[problem_id] == 0.5]
    assert {times for problem_id, times in met.items() if right[problem_id] == 1} == {1}
    assert max(times for problem_id, times in met.items() if right[problem_id] == 0) == 2
    assert max(between) == 4
    assert sum(between) / len(between) > 2.5
    free, right = many(visits=0)
    assert sum(times > 2 for times in trained(free, right, 120).values()) < 12


def test_a_problem_is_not_gone_back_to_while_a_group_of_it_is_open() -> None:
    made, _ = many(visits=4)
    for count in range(60):
        chosen = made.pick(count, frozenset()).problem_id
        assert not made.state().under_way.get(chosen)
        made.began(chosen)
        made.observe(chosen, 0, correct=True)
        made.observe(chosen, 0, correct=False)


def test_when_all_were_met_they_are_met_again() -> None:
    made, right = many(visits=2, count=6)
    assert set(trained(made, right, 60)) == set(right)


def test_visits_come_back_with_the_state() -> None:
    made, right = many(visits=4)
    trained(made, right, 22)
    restored, _ = many(visits=4)
    restored.restore(made.state())
    ours = [made.pick(count, frozenset()) for count in range(22, 60)]
    assert [restored.pick(count, frozenset()) for count in range(22, 60)] == ours


def test_problems_that_are_solved_half_of_the_time_come_more_often() -> None:
    made = curriculum("learnable")
    for _ in range(60):
        made.observe("L1/0", 0, correct=True)
        made.observe("L1/1", 0, correct=False)
    counts = drawn(made)
    assert counts["L1/2"] > 3 * max(counts["L1/0"], counts["L1/1"])


def test_a_failure_of_long_ago_is_asked_again_once_the_others_are_solved() -> None:
    made = curriculum("learnable")
    for _ in range(60):
        made.observe("L1/0", 0, correct=False)
    for _ in range(40):
        made.batch_trained(BatchRates(1.0, 0.5))
        made.observe("L1/1", 0, correct=True)
        made.observe("L1/2", 0, correct=False)
    assert made.weights()[0] > 0.9
    assert made.weights()[2] < 0.3
    restored = curriculum("learnable")
    restored.restore(made.state())
    assert restored.weights() == made.weights()


def test_success_counts_all_turns_of_a_rollout() -> None:
    made = curriculum()
    for _ in range(80):
        made.observe("L1/0", 0, correct=False)
        made.observe("L1/0", 1, correct=True)
    assert made.success(EASY[0]) > 0.95
    assert made.success(HARD[0]) == pytest.approx(0.2)


def test_excluded_problems_are_drawn_only_where_nothing_else_is_left() -> None:
    made = curriculum()
    assert set(drawn(made, excluded=frozenset(p.problem_id for p in EASY))) == {p.problem_id for p in HARD}
    assert drawn(made, excluded=frozenset(p.problem_id for p in [*EASY, *HARD]))


def test_the_same_observations_give_the_same_choices() -> None:
    def played() -> Counter[str]:
        made = curriculum("learnable")
        for n in range(30):
            made.observe(f"L1/{n % 4}", n % 2, correct=n % 3 == 0)
        return drawn(made, 50)

    assert played() == played()


ALL = [*EASY, *HARD, Problem("L3/0", 3, "x", "")]


def test_levels_come_in_order_by_a_ramp_that_can_be_set() -> None:
    settings = Curriculum(kind="levels", window=1, first_share=0.2, last_share=0.6, share_step=0.4, raise_above=0.7)
    made = CurriculumTracker(settings, ALL, seed=1)

    def shares() -> list[float]:
        return [sum(w for p, w in zip(ALL, made.weights(), strict=True) if p.level == level) for level in (1, 2, 3)]

    assert shares() == pytest.approx([0.8, 0.16, 0.04])
    assert made.batch_trained(BatchRates(0.0, 0.6)) == []
    assert made.batch_trained(BatchRates(0.0, 0.75))
    assert shares() == pytest.approx([0.4, 0.24, 0.36])


def strict(**more: Any) -> CurriculumTracker:
    settings = Curriculum(strictness="rising", window=1, first_sets=3, first_tolerance=16.0, strict_above=0.3, **more)
    return CurriculumTracker(settings, ALL, seed=1)


def test_wrong_kernels_meet_more_sets_and_narrower_tolerances_as_more_are_right() -> None:
    made = strict()
    assert made.strictness == Strictness(3, 16.0)
    assert made.batch_trained(BatchRates(0.5, 0.2)) == []
    assert made.batch_trained(BatchRates(0.5, 0.3)) == [
        "wrong kernels meet 6 input sets, tolerances × 4: correct 30% over the last 1 batches"
    ]
    assert made.strictness == Strictness(6, 4.0)
    assert "all input sets" in made.batch_trained(BatchRates(0.5, 0.4))[0]
    assert made.strictness is None


def test_after_so_many_updates_everything_is_checked_in_any_case_and_after_a_restart_too() -> None:
    made = strict(strict_after=2)
    made.batch_trained(BatchRates(0.0, 0.0))
    assert made.strictness is not None
    again = strict(strict_after=2)
    again.restore(made.state())
    assert again.batch_trained(BatchRates(0.0, 0.0)) == ["every kernel meets all input sets: 2 updates"]
    assert again.strictness is None


def test_strictness_goes_with_the_stages_of_rewards() -> None:
    made = strict()
    said = made.batch_trained(BatchRates(0.9, 0.6))
    assert [made.stage, made.rises, len(said)] == ["stage2", 1, 2]


def test_by_default_everything_is_checked() -> None:
    assert curriculum().strictness is None
