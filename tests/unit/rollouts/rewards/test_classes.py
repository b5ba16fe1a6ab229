"""Classes of tokens: the plan's tokens and the kernel's are paid apart, each against its own baseline."""

from __future__ import annotations

import msgspec
import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.rollouts.buffer.batching import teaches_nothing, train_groups
from kbrl_async.rollouts.buffer.group import Group
from kbrl_async.rollouts.rewards.classes import class_rewards, plan_advantages
from kbrl_async.rollouts.rewards.parts import RewardParts
from kbrl_async.rollouts.rewards.presets import find_preset, plan_reward_of, reward_of, with_plan
from kbrl_async.rollouts.turns import TurnOptions, with_returns
from protocols.records import Fault, TrainSample


def sample(reward: float, plan: float = 0.0, *, weight: float = 0.1, code: tuple[int, int] = (2, 4)) -> TrainSample:
    plain = TrainSample("r", [1], [2] * 6, [-0.5] * 6, 0.0, reward, 0)
    return msgspec.structs.replace(plain, plan_reward=plan, plan_weight=weight, code_start=code[0], code_end=code[1])


def group(*samples: TrainSample) -> Group:
    found = Group("g", "p", 1, len(samples), 0)
    for number, member in enumerate(samples):
        found.scored[f"g.r{number}"] = [member]
    return found


def advantages(*samples: TrainSample, baseline: str = "leave_one_out") -> list[tuple[float, float]]:
    (made,) = train_groups([group(*samples)], baseline, scale_by_std=False)
    return [(s.advantage, s.plan_advantage) for s in made.samples]


def test_the_plan_is_paid_by_alpha_times_its_own_leave_one_out() -> None:
    """Code rewards 1, 0, 0: advantages 1, −.5, −.5. Plan rewards 2, 1, 0: advantages 1.5, 0, −1.5, times α = .1."""
    found = advantages(sample(1.0, 2.0), sample(0.0, 1.0), sample(0.0, 0.0))
    assert [code for code, _ in found] == pytest.approx([1.0, -0.5, -0.5])
    assert [plan for _, plan in found] == pytest.approx([0.15, 0.0, -0.15])


def test_a_sample_without_a_known_kernel_stands_apart_from_the_plans() -> None:
    broken = sample(0.0, 9.0, code=(0, 0))
    found = advantages(sample(1.0, 2.0), sample(1.0, 0.0), broken)
    assert [plan for _, plan in found] == pytest.approx([0.2, -0.2, 0.0])


def test_without_a_weight_there_is_one_class() -> None:
    assert [plan for _, plan in advantages(sample(1.0, 2.0, weight=0.0), sample(0.0, 0.0, weight=0.0))] == [0.0, 0.0]
    assert class_rewards([sample(1.0, weight=0.0)]) == [[1.0]]


def test_a_batch_is_brought_to_one_scale_that_keeps_the_classes_in_proportion() -> None:
    chosen = group(sample(1.0, 2.0), sample(0.0, 0.0))
    (made,) = train_groups([chosen], "leave_one_out", scale_by_std=True)
    assert made.samples[0].advantage == pytest.approx(1.0)
    assert made.samples[0].plan_advantage == pytest.approx(0.1 * 2.0)


def test_a_group_whose_plans_alone_differ_still_teaches() -> None:
    same_code = group(sample(1.0, 2.0), sample(1.0, 0.0))
    assert not teaches_nothing(same_code, "leave_one_out", filter_zero_variance=True)
    all_same = group(sample(1.0, 2.0), sample(1.0, 2.0))
    assert teaches_nothing(all_same, "leave_one_out", filter_zero_variance=True)


def test_plan_advantages_of_nothing_are_nothing() -> None:
    assert plan_advantages([], "leave_one_out") == []


def test_a_plan_earns_the_discounted_plan_rewards_of_later_turns() -> None:
    turns = [sample(0.0, 1.0), sample(0.0, 0.5)]
    assert [s.plan_reward for s in with_returns(turns, TurnOptions(2, gamma=0.4))] == pytest.approx([1.2, 0.5])


# ── presets ───────────────────────────────────────────────────────────────────────────────────────────────────────

FAST = RewardParts(Fault.OK, 1, 1, 1, valid=1, correctness=1, correct=1, speed=0.5, speedup=2.0)
WRONG = RewardParts(Fault.INCORRECT, 1, 1, 1, valid=1)
INVALID = msgspec.structs.replace(FAST, valid=0.0)


def test_plan_code_pays_code_by_correctness_and_the_plan_by_speedup_behind_one_gate() -> None:
    preset = find_preset("plan_code")
    paid = [(reward_of(parts, preset), plan_reward_of(parts, preset)) for parts in (FAST, WRONG, INVALID)]
    assert paid == [(1.0, 2.0), (0.0, 0.0), (0.0, 0.0)]
    assert preset.plan_weight == 0.1


def test_cheating_pays_no_plan() -> None:
    cheat = msgspec.structs.replace(FAST, fault=Fault.CHEATING)
    assert plan_reward_of(cheat, find_preset("plan_code")) == 0.0


def test_any_preset_can_pay_a_plan() -> None:
    preset = with_plan(find_preset("stage3"), "speed", None)
    assert (preset.plan_part, preset.plan_weight) == ("speed", 0.1)
    assert plan_reward_of(FAST, preset) == 0.5
    assert with_plan(find_preset("plan_code"), None, 0.3).plan_weight == 0.3
    assert with_plan(find_preset("plan_code"), None, 0.0).plan_weight == 0.0
    assert plan_reward_of(FAST, find_preset("stage3")) == 0.0


def test_a_weight_without_a_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="weighs no part"):
        with_plan(find_preset("stage3"), None, 0.2)
