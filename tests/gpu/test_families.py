"""Each fused family on a GPU, by its Triton kernels: as close to the exact log-probs and gradients as transformers'."""

# ruff: noqa: N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from kbrl_async.learning.policies.models import wrap_lora
from protocols.records import TrainSample
from tests.models import VOCABULARY, drawn_sample
from tests.unit.learning.test_families import FUSED, computed, disturbed, model_of

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 4096, "head_dim": 64}


@pytest.fixture(scope="module")
def samples() -> list[TrainSample]:
    rng = random.Random(0)
    prompt = [rng.randrange(VOCABULARY) for _ in range(300)]
    return [drawn_sample(rng, f"r{i}", prompt, n) for i, n in enumerate((400, 130, 777))]


def policy(family: str, is_lora: bool) -> torch.nn.Module:
    model = model_of(family, **SHAPE)
    wrapped = disturbed(wrap_lora(model, rank=8)) if is_lora else model
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            # What a model of this width is well conditioned by: both disturbances have made matrices four times larger.
            parameter.mul_(1.0 if "lora_" in name or parameter.ndim == 1 else 0.1 if is_lora else 0.4)
    return wrapped


def found(model: torch.nn.Module, samples: list[TrainSample], dtype: str, **options: Any) -> tuple[str, torch.Tensor]:
    """What computed it, and all log-probs and gradients as one vector."""
    held = copy.deepcopy(model).to(GPU)
    if dtype == "bfloat16" and hasattr(held, "peft_config"):
        for name, parameter in held.named_parameters():
            parameter.data = parameter.data if "lora_" in name else parameter.data.bfloat16()
    name, logp_T, gradients = computed(held, samples, GPU, dtype=dtype, **options)
    return name, torch.cat([logp_T, *(gradients[key].flatten().float().cpu() for key in sorted(gradients))])


@pytest.mark.parametrize("again", ["none", "selective", "full"])
@pytest.mark.parametrize("is_lora", [True, False])
@pytest.mark.parametrize("family", FUSED)
def test_a_fused_family_is_as_exact_as_transformers(
    family: str, is_lora: bool, again: str, samples: list[TrainSample]
) -> None:
    model = policy(family, is_lora)
    _, exact = found(model, samples, "float32", kernels="plain")
    for dtype, least in (("float32", 1e-3), ("bfloat16", 2e-2)):
        _, plain = found(model, samples, dtype, kernels="plain")
        name, fused = found(model, samples, dtype, kernels="fused", activation_checkpointing=again)
        assert name == ("fused" if is_lora else "modules")
        assert off(fused, exact) < max(least, 1.3 * off(plain, exact)), dtype


def test_inputs_that_waited_on_the_host_give_the_same_gradients(
    samples: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kbrl_async.learning.recompute.LEAST_OFFLOADED", 1000)
    for is_lora in (True, False):
        model = policy("qwen3", is_lora)
        both = [
            found(model, samples, "float32", kernels="fused", activation_checkpointing="full", offload_activations=on)
            for on in (False, True)
        ]
        torch.testing.assert_close(both[1][1], both[0][1], rtol=1e-4, atol=1e-5)


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
