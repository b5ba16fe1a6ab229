"""The fast path: fused layers, flat rows and shared prompts give the update of the model's own modules."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import structlog
import torch

from kbrl_async.errors import ConfigError
from kbrl_async.learning import trainer as trainer_module
from kbrl_async.learning.forward_backward import FusedPasses, sharing
from kbrl_async.learning.fused import decoder, memory
from kbrl_async.learning.fused.families import why_not, why_not_by_hand
from kbrl_async.learning.fused.flat import bundle
from kbrl_async.learning.logprobs import sequence_logprobs, token_logprobs
from kbrl_async.learning.policies.models import add_adapters, causal_lm, wrap_lora
from kbrl_async.learning.trainer import Trainer
from protocols.records import TrainGroup, TrainSample
from tests.models import VOCABULARY, drawn_sample, tiny_model, update_settings


@pytest.fixture
def adapted() -> torch.nn.Module:
    """Norm weights, biases and adapters are all far from where they begin, so that forgetting one shows."""
    plain = tiny_model(scale=1.0, intermediate_size=48, num_hidden_layers=3, tie_word_embeddings=False)
    wrapped = wrap_lora(plain, rank=4)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
            elif parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "lora_" not in name:
                parameter.mul_(4)
    return wrapped


@pytest.fixture
def prompted() -> list[TrainGroup]:
    """One group with a long prompt, two with short ones."""
    rng = random.Random(0)
    groups = []
    for g, length in enumerate((75, 5, 9)):
        prompt = [rng.randrange(VOCABULARY) for _ in range(length)]
        samples = [drawn_sample(rng, f"g{g}.r{r}", prompt, rng.randint(1, 12)) for r in range(4)]
        groups.append(TrainGroup(f"g{g}", "p", 1, samples))
    return groups


def update(
    model: torch.nn.Module, groups: list[TrainGroup], monkeypatch: pytest.MonkeyPatch, **options: object
) -> tuple[Trainer, dict[str, float], dict[str, torch.Tensor]]:
    """A trainer after one update, its metrics and gradients."""
    trainer = Trainer(
        copy.deepcopy(model),
        update_settings(epochs=1, minibatches=1, loss="decoupled", **options),  # type: ignore[arg-type]
    )
    gradients: dict[str, torch.Tensor] = {}
    step = trainer_module.guarded_step

    def spy(*arguments: object) -> float:
        gradients.update({n: p.grad.clone() for n, p in trainer.parameters.items() if p.grad is not None})
        return step(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "guarded_step", spy)
        return trainer, trainer.step(groups, 0.7), gradients


@pytest.mark.parametrize(
    ("share", "budget", "plan"),
    [
        (False, 2048, memory.MemoryPlan(3, 3)),
        (False, 20, memory.MemoryPlan(1, 3)),
        (True, 2048, memory.MemoryPlan(0, 1)),
        (True, 90, memory.MemoryPlan(1, 3)),
    ],
)
def test_the_fused_update_is_that_of_the_models_own_modules(
    adapted: torch.nn.Module,
    prompted: list[TrainGroup],
    monkeypatch: pytest.MonkeyPatch,
    share: bool,
    budget: int,
    plan: memory.MemoryPlan,
) -> None:
    _, plain, expected = update(adapted, prompted, monkeypatch, kernels="plain")
    monkeypatch.setattr(FusedPasses, "plan", lambda self, tokens: plan)
    options = {"kernels": "fused", "share_prompts": share, "token_budget": budget}
    trainer, fused, found = update(adapted, prompted, monkeypatch, **options)
    assert trainer.passes.name == "fused"
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()), msg=name)
    for name in ("loss", "entropy", "mismatch_kl", "ess", "grad_norm"):
        assert fused[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name


class HalfGradient(torch.autograd.Function):
    """The identity, whose gradient is half of what it should be."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2


@pytest.mark.parametrize("is_wrong", [False, True])
def test_prompts_are_shared_as_long_as_their_gradients_agree(
    adapted: torch.nn.Module, prompted: list[TrainGroup], monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    """On an H200 they did not, with 8,192 tokens."""
    _, _, expected = update(adapted, prompted, monkeypatch, kernels="plain")
    right = decoder.attend

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: object, prefix: Any, *more: Any) -> Any:
        apart = prefix and tuple(map(HalfGradient.apply, prefix))  # type: ignore[arg-type]
        return right(q, k, v, lengths, apart, *more)  # type: ignore[arg-type]

    if is_wrong:
        monkeypatch.setattr(decoder, "attend", wrong)
    with structlog.testing.capture_logs() as logs:
        trainer, _, found = update(adapted, prompted, monkeypatch, kernels="fused")
    assert isinstance(trainer.passes, FusedPasses)
    assert trainer.passes.shares_prompts is not is_wrong
    assert [one["event"] for one in logs] == ["prompts are computed once a sample"] * is_wrong
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()), msg=name)


def test_what_is_held_against_is_two_answers_to_the_longest_prompt(prompted: list[TrainGroup]) -> None:
    samples = [s for group in prompted for s in group.samples]
    one, other = sharing(samples)
    assert one.prompt_ids == other.prompt_ids
    assert len(one.prompt_ids) == max(len(s.prompt_ids) for s in samples)
    assert len(one.token_ids) >= len(other.token_ids)
    assert sharing(samples[:1]) == []


def test_sharing_computes_a_prompt_once(prompted: list[TrainGroup]) -> None:
    samples = [s for group in prompted for s in group.samples]
    responses = sum(len(s.token_ids) for s in samples)
    shared = list(bundle(samples, 2048, share=True, least_shared=1))
    assert sum(x.tokens for x in shared) == responses + 75 + 5 + 9
    alone = bundle(samples, 2048, share=False)
    assert sum(x.tokens for x in alone) == responses + 4 * (75 + 5 + 9)


@pytest.mark.parametrize("share", [False, True])
def test_every_response_token_stands_in_one_flat_batch(prompted: list[TrainGroup], share: bool) -> None:
    samples = [s for group in prompted for s in group.samples]
    found = [
        (sample, offset, target)
        for made in bundle(samples, 100, share)
        for batch in made.batches
        for sample, offset, target in zip(
            batch.sample_T.tolist(), batch.offset_T.tolist(), batch.target_N.tolist(), strict=True
        )
    ]
    assert sorted(found) == [(i, j, token) for i, s in enumerate(samples) for j, token in enumerate(s.token_ids)]


def test_flat_rows_stay_under_their_budget(prompted: list[TrainGroup]) -> None:
    samples = [s for group in prompted for s in group.samples]
    for made in bundle(samples, 100, share=True):
        prompt = 0 if made.prompt is None else len(made.prompt.input_T)
        assert all(prompt + len(batch.input_T) <= 100 for batch in made.batches)


def test_the_modules_themselves_still_work_after_the_weights_were_taken_over(
    adapted: torch.nn.Module, prompted: list[TrainGroup]
) -> None:
    ids = prompted[0].samples[0].prompt_ids
    before = sequence_logprobs(causal_lm(adapted), ids)
    Trainer(adapted, update_settings(kernels="fused"))
    assert sequence_logprobs(causal_lm(adapted), ids) == pytest.approx(before, abs=1e-5)


def test_the_reference_of_a_penalty_is_the_model_without_its_adapter(
    adapted: torch.nn.Module, prompted: list[TrainGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    penalty = {"kl": "k2", "kl_weight": 1.0}
    _, plain, _ = update(adapted, prompted, monkeypatch, kernels="plain", **penalty)
    _, fused, _ = update(adapted, prompted, monkeypatch, kernels="fused", **penalty)
    assert plain["kl_reference"] > 1e-3
    assert fused["kl_reference"] == pytest.approx(plain["kl_reference"], rel=1e-3)


def test_a_second_backward_pass_is_refused(adapted: torch.nn.Module) -> None:
    engine = Trainer(adapted, update_settings(kernels="fused")).passes
    assert isinstance(engine, FusedPasses)
    engine.decoder.refresh()
    (made,) = bundle([TrainSample("r", [1, 2], [3, 4], [], 0, 0, 0)], 100, share=False)
    total = engine.decoder(made.batches[0]).sum()
    total.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="one backward pass"):
        total.backward()


def test_what_can_not_be_fused_says_why(adapted: torch.nn.Module) -> None:
    assert why_not(adapted) == why_not_by_hand(adapted) == ""
    assert why_not_by_hand(tiny_model()) == "it has no LoRA adapter"
    odd = tiny_model()
    odd.config.hidden_act = "gelu"
    with pytest.raises(ConfigError, match="its activation is gelu"):
        Trainer(odd, update_settings(kernels="fused"))
    add_adapters(adapted, ["other"])
    assert why_not_by_hand(adapted) == "it has several adapters"
    assert Trainer(tiny_model(), update_settings()).passes.name == "plain"


def test_a_frozen_head_gives_the_log_probs_and_gradients_of_a_trained_one() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50, bias=False)
    hidden = torch.randn(33, 8, requires_grad=True)
    target = torch.randint(0, 50, (33,))
    results = []
    for frozen in (False, True):
        head.weight.requires_grad_(not frozen)
        logp, entropy = token_logprobs(hidden, head, target, 0.7, 50, chunk_elements=50 * 7)
        results.append((logp, entropy, *torch.autograd.grad(logp.square().sum(), hidden)))
    for trained, kept in zip(*results, strict=True):
        torch.testing.assert_close(trained, kept)


SHAPE = memory.DecoderShape(layers=10, hidden=100, intermediate=400, query=100, key_value=50, itemsize=2)


def test_a_plan_keeps_everything_where_there_is_room_and_nothing_where_there_is_none() -> None:
    assert memory.plan(SHAPE, 1000, float("inf")) == (10, 10)
    assert memory.plan(SHAPE, 1000, 0.0) == (0, 0)


def test_a_plan_stays_within_its_room_and_uses_it() -> None:
    for room in range(310_000_000, 330_000_000, 500_000):
        kept, whole = memory.plan(SHAPE, 1000, room)
        again = 1000 * SHAPE.full if whole < 10 else 0
        layers = kept * SHAPE.full + (whole - kept) * SHAPE.lean + (10 - whole) * SHAPE.bare
        if whole:
            assert memory.SLACK + 1000 * (SHAPE.workspace + layers) + again <= room
    assert memory.plan(SHAPE, 1000, 320_000_000).kept > 0


def test_the_triton_kernels_compute_what_plain_torch_does() -> None:
    """In Triton's interpreter, which must be chosen before its first import: in a process of its own."""
    pytest.importorskip("triton", reason="Triton is not installed")
    code = "import tests.unit.learning.triton_interpreted as t; t.check()"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_pass_that_lifts_the_peak_above_the_limit_leaves_less_for_those_after_it() -> None:
    """Of eight billion weights on two GPUs `learner.memory_gb=110` came to 121.7: an estimate was off by a tenth."""
    peaks = iter([60.0, 90.0, 90.0, 121.0, 121.0, 121.0, 121.0, 122.0])
    room = memory.ActivationRoom(110.0, 65.0, lambda: next(peaks))
    seen = []
    for _ in range(4):
        with room.watched():
            pass
        seen.append(room.bytes)
    assert seen == [45.0, 34.0, 34.0, 33.0]
