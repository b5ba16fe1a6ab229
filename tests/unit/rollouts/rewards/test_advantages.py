"""Baselines against their closed forms."""

from __future__ import annotations

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
    turn_returns,
)

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
        assert sum(find_baseline(name)(rewards)) == pytest.approx(0.0, abs=1e-6)


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
        find_baseline("rloo2")


def twice(rewards: list[float]) -> list[float]:
    return [2 * reward for reward in rewards]


def test_a_users_own_baseline_is_found_by_its_place() -> None:
    assert find_baseline(f"{__name__}:twice")([1.0, 2.0]) == [2.0, 4.0]
