"""Baselines against their closed forms."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbrl_async.errors import UserError
from kbrl_async.rollouts.rewards.advantages import (
    batch_scale,
    find_baseline,
    group_mean,
    group_mean_std,
    is_zero_variance,
    leave_one_out,
    settled,
    turn_returns,
)
from kbrl_async.rollouts.settings import BestOfN

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    assert leave_one_out([1.0, 0.0, 0.0, 0.2]) == pytest.approx([1 - 0.2 / 3, -0.4, -0.4, 0.2 - 1 / 3])


def test_group_mean_and_std() -> None:
    assert group_mean([1.0, 0.0]) == [0.5, -0.5]
    assert group_mean_std([1.0, 0.0]) == pytest.approx([1.0, -1.0], abs=1e-5)


@given(REWARDS)
def test_leave_one_out_is_group_mean_times_n_over_n_minus_one(rewards: list[float]) -> None:
    n = len(rewards)
    assert leave_one_out(rewards) == pytest.approx([a * n / (n - 1) for a in group_mean(rewards)], abs=1e-9)


@given(REWARDS)
def test_centred_advantages_sum_to_zero(rewards: list[float]) -> None:
    for name in ("leave_one_out", "mean", "mean_std"):
        assert sum(find_baseline(name, BestOfN())(rewards)) == pytest.approx(0.0, abs=1e-6)


def test_a_single_sample_has_no_advantage() -> None:
    assert leave_one_out([3.0]) == [0.0]


def test_batch_scale_makes_the_root_mean_square_one_and_leaves_zeros_alone() -> None:
    values = [3.0, -4.0]
    scale = batch_scale(values)
    assert sum((v * scale) ** 2 for v in values) / 2 == pytest.approx(1.0)
    assert batch_scale([0.0, 0.0]) == 1.0


def test_zero_variance() -> None:
    assert is_zero_variance([0.3, 0.3, 0.3])
    assert not is_zero_variance([0.3, 0.3, 0.31])


def test_turn_returns_discount_later_turns() -> None:
    assert turn_returns([0.0, 1.0, 2.0], gamma=0.4, how="sum") == pytest.approx([0.4 + 0.32, 1.8, 2.0])
    assert turn_returns([0.0, 1.0, 2.0], gamma=0.4, how="max") == pytest.approx([0.4, 1.0, 2.0])


def test_an_unknown_baseline_is_an_error_of_the_user() -> None:
    with pytest.raises(UserError, match="rloo2"):
        find_baseline("rloo2", BestOfN())


def twice(rewards: list[float]) -> list[float]:
    return [2 * reward for reward in rewards]


def test_a_users_own_baseline_is_found_by_its_place() -> None:
    assert find_baseline(f"{__name__}:twice", BestOfN())([1.0, 2.0]) == [2.0, 4.0]


def test_equal_kernels_that_were_timed_apart_are_worth_the_same() -> None:
    """Eight correct kernels whose intervals overlap differ by noise: 27 of 30 such groups counted as different."""
    rewards, spreads = [0.80, 0.81, 0.82, 0.805], [0.03, 0.02, 0.04, 0.03]
    found = settled(rewards, spreads, ["a", "b", "c", "d"])
    assert found == pytest.approx([sum(rewards) / 4] * 4)
    assert is_zero_variance(found)


def test_what_timing_tells_apart_stays_apart() -> None:
    assert settled([0.6, 0.9], [0.05, 0.05], ["a", "b"]) == [0.6, 0.9]


def test_overlaps_do_not_chain() -> None:
    """Each overlaps its neighbour, the first and the last do not."""
    assert settled([0.5, 0.55, 0.6], [0.06, 0.06, 0.06], ["", "", ""]) == pytest.approx([0.525, 0.525, 0.6])


def test_exact_rewards_within_an_interval_stay_what_they_are() -> None:
    assert settled([0.3, 0.31, 0.3], [0.0, 0.0, 0.5], ["a", "b", "c"]) == [0.3, 0.31, 0.3]


def test_the_same_source_shares_one_timing() -> None:
    spreads = [1e-3, 1e-3, 1e-3]
    assert settled([0.5, 0.9, 0.2], spreads, ["same", "same", "other"]) == pytest.approx([0.7, 0.7, 0.2])


def test_what_was_not_timed_is_as_it_is_though_its_source_is_the_same() -> None:
    assert settled([0.5, 0.9, 0.2], [0.0, 1e-3, 0.0], ["same", "same", "same"]) == [0.5, 0.9, 0.2]


@given(REWARDS, st.randoms())
def test_settling_does_not_depend_on_the_order(rewards: list[float], shuffle: random.Random) -> None:
    triples = [(reward, abs(reward) / 10, str(place % 3)) for place, reward in enumerate(rewards)]
    order = list(range(len(triples)))
    shuffle.shuffle(order)
    straight = settled(*map(list, zip(*triples, strict=True)))
    shuffled = settled(*map(list, zip(*(triples[i] for i in order), strict=True)))
    assert [shuffled[order.index(i)] for i in order] == pytest.approx([straight[i] for i in order])


def test_next_to_no_deviation_does_not_become_advantages_of_one() -> None:
    assert max(group_mean_std([0.5, 0.5004])) < 0.02
    assert group_mean_std([0.0, 1.0]) == pytest.approx([-1.0, 1.0], abs=1e-5)


def test_best_of_n_takes_its_rules() -> None:
    imitated = find_baseline("best_of_n", BestOfN(keep=1, above=0.2))
    assert imitated([0.3, 0.4, 0.1]) == [0.0, 1.0, 0.0]
