"""The groups of a batch as the learner gets them: each sample with its advantage, all on one scale. Pure.

::

    group ─ by turn ─▶ baseline of each class of tokens ─▶ advantages ─▶ × one factor for the whole batch

Invariant: the same groups give the same advantages, in whatever order their rollouts ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kbrl_async.rollouts.buffer.group import Group
from kbrl_async.rollouts.rewards.advantages import IMITATES, batch_scale, find_baseline, is_zero_variance, mean_scale
from kbrl_async.rollouts.rewards.classes import class_rewards, plan_advantages
from protocols.records import TrainGroup, TrainSample


def train_groups(groups: Sequence[Group], baseline: str, *, scale_advantages: bool) -> list[TrainGroup]:
    """The groups with advantages; imitated samples get weights of mean 1, others are divided by their root mean square
    where `scale_advantages` says so."""
    found = [_with_advantages(group, baseline) for group in groups]
    advantages = [s.advantage for group in found for s in group.samples]
    if baseline in IMITATES:
        scale = mean_scale(advantages)
    elif scale_advantages:
        scale = batch_scale(advantages)
    else:
        return found
    return [msgspec.structs.replace(g, samples=[_scaled(s, scale) for s in g.samples]) for g in found]


def teaches_nothing(group: Group, baseline: str, *, filter_zero_variance: bool) -> bool:
    """No sample of the group would move the policy (DAPO's filter), in no turn and no class of tokens."""
    rewards = [of_class for turn in by_turn(group).values() for of_class in class_rewards(turn)]
    if baseline in IMITATES:
        advantages = find_baseline(baseline)
        return not any(any(advantages(of_class)) for of_class in rewards)
    return filter_zero_variance and all(map(is_zero_variance, rewards))


def by_turn(group: Group) -> dict[int, list[TrainSample]]:
    """Samples of a group by turn, in the order of their rollouts."""
    found: dict[int, list[TrainSample]] = {}
    for rollout_id in sorted(group.scored):
        for sample in group.scored[rollout_id]:
            found.setdefault(sample.turn, []).append(sample)
    return dict(sorted(found.items()))


def _with_advantages(group: Group, baseline: str) -> TrainGroup:
    samples = [
        msgspec.structs.replace(sample, advantage=of_code, plan_advantage=of_plan)
        for turn, members in by_turn(group).items()
        for sample, of_code, of_plan in zip(
            members, _advantages(group, turn, members, baseline), plan_advantages(members, baseline), strict=True
        )
    ]
    return TrainGroup(group.group_id, group.problem_id, group.level, samples)


def _advantages(group: Group, turn: int, samples: Sequence[TrainSample], baseline: str) -> list[float]:
    rewards = [sample.reward for sample in samples]
    if baseline == "running_mean" and turn in group.running:
        return [reward - group.running[turn] for reward in rewards]
    return find_baseline(baseline)(rewards)


def _scaled(sample: TrainSample, scale: float) -> TrainSample:
    return msgspec.structs.replace(
        sample, advantage=sample.advantage * scale, plan_advantage=sample.plan_advantage * scale
    )
