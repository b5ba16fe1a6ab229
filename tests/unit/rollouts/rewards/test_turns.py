"""Refinement turns: when a rollout goes on, what its turns are worth, and how their tasks are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbrl_async.rollouts.manager import RolloutManager, RolloutRules
from kbrl_async.rollouts.prompts.first import FirstPrompts
from kbrl_async.rollouts.scoring import ScoredTurn
from kbrl_async.rollouts.trajectories import TurnTaken
from kbrl_async.rollouts.turns import TurnScore, goes_on, is_single, split_turn_id, turn_id, with_returns
from protocols.records import Fault, Problem, Purpose, RolloutRequest, SamplingParams, TrainSample
from tests.plans import turn_rules
from tests.records import sample, stats

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


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 400, 600), (1.0, 1000, 1000)])
def test_a_share_of_groups_takes_one_turn_only(share: float, least: int, most: int) -> None:
    rules = turn_rules(4, single_share=share)
    single = [is_single(f"g{number:06d}", rules) for number in range(1000)]
    assert least <= sum(single) <= most
    assert single == [is_single(f"g{number:06d}", rules) for number in range(1000)]


def test_an_evaluation_takes_all_turns_of_such_groups() -> None:
    class Nothing:
        def turns(self, _: str) -> list[TurnTaken]:
            return []

    rules = RolloutRules("multi_turn", "c", "compact", turn_rules(4, single_share=1.0))
    prompts = FirstPrompts("compact", "c")
    manager = RolloutManager(rules, Nothing(), prompts, SamplingParams(0))  # type: ignore[arg-type] # all that is asked
    problem = Problem("L1/a", 1, "a", "")
    scored = ScoredTurn(sample("g0.r0", 0.0), stats(0.0), Fault.INCORRECT, None, None)
    goes_on = {
        purpose: manager.goes_on(RolloutRequest("g0.r0", "g0", problem, "", "c", SamplingParams(0), purpose), scored)
        for purpose in (Purpose.TRAIN, Purpose.EVAL)
    }
    assert goes_on == {Purpose.TRAIN: False, Purpose.EVAL: True}
