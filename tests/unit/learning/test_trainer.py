"""The trainer: what an update does to weights and metrics, and what it refuses."""

from __future__ import annotations

import copy
import math

import msgspec
import pytest
import torch

from kbrl_async.errors import ConfigError, NonFiniteLoss
from kbrl_async.learning.metrics import ess, k3, staleness
from kbrl_async.learning.optimizer import rate_at
from kbrl_async.learning.policies.models import causal_lm, load_model, wrap_lora
from kbrl_async.learning.settings import Sft
from kbrl_async.learning.sft import train_sft
from kbrl_async.learning.trainer import Trainer
from protocols.records import TrainGroup, TrainSample
from tests.models import update_settings


def on_policy(model: torch.nn.Module, groups: list[TrainGroup], temperature: float = 1.0) -> list[TrainGroup]:
    """The same groups as if `model` had sampled them."""
    trainer = Trainer(copy.deepcopy(model), update_settings())
    return [
        msgspec.structs.replace(
            g,
            samples=[
                msgspec.structs.replace(s, logprobs=logprobs)
                for s, logprobs in zip(g.samples, trainer.logprobs(g.samples, temperature), strict=True)
            ],
        )
        for g in groups
    ]


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("loss", ["dppo_tv", "grpo", "decoupled", "tis", "cispo", "reinforce"])
def test_an_update_raises_what_was_good_and_lowers_what_was_bad(
    model: torch.nn.Module, groups: list[TrainGroup], loss: str
) -> None:
    groups = on_policy(model, groups)
    samples = [s for g in groups for s in g.samples]
    trainer = Trainer(model, update_settings(loss=loss, learning_rate=1e-3, warmup_steps=0, epochs=1, minibatches=1))
    trainer.step(groups, 1.0)
    after = trainer.logprobs(samples, 1.0)
    gain = sum(s.advantage * (sum(new) - sum(s.logprobs)) for s, new in zip(samples, after, strict=True))
    assert gain > 0


def test_an_unchanged_policy_has_importance_ratio_one(model: torch.nn.Module, groups: list[TrainGroup]) -> None:
    for temperature in (0.7, 1.0):
        trainer = Trainer(copy.deepcopy(model), update_settings(epochs=1, minibatches=1))
        metrics = trainer.step(on_policy(model, groups, temperature), temperature)
        assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-3)
        assert metrics["ratio_p01"] == pytest.approx(1.0, abs=1e-3)
        assert metrics["mismatch_kl"] < 1e-6
        assert metrics["ess"] == pytest.approx(1.0, abs=1e-5)


def test_the_wrong_temperature_shows_as_mismatch(model: torch.nn.Module, groups: list[TrainGroup]) -> None:
    trainer = Trainer(copy.deepcopy(model), update_settings(epochs=1, minibatches=1))
    assert trainer.step(on_policy(model, groups, 0.7), 1.0)["mismatch_kl"] > 1e-2


def test_the_number_of_microbatches_does_not_change_the_update(
    model: torch.nn.Module, groups: list[TrainGroup]
) -> None:
    results = []
    for budget in (4096, 16):
        trained = copy.deepcopy(model)
        trainer = Trainer(trained, update_settings(token_budget=budget, epochs=1, minibatches=1))
        metrics = trainer.step(on_policy(model, groups), 1.0)
        results.append((metrics["loss"], metrics["grad_norm"]))
    assert results[0] == pytest.approx(results[1], rel=1e-3, abs=1e-6)


def test_negative_advantages_can_be_scaled_away(model: torch.nn.Module, groups: list[TrainGroup]) -> None:
    only_bad = [
        msgspec.structs.replace(g, samples=[msgspec.structs.replace(s, advantage=-1.0) for s in g.samples])
        for g in on_policy(model, groups)
    ]
    trainer = Trainer(model, update_settings(negative_scale=0.0, epochs=1, minibatches=1))
    assert trainer.step(only_bad, 1.0)["grad_norm"] < 1e-3


@pytest.mark.parametrize("field", ["advantage", "logprobs"])
def test_a_value_that_is_not_finite_leaves_the_weights_untouched(
    model: torch.nn.Module, groups: list[TrainGroup], field: str
) -> None:
    bad = math.nan if field == "advantage" else [math.inf] * len(groups[0].samples[0].token_ids)
    samples = [msgspec.structs.replace(groups[0].samples[0], **{field: bad}), *groups[0].samples[1:]]
    before = weights(model)
    with pytest.raises(NonFiniteLoss):
        Trainer(model, update_settings()).step([msgspec.structs.replace(groups[0], samples=samples)], 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_a_gradient_that_is_not_finite_is_not_stepped(model: torch.nn.Module, groups: list[TrainGroup]) -> None:
    trainer = Trainer(model, update_settings())
    before = weights(model)
    next(model.parameters()).register_hook(lambda g: g * math.nan)  # type: ignore[no-untyped-call]
    with pytest.raises(NonFiniteLoss, match="gradient"):
        trainer.step(groups, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_lora_trains_the_adapter_only(model: torch.nn.Module, groups: list[TrainGroup]) -> None:
    base = weights(model)
    wrapped = wrap_lora(model, rank=4)
    trainer = Trainer(wrapped, update_settings(learning_rate=1e-3))
    trainer.step(on_policy(wrapped, groups), 1.0)
    frozen = [p.detach() for n, p in causal_lm(wrapped).named_parameters() if "lora_" not in n]
    assert all(torch.equal(a, b) for a, b in zip(base, frozen, strict=True))
    assert any(p.abs().sum() > 0 for n, p in wrapped.named_parameters() if "lora_B" in n)


def test_bf16_keeps_fp32_weights(model: torch.nn.Module, groups: list[TrainGroup]) -> None:
    metrics = Trainer(model, update_settings(dtype="bfloat16")).step(on_policy(model, groups), 1.0)
    assert math.isfinite(metrics["loss"])
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_epochs_times_minibatches_optimiser_steps_are_taken(model: torch.nn.Module, groups: list[TrainGroup]) -> None:
    trainer = Trainer(model, update_settings(epochs=2, minibatches=3))
    trainer.step(groups, 1.0)
    assert trainer.optimizer_step == 6


def test_the_ages_of_the_samples_are_told(model: torch.nn.Module, groups: list[TrainGroup]) -> None:
    metrics = Trainer(model, update_settings()).step(groups, 1.0, version=2)
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (2.0, 2.0)


def test_warm_up_rises_linearly_and_cosine_falls_to_its_floor() -> None:
    assert [rate_at(i, 1.0, 4, "constant", 0.0) for i in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rate_at(100, 1.0, 4, "cosine", 1.0) == pytest.approx(0.1)
    assert rate_at(100, 1.0, 4, "cosine", 0.5) == pytest.approx(0.55)


def test_ess_and_k3_have_their_closed_forms(groups: list[TrainGroup]) -> None:
    assert ess(torch.tensor([1.0, 1.0, 1.0, 1.0])) == 1.0
    assert ess(torch.tensor([1.0, 0.0, 0.0, 0.0])) == 0.25
    assert k3(torch.tensor([math.log(2.0)])) == pytest.approx(2 - 1 - math.log(2.0))
    assert staleness(groups[0].samples, 3) == {"staleness_mean": 3.0, "staleness_max": 3.0}


def test_supervised_training_learns_its_targets(model: torch.nn.Module) -> None:
    examples = [([1, 2, 3], [10, 11, 12]), ([4, 5], [20, 21])]
    report = train_sft(model, examples, Sft(steps=60, batch_tokens=8, lr=1e-2), bf16=False)
    assert report.loss < 0.1
    assert report.target_tokens == 60 * 5


def test_several_workers_learn_what_one_learns(model: torch.nn.Module) -> None:
    examples = [([1, 2, 3], [10, 11, 12]), ([4, 5], [20, 21]), ([6], [7, 8]), ([9, 9], [1])]
    other = copy.deepcopy(model)
    settings = Sft(steps=5, batch_tokens=16, lr=1e-2)
    one = train_sft(model, examples, settings, bf16=False)
    more = train_sft(other, examples, settings, bf16=False, workers=3)
    assert more.loss == pytest.approx(one.loss, rel=1e-4)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_supervised_training_stops_at_its_time_limit(model: torch.nn.Module) -> None:
    ticks = iter(range(1000))
    shares: list[float] = []
    report = train_sft(
        model,
        [([1], [2, 3, 4])],
        Sft(max_seconds=10.0, batch_tokens=4),
        lambda step, loss, share: shares.append(share),
        clock=lambda: float(next(ticks)),
    )
    assert report.steps == 9
    assert shares == sorted(shares)


def test_a_slow_clock_that_cuts_nothing_changes_nothing(model: torch.nn.Module) -> None:
    examples, settings = (
        [([1, 2, 3], [10, 11, 12]), ([4, 5], [20, 21])],
        Sft(steps=30, max_seconds=100.0, batch_tokens=8),
    )
    other = copy.deepcopy(model)
    busy_at_first = iter([0.0, *(60.0 + i for i in range(1000))])
    train_sft(model, examples, settings, clock=lambda: 0.0)
    assert train_sft(other, examples, settings, clock=lambda: next(busy_at_first)).steps == 30
    for idle, busy in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(idle, busy, rtol=0, atol=0)


def test_a_missing_model_folder_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_model("./no/such/model")


def test_the_mismatch_on_equal_weights_is_that_of_samples_as_new_as_the_policy(
    model: torch.nn.Module, groups: list[TrainGroup]
) -> None:
    fresh = on_policy(model, groups, 1.0)
    new = msgspec.structs.replace(
        fresh[0], samples=[msgspec.structs.replace(s, policy_version=1) for s in fresh[0].samples]
    )
    old = [msgspec.structs.replace(g, samples=[_aged(s) for s in g.samples]) for g in fresh[1:]]
    trainer = Trainer(model, update_settings(epochs=1, minibatches=1))
    metrics = trainer.step([new, *old], 1.0, version=1)
    assert metrics["mismatch_kl"] > 1e-3, "old samples differ"
    assert metrics["mismatch_kl_fresh"] < 1e-6, "those of the very same weights do not"


def _aged(sample: TrainSample) -> TrainSample:
    return msgspec.structs.replace(sample, policy_version=0, logprobs=[x - 0.5 for x in sample.logprobs])


def test_what_m2po_masks_does_not_depend_on_how_microbatches_are_packed(
    model: torch.nn.Module, groups: list[TrainGroup]
) -> None:
    """It compares tokens of a whole batch: sequences that share a microbatch must not decide over one another."""
    masked = []
    for budget in (1, 40, 4096):
        trainer = Trainer(
            copy.deepcopy(model),
            update_settings(
                loss="reinforce", corrections=["m2po"], token_budget=budget, epochs=1, minibatches=1, learning_rate=1e-3
            ),
        )
        metrics = trainer.step(groups, 1.0)
        masked.append((round(metrics["masked_share"], 6), round(metrics["loss"], 5)))
    assert masked[0][0] > 0
    assert masked == [masked[0]] * 3
