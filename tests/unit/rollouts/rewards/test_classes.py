"""Classes of tokens: the plan's tokens and the kernel's are paid apart, each against its own baseline."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.rollouts.buffer.batching import teaches_nothing, train_groups
from kbrl_async.rollouts.buffer.group import Group
from kbrl_async.rollouts.rewards.advantages import leave_one_out
from kbrl_async.rollouts.rewards.classes import class_rewards, plan_advantages
from kbrl_async.rollouts.rewards.presets import Preset, find_presets, plan_reward_of, plan_spread_of, reward_of
from kbrl_async.rollouts.settings import Reward
from kbrl_async.rollouts.turns import with_returns
from protocols.records import BenchReport, BuildReport, Fault, Generation, Timing, TrainSample, Verdict
from tests.extension.kbrl_example_parts.advantage import over_the_median
from tests.plans import buffer_rules, turn_rules
from tests.records import timing, turn


def sample(reward: float, plan: float = 0.0, *, weight: float = 0.1, code: tuple[int, int] = (2, 4)) -> TrainSample:
    plain = TrainSample("r", [1], [2] * 6, [-0.5] * 6, 0.0, reward, 0)
    return msgspec.structs.replace(plain, plan_reward=plan, plan_weight=weight, code_start=code[0], code_end=code[1])


def group(*samples: TrainSample) -> Group:
    found = Group("g", "p", 1, len(samples), 0)
    for number, member in enumerate(samples):
        found.scored[f"g.r{number}"] = [member]
    return found


def advantages(*samples: TrainSample, baseline: str = "leave_one_out") -> list[tuple[float, float]]:
    (made,) = train_groups([group(*samples)], buffer_rules(advantage=baseline, scale_advantages=False))
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


def timed(plan: float, spread: float, source: str) -> TrainSample:
    return msgspec.structs.replace(sample(1.0, plan), plan_spread=spread, source=source)


def test_plans_whose_speeds_timing_cannot_tell_apart_are_equal() -> None:
    """Three right kernels, 2.00, 2.05 and 2.10 times as fast give or take .1, and one that is five times as fast."""
    alike = [timed(plan, 0.2, name) for plan, name in ((2.0, "a"), (2.05, "b"), (2.1, "c"))]
    assert teaches_nothing(group(*alike), buffer_rules())
    found = [plan for _, plan in advantages(*alike, timed(5.0, 0.2, "d"))]
    assert found[0] == found[1] == found[2] < 0 < found[3]


def test_what_timing_leaves_open_of_a_plan_is_known_from_its_interval() -> None:
    (preset,) = find_presets(Reward(preset="plan_code"))
    made = turn(WRITTEN, BuildReport(Fault.OK), benched(Fault.OK, timing(2.0, 0.25)))
    assert plan_spread_of(made, preset) == pytest.approx(0.5)
    assert plan_spread_of(WRONG, preset) == 0.0


@pytest.mark.parametrize(("how", "spread"), [("sum", 0.2 + 0.5 * 0.1), ("max", 0.5 * 0.1)])
def test_a_return_is_as_open_as_the_turns_that_it_is_made_of(how: str, spread: float) -> None:
    """In a maximum a worse turn's interval says nothing where it ends below what the best one comes to."""
    turns = [sample(0.1), msgspec.structs.replace(sample(0.9), turn=1)]
    turns = [msgspec.structs.replace(s, reward_spread=e) for s, e in zip(turns, (0.2, 0.1), strict=True)]
    first, last = with_returns(turns, turn_rules(2, 0.5, returns=how))
    assert first.reward_spread == pytest.approx(spread)
    assert last.reward_spread == pytest.approx(0.1)


def test_without_a_weight_there_is_one_class() -> None:
    assert [plan for _, plan in advantages(sample(1.0, 2.0, weight=0.0), sample(0.0, 0.0, weight=0.0))] == [0.0, 0.0]
    assert class_rewards([sample(1.0, weight=0.0)]) == [[1.0]]


def test_a_baseline_is_not_asked_about_plans_where_there_are_none() -> None:
    """A user's own may be a median, which nothing at all has not."""
    plain = [sample(reward, weight=0.0) for reward in (3.0, 1.0, 0.0)]
    assert plan_advantages(plain, over_the_median) == [0.0, 0.0, 0.0]


def test_a_batch_is_brought_to_one_scale_that_keeps_the_classes_in_proportion() -> None:
    chosen = group(sample(1.0, 2.0), sample(0.0, 0.0))
    (made,) = train_groups([chosen], buffer_rules())
    assert made.samples[0].advantage == pytest.approx(1.0)
    assert made.samples[0].plan_advantage == pytest.approx(0.1 * 2.0)


def test_a_group_whose_plans_alone_differ_still_teaches() -> None:
    same_code = group(sample(1.0, 2.0), sample(1.0, 0.0))
    assert not teaches_nothing(same_code, buffer_rules())
    all_same = group(sample(1.0, 2.0), sample(1.0, 2.0))
    assert teaches_nothing(all_same, buffer_rules())


def test_plan_advantages_of_nothing_are_nothing() -> None:
    assert plan_advantages([], leave_one_out) == []


def test_a_plan_earns_the_discounted_plan_rewards_of_later_turns() -> None:
    turns = [sample(0.0, 1.0), sample(0.0, 0.5)]
    assert [s.plan_reward for s in with_returns(turns, turn_rules(2, gamma=0.4))] == pytest.approx([1.2, 0.5])


# ── presets ───────────────────────────────────────────────────────────────────────────────────────────────────────


def benched(fault: Fault, timing: Timing | None = None) -> BenchReport:
    return BenchReport(Verdict(fault), timing)


WRITTEN = Generation(0, [1], [1], [-1.0], "", "stop")
FAST = turn(WRITTEN, BuildReport(Fault.OK), benched(Fault.OK, timing(2.0, 0.0)))
WRONG = turn(WRITTEN, BuildReport(Fault.OK), benched(Fault.INCORRECT))
INVALID = turn(WRITTEN, BuildReport(Fault.COMPILE_ERROR))
CHEAT = turn(WRITTEN, BuildReport(Fault.OK), benched(Fault.CHEATING))


def preset(name: str, **settings: Any) -> Preset:
    return find_presets(Reward(preset=name, **settings))[0]


def test_plan_code_pays_code_by_correctness_and_the_plan_by_speedup_behind_one_gate() -> None:
    pays = preset("plan_code")
    paid = [(reward_of(found, pays), plan_reward_of(found, pays)) for found in (FAST, WRONG, INVALID)]
    assert paid == [(1.0, 2.0), (0.0, 0.0), (0.0, 0.0)]
    assert pays.plan_weight == 0.1


def test_cheating_pays_no_plan() -> None:
    assert plan_reward_of(CHEAT, preset("plan_code")) == 0.0


def test_any_preset_can_pay_a_plan() -> None:
    pays = preset("stage3", plan_part="speed")
    assert (pays.plan_part, pays.plan_weight) == ("speed", 0.1)
    assert plan_reward_of(FAST, pays) == pytest.approx(2 / 3)
    assert preset("plan_code", plan_weight=0.3).plan_weight == 0.3
    assert preset("plan_code", plan_weight=0.0).plan_weight == 0.0
    assert plan_reward_of(FAST, preset("stage3")) == 0.0


def test_a_weight_without_a_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="weighs no part"):
        preset("stage3", plan_weight=0.2)
