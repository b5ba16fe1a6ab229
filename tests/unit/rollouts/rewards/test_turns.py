"""Refinement turns: when a rollout goes on, what its turns are worth, and how their tasks are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbrl_async.rollouts.turns import TurnScore, goes_on, split_turn_id, turn_id, with_returns
from protocols.records import TrainSample
from tests.plans import turn_rules
from tests.records import sample

WRONG, RIGHT, FAST = TurnScore(0.1), TurnScore(0.7, True, 0.5), TurnScore(1.0, True, 2.0)
FOUR = turn_rules(max_turns=4)


def samples(*scores: float) -> list[TrainSample]:
    return [sample("r", score, 3, turn) for turn, score in enumerate(scores)]


def test_a_single_turn_rollout_never_goes_on() -> None:
    assert not goes_on([WRONG], turn_rules())


def test_all_turns_are_taken_by_default_even_after_a_correct_one() -> None:
    assert goes_on([RIGHT], FOUR)
    assert goes_on([RIGHT, FAST, RIGHT], FOUR)
    assert not goes_on([WRONG] * 4, FOUR)


def test_stopping_at_the_first_correct_kernel() -> None:
    options = turn_rules(max_turns=4, stop="correct")
    assert goes_on([WRONG], options)
    assert not goes_on([WRONG, RIGHT], options)


def test_stopping_at_a_speedup_looks_at_the_lower_end_of_a_correct_kernel() -> None:
    options = turn_rules(max_turns=4, stop="speedup", stop_speedup=1.5)
    assert goes_on([RIGHT], options)
    assert goes_on([TurnScore(1.0, False, 9.0)], options)
    assert not goes_on([FAST], options)


def test_stopping_when_nothing_gets_better() -> None:
    options = turn_rules(max_turns=9, stop="plateau", patience=2)
    assert goes_on([RIGHT, WRONG], options)
    assert not goes_on([RIGHT, WRONG, WRONG], options)
    assert goes_on([WRONG, WRONG, RIGHT], options)


def test_each_turn_earns_its_own_score_and_the_discounted_later_ones() -> None:
    returns = [s.reward for s in with_returns(samples(0.0, 0.5, 1.0), turn_rules(3, gamma=0.4))]
    assert returns == pytest.approx([0.4 * 0.5 + 0.16, 0.5 + 0.4, 1.0])


def test_the_best_discounted_score_may_count_instead() -> None:
    options = turn_rules(3, gamma=0.5, returns="max")
    assert [s.reward for s in with_returns(samples(0.1, 1.0, 0.2), options)] == pytest.approx([0.5, 1.0, 0.2])


def test_tokens_and_versions_of_a_turn_stay_its_own() -> None:
    assert [(s.turn, s.policy_version, s.token_ids) for s in with_returns(samples(0.0, 1.0), FOUR)] == [
        (0, 3, [2, 3]),
        (1, 3, [2, 3]),
    ]


@given(st.text("gr.0123t", min_size=1, max_size=12), st.integers(0, 99))
def test_a_turns_task_names_its_rollout_and_turn(rollout: str, turn: int) -> None:
    rollout_id = rollout + ".r0"
    assert split_turn_id(turn_id(rollout_id, turn)) == (rollout_id, turn)
