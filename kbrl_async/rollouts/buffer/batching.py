"""The groups of a batch as the learner gets them: each sample with its advantage, all on one scale. Pure.

::

    group ─ by turn ─▶ baseline of each class of tokens ─▶ advantages ─▶ × one factor for the whole batch

Invariant: the same groups give the same advantages, in whatever order their rollouts ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kbrl_async.rollouts.buffer.group import Group
from kbrl_async.rollouts.buffer.rules import BatchRules
from kbrl_async.rollouts.rewards.advantages import (
    IMITATES,
    NEEDS_NO_GROUP,
    batch_scale,
    is_zero_variance,
    mean_scale,
    settled,
)
from kbrl_async.rollouts.rewards.classes import class_rewards, plan_advantages
from protocols.records import TrainGroup, TrainSample


def train_groups(groups: Sequence[Group], rules: BatchRules) -> list[TrainGroup]:
    """The groups with advantages; imitated samples get weights of mean 1, others are divided by their root mean square
    where the rules say so."""
    found = [_with_advantages(group, rules) for group in groups]
    advantages = [s.advantage for group in found for s in group.samples]
    if rules.advantage in IMITATES:
        scale = mean_scale(advantages)
    elif rules.scale_advantages:
        scale = batch_scale(advantages)
    else:
        return found
    return [msgspec.structs.replace(g, samples=[_scaled(s, scale) for s in g.samples]) for g in found]


def teaches_nothing(group: Group, rules: BatchRules) -> bool:
    """No sample of the group would move the policy (DAPO's filter), in no turn and no class of tokens."""
    turns = [turn for turn in by_turn(group).values() if not all(_is_masked(sample, rules) for sample in turn)]
    rewards = [of_class for turn in turns for of_class in class_rewards(turn)]
    if rules.advantage in IMITATES:
        return not any(any(rules.baseline(of_class)) for of_class in rewards)
    return not rewards or (rules.advantage not in NEEDS_NO_GROUP and all(map(is_zero_variance, rewards)))


def by_turn(group: Group) -> dict[int, list[TrainSample]]:
    """Samples of a group by turn, in the order of their rollouts, without differences that timing does not bear out."""
    found: dict[int, list[TrainSample]] = {}
    for rollout_id in sorted(group.scored):
        for sample in group.scored[rollout_id]:
            found.setdefault(sample.turn, []).append(sample)
    return {turn: _settled(samples) for turn, samples in sorted(found.items())}


def _settled(samples: list[TrainSample]) -> list[TrainSample]:
    sources = [sample.source for sample in samples]
    rewards = settled([s.reward for s in samples], [s.reward_spread for s in samples], sources)
    plans = settled([s.plan_reward for s in samples], [s.plan_spread for s in samples], sources)
    return [
        s if (r, p) == (s.reward, s.plan_reward) else msgspec.structs.replace(s, reward=r, plan_reward=p)
        for s, r, p in zip(samples, rewards, plans, strict=True)
    ]


def _with_advantages(group: Group, rules: BatchRules) -> TrainGroup:
    samples = [
        msgspec.structs.replace(sample, advantage=of_code, plan_advantage=of_plan)
        for turn, members in by_turn(group).items()
        for sample, of_code, of_plan in zip(
            members, _advantages(group, turn, members, rules), plan_advantages(members, rules.baseline), strict=True
        )
        if not _is_masked(sample, rules)
    ]
    return TrainGroup(group.group_id, group.problem_id, group.level, samples)


def _is_masked(sample: TrainSample, rules: BatchRules) -> bool:
    return sample.truncated and rules.truncated == "mask"


def _advantages(group: Group, turn: int, samples: Sequence[TrainSample], rules: BatchRules) -> list[float]:
    rewards = [sample.reward for sample in samples]
    if rules.advantage == "running_mean" and turn in group.running:
        return [reward - group.running[turn] for reward in rewards]
    return rules.baseline(rewards)


def _scaled(sample: TrainSample, scale: float) -> TrainSample:
    return msgspec.structs.replace(
        sample, advantage=sample.advantage * scale, plan_advantage=sample.plan_advantage * scale
    )
