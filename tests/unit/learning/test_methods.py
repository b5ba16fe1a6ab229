"""What the methods beside policy gradients really minimise, from rewards to the loss."""

from __future__ import annotations

import pytest
import torch

from kbrl_async.errors import ConfigError
from kbrl_async.learning.losses import Tokens, token_weights
from kbrl_async.learning.settings import LOSSES
from kbrl_async.rollouts.buffer.batching import teaches_nothing, train_groups
from kbrl_async.rollouts.buffer.group import Group
from kbrl_async.rollouts.buffer.rules import BufferRules
from kbrl_async.rollouts.rewards.advantages import IMITATES
from kbrl_async.runs.config import Config, load
from protocols.records import TrainGroup, TrainSample
from tests.plans import buffer_rules

LENGTH = 3
REWARDS = [0.1, 0.9, 0.55, 0.7, 0.3, 0.95, 0.5, 0.0, 0.6, 0.2]
"""The best three, ranked: 5, 1, 3."""


def group(rewards: list[float]) -> Group:
    found = Group("g", "p", 1, len(rewards), 0)
    for number, reward in enumerate(rewards):
        # with ids in another order than the rewards, so that only ranking finds the best
        found.scored[f"g.r{number}"] = [TrainSample(f"g.r{number}", [1], [2] * LENGTH, [-1.0] * LENGTH, 0.0, reward, 0)]
    return found


def log_probs(n: int) -> torch.Tensor:
    return -torch.linspace(0.1, 2.0, n * LENGTH).requires_grad_()


def loss_of(method: str, groups: list[TrainGroup], log_pi: torch.Tensor) -> torch.Tensor:
    """As the trainer puts it together, of one minibatch."""
    config = load(overrides=[f"method={method}"])
    samples = [sample for each in groups for sample in each.samples]
    lengths = torch.full((len(samples),), LENGTH)
    place = torch.arange(len(samples)).repeat_interleave(LENGTH)
    advantage = torch.tensor([sample.advantage for sample in samples])[place]
    per_token, _ = LOSSES.load(config.loss)(Tokens(log_pi, torch.zeros_like(log_pi), advantage), config.learner)
    return (per_token * token_weights(lengths, place, config.learner.normalise, 1)).sum()


def rules_of(config: Config) -> BufferRules:
    return buffer_rules(
        advantage=config.advantage,
        scale_advantages=config.learner.scale_advantages,
        truncated=config.learner.truncated,
        best_of_n=config.best_of_n,
    )


def made(method: str, *rewards: list[float]) -> list[TrainGroup]:
    config = load(overrides=[f"method={method}"])
    return train_groups([group(r) for r in rewards], rules_of(config))


def test_best_of_n_ranks_by_reward_and_is_then_supervised_fine_tuning_on_the_best_three() -> None:
    log_pi = log_probs(10)
    groups = made("best_of_n", REWARDS)
    assert [s.rollout_id for s in groups[0].samples if s.advantage > 0] == ["g.r1", "g.r3", "g.r5"]
    chosen = torch.tensor([1, 3, 5])
    supervised = -log_pi.view(10, LENGTH)[chosen].mean()
    assert loss_of("best_of_n", groups, log_pi).item() == pytest.approx(supervised.item(), rel=1e-5)


def test_a_group_without_a_good_rollout_teaches_best_of_n_nothing() -> None:
    assert teaches_nothing(group([0.5, 0.4, 0.1]), buffer_rules(advantage="best_of_n"))
    assert not teaches_nothing(group([0.6, 0.6, 0.6]), buffer_rules(advantage="best_of_n"))


def test_reward_weighted_sft_is_cross_entropy_with_weights_that_add_up_to_one() -> None:
    log_pi = log_probs(10)
    weights = torch.tensor(REWARDS) / sum(REWARDS)
    weighted = -(weights * log_pi.view(10, LENGTH).mean(1)).sum()
    found = loss_of("reward_weighted_sft", made("reward_weighted_sft", REWARDS), log_pi)
    assert found.item() == pytest.approx(weighted.item(), rel=1e-5)


def test_reinforce_weighs_by_what_is_above_the_problems_running_mean() -> None:
    learned = group([1.0, 0.0, 0.5, 0.5])
    learned.running = {0: 0.25}
    (found,) = train_groups([learned], rules_of(load(overrides=["method=reinforce"])))
    assert [s.advantage for s in found.samples] == pytest.approx([0.75, -0.25, 0.25, 0.25])


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["learner.dual_clip=3"], "has no part in loss=dppo_tv"),
        (["loss=grpo", "learner.dual_clip=0.5"], "would cut the loss of every token"),
        (["loss=grpo", "learner.clip_low=1"], "never clips"),
        (["method=best_of_n", "group_size=3"], "keeps all of a group, whose group_size is 3"),
        (["method=reward_weighted_sft", "corrections=opsm"], "has none"),
        (["advantage=best_of_n", "group_size=10"], "holds them at the old policy"),
        (["method=reinforce", "advantage=reward_weight"], "needs a baseline"),
        (["method=reinforce", "preset=grpo"], "method=reinforce and preset=grpo differ in loss and advantage"),
        (["method=best_of_n", "preset=rloo"], "differ in advantage"),
        (["group_size=1"], "advantage=leave_one_out compares the rollouts of a group"),
        (["learner.constants=tis.cap=3"], "is no constant of dppo_tv"),
        (["reward.plan_weight=0.2"], "weighs no part"),
        (["preset=rloo", "corrections=tis,tis_sequence"], "two corrections weigh"),
        (["learner.kl_weight=0.1"], "do not go together"),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_cause(words: list[str], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause) as refused:
        load(overrides=words)
    assert refused.value.cure


@pytest.mark.parametrize("method", ["grpo", "reinforce", "best_of_n", "reward_weighted_sft", "sft"])
def test_the_fusion_recipes_differ_in_their_method_only(method: str) -> None:
    config, anchor = load([f"configs/fusion_{method}.yaml"]), load(["configs/fusion_grpo.yaml"])
    same = (
        "level",
        "batch_size",
        "group_size",
        "prompt",
        "timing_bench",
        "eval_samples",
        "learning_rate",
        "sft",
    )
    assert config.method == method
    assert config.reward.preset == ("correct" if config.advantage in IMITATES and method != "sft" else "stage2")
    assert [getattr(config, key) for key in same] == [getattr(anchor, key) for key in same]
    assert method == "sft" or config.max_steps == anchor.max_steps
