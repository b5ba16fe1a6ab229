"""The fused learner on a GPU: its kernels against plain torch, its update against the model's own, and no waiting."""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch

from kbrl_async.learning import trainer as trainer_module
from kbrl_async.learning.fused import elementwise as e
from kbrl_async.learning.fused.norms import HeadNorms
from kbrl_async.learning.policies.models import wrap_lora
from kbrl_async.learning.trainer import Trainer
from protocols.records import TrainGroup, TrainSample
from tests.models import tiny_model, update_settings

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
VOCABULARY = 1000


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on(argument: object, device: str) -> object:
    if isinstance(argument, HeadNorms):
        return HeadNorms(argument.q_D.to(device), argument.k_D.to(device), argument.epsilon)
    return argument.clone().to(device) if isinstance(argument, torch.Tensor) else argument


def both(name: str, *arguments: object) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results of a function of `elementwise` on the CPU and on the GPU, overwritten arguments included."""

    def run(device: str) -> list[torch.Tensor]:
        given = [on(a, device) for a in arguments]
        out = getattr(e, name)(*given)
        made = list(out) if isinstance(out, tuple) else [] if out is None else [out]
        return [x.cpu().float() for x in (*made, *(g for g in given if isinstance(g, torch.Tensor)))]

    return run("cpu"), run("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_kernel_computes_what_plain_torch_does(dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    x, weight, inverse = numbers(33, 896).to(dtype), numbers(896).to(dtype), numbers(33).abs()
    angle = numbers(33, 32)
    cos, sin = (torch.cat([f(angle)] * 2, -1).to(dtype) for f in (torch.cos, torch.sin))
    qkv, bias = numbers(33, 18 * 64).to(dtype), numbers(18 * 64).to(dtype)
    turned = [numbers(n, 33, 64).to(dtype).transpose(0, 1) for n in (14, 2, 2)]
    norms = HeadNorms(numbers(64).to(dtype), numbers(64, seed=1).to(dtype), 1e-6)
    cases = [
        ("rms_norm", x, weight, 1e-6, torch.zeros_like(x)),
        ("rms_norm_backward", x, numbers(33, 896, seed=1).to(dtype), weight, inverse, x),
        ("rotate", qkv, bias, cos, sin, 14, 2),
        ("rotate_backward", *turned, cos, sin),
        ("rotate", qkv, bias, cos, sin, 14, 2, norms),
        ("rotate_backward", *turned, cos, sin, norms, qkv),
        ("rms_norm_weight", numbers(33, 896, seed=1).to(dtype), x, inverse),
        ("swiglu", *x.chunk(2, -1)),
        ("swiglu_backward", numbers(33, 448, seed=2).to(dtype), *x.chunk(2, -1), True),
        ("softmax_scores", 3 * numbers(33, VOCABULARY).to(dtype), torch.arange(33), 0.7, False),
        ("softmax_scores", 3 * numbers(33, VOCABULARY).to(dtype), torch.arange(33), 0.7, True),
    ]
    for name, *arguments in cases:
        for number, (cpu, gpu) in enumerate(zip(*both(name, *arguments), strict=True)):
            assert torch.allclose(cpu, gpu, rtol=tolerance, atol=tolerance), f"{name}, result {number}"


def policy(dtype: torch.dtype) -> torch.nn.Module:
    shape = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 32768}
    plain = tiny_model(scale=1.0, num_hidden_layers=3, tie_word_embeddings=False, **shape)
    wrapped = wrap_lora(plain.to(dtype).cuda(), rank=8)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return wrapped


@pytest.fixture
def groups() -> list[TrainGroup]:
    rng = random.Random(0)
    prompt = [rng.randrange(VOCABULARY) for _ in range(300)]
    lengths = [400, 130, 777, 256]
    samples = [
        TrainSample(
            f"g.r{i}", prompt, [rng.randrange(VOCABULARY) for _ in range(n)], [-7.0] * n, rng.uniform(-1, 1), 0, 0
        )
        for i, n in enumerate(lengths)
    ]
    return [TrainGroup("g", "p", 1, samples)]


def gradients(
    model: torch.nn.Module, groups: list[TrainGroup], monkeypatch: pytest.MonkeyPatch, **options: object
) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics of an update, and its gradient as one vector."""
    found: list[torch.Tensor] = []
    step = trainer_module.guarded_step
    trainer = Trainer(model, update_settings(loss="reinforce", epochs=1, minibatches=1, **options), "cuda")  # type: ignore[arg-type]

    def spy(*arguments: object) -> float:
        found.append(torch.cat([p.grad.flatten() for p in trainer.parameters.values() if p.grad is not None]))
        return step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer_module, "guarded_step", spy)
    metrics = trainer.step(groups, 0.7)
    monkeypatch.setattr(trainer_module, "guarded_step", step)
    return metrics, found[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("share", [False, True])
def test_the_fused_update_is_no_further_from_the_exact_one_than_the_models_own(
    groups: list[TrainGroup], monkeypatch: pytest.MonkeyPatch, dtype: str, share: bool
) -> None:
    model = policy(torch.float32 if dtype == "float32" else torch.bfloat16)
    _, exact = gradients(copy.deepcopy(model).float(), groups, monkeypatch, dtype="float32", kernels="plain")
    plain, theirs = gradients(copy.deepcopy(model), groups, monkeypatch, dtype=dtype, kernels="plain")
    fused, ours = gradients(model, groups, monkeypatch, dtype=dtype, kernels="fused", share_prompts=share)
    assert fused["loss"] == pytest.approx(plain["loss"], abs=2e-3)
    assert fused["entropy"] == pytest.approx(plain["entropy"], rel=1e-2)
    assert off(ours, exact) < max(2e-2, 1.25 * off(theirs, exact))


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("share", [False, True])
def test_the_host_waits_for_nothing_between_microbatches(groups: list[TrainGroup], share: bool) -> None:
    options = update_settings(dtype="bfloat16", kernels="fused", share_prompts=share, token_budget=1100)
    trainer = Trainer(policy(torch.bfloat16), options, "cuda")
    trainer.step(groups, 1.0)  # plans and compilations may wait
    gradients_of = trainer.gradients

    def strict(*arguments: object) -> list[torch.Tensor]:
        with warnings.catch_warnings(action="ignore"):  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            return gradients_of(*arguments)  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trainer.gradients = strict  # type: ignore[method-assign, assignment]
    trainer.step(groups, 1.0)
