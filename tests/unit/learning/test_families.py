"""Each family by name: the learner computes what transformers' own classes compute, whatever is computed again."""

# ruff: noqa: N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import structlog
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kbrl_async.errors import ConfigError
from kbrl_async.learning.forward_backward import Scored, forward_backward
from kbrl_async.learning.fused import memory
from kbrl_async.learning.fused.families import why_not
from kbrl_async.learning.logprobs import sequence_logprobs
from kbrl_async.learning.policies.models import add_adapters, causal_lm, wrap_lora
from kbrl_async.learning.settings import Learner
from protocols.records import TrainSample
from tests.models import VOCABULARY, drawn_sample

CPU = torch.device("cpu")
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FUSED: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 256},
    "gemma": {"head_dim": 8},
    "phi": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def model_of(family: str, **changes: object) -> torch.nn.Module:
    """Norms, biases and all else far from where they begin, so that forgetting one shows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **{**FUSED, **OTHERS}[family], **changes})
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    return disturbed(model)


def disturbed(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "lora_B" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "lora_A" not in name:
                parameter.mul_(4)
    return model


@pytest.fixture(scope="module")
def samples() -> list[TrainSample]:
    return drawn_samples()


def drawn_samples() -> list[TrainSample]:
    """Two with one long prompt, three with short ones."""
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in (70, 5, 9)]
    return [drawn_sample(rng, f"r{i}", prompts[max(0, i - 1) % 3], rng.randint(3, 12)) for i in range(5)]


def computed(
    model: torch.nn.Module, samples: list[TrainSample], device: torch.device = CPU, **options: Any
) -> tuple[str, torch.Tensor, dict[str, torch.Tensor]]:
    """What computed it, log-probs by sample and place, and gradients."""
    passes = forward_backward(model, Learner(**options), device)
    found: dict[tuple[int, int], float] = {}

    def visit(scored: Scored) -> torch.Tensor:
        where = zip(scored.sample_T.tolist(), scored.offset_T.tolist(), strict=True)
        found.update(zip(where, scored.log_pi_T.tolist(), strict=True))
        return (scored.log_pi_T * (1 + scored.sample_T)).sum()

    model.zero_grad()
    passes.run(samples, 0.7, visit, lambda: None)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return passes.name, torch.tensor([found[key] for key in sorted(found)]), gradients


def assert_equal(model: torch.nn.Module, samples: list[TrainSample], path: str, **options: Any) -> None:
    _, expected_T, expected = computed(copy.deepcopy(model), samples, kernels="plain", activation_checkpointing="none")
    name, found_T, found = computed(copy.deepcopy(model), samples, **options)
    assert name == path
    torch.testing.assert_close(found_T, expected_T, rtol=1e-4, atol=1e-5)
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        room = 1e-5 * float(gradient.abs().max())
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=room, msg=parameter)


@pytest.mark.parametrize("again", ["auto", "selective", "full"])
@pytest.mark.parametrize("family", FUSED)
def test_a_lora_policy_fused_is_what_transformers_computes(family: str, again: str, samples: list[TrainSample]) -> None:
    policy = disturbed(wrap_lora(model_of(family), rank=3))
    assert_equal(policy, samples, "fused", kernels="fused", activation_checkpointing=again)


@pytest.mark.parametrize("again", ["auto", "selective", "full"])
@pytest.mark.parametrize("family", FUSED)
def test_trained_weights_in_fused_modules_are_what_transformers_computes(
    family: str, again: str, samples: list[TrainSample]
) -> None:
    assert_equal(model_of(family), samples, "modules", kernels="fused", activation_checkpointing=again)


@pytest.mark.parametrize("kernels", ["fused", "plain"])
def test_a_base_in_bf16_says_its_canaries_as_before_the_kernels_took_its_modules_over(kernels: Any) -> None:
    policy = disturbed(wrap_lora(model_of("qwen2").bfloat16(), rank=3))
    ids = [5, 3, 9, 1, 4]
    expected = sequence_logprobs(causal_lm(policy), ids)
    forward_backward(policy, Learner(kernels=kernels, dtype="bfloat16"), CPU)
    assert sequence_logprobs(causal_lm(policy), ids) == pytest.approx(expected, abs=0.2)


def test_several_adapters_go_through_the_fused_modules(samples: list[TrainSample]) -> None:
    policy = wrap_lora(model_of("qwen3"), rank=3)
    add_adapters(policy, ["verifier"])
    assert_equal(disturbed(policy), samples, "modules", kernels="fused", token_budget=60)


@pytest.mark.parametrize("again", ["selective", "full"])
@pytest.mark.parametrize("family", OTHERS)
def test_every_other_model_computes_again_by_its_own_modules(
    family: str, again: str, samples: list[TrainSample]
) -> None:
    assert why_not(model_of(family)) == f"its family is {family}"
    assert_equal(model_of(family), samples, "plain", activation_checkpointing=again)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("again", ["none", "selective", "full"])
def test_what_is_kept_is_what_the_formula_says(family: str, again: str) -> None:
    """In fused modules, between models of two and of four layers."""
    two, four = (model_of(family, num_hidden_layers=n, hidden_size=64) for n in (2, 4))
    found = (kept_elements(four, again) - kept_elements(two, again)) / 2 / LENGTH
    shape = memory.shape_of(four.config, itemsize=1, path="modules")
    assert found == pytest.approx({"none": shape.full, "selective": shape.lean, "full": shape.bare}[again], rel=0.06)


LENGTH = 200


def kept_elements(model: torch.nn.Module, again: str) -> int:
    """Elements of activations, each storage once, that a pass over one sequence leaves to its backward pass."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        where = tensor.untyped_storage().data_ptr()
        if where not in weights:
            held.setdefault(where, tensor)
        return tensor

    options: dict[str, Any] = {"kernels": "fused", "activation_checkpointing": again}
    passes = forward_backward(model, Learner(**options), CPU)
    sample = drawn_sample(random.Random(0), "r", [1] * (LENGTH - 40), 40)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        passes.run([sample], 1.0, lambda scored: scored.log_pi_T.sum(), lambda: None)
    return sum(x.untyped_storage().nbytes() // 4 for x in held.values())


def test_a_family_with_an_odd_config_says_what_is_odd() -> None:
    assert why_not(model_of("mistral", sliding_window=64)) == "it attends within a sliding window"
    assert why_not(model_of("mistral", sliding_window=4096)) == ""
    assert why_not(model_of("llama", mlp_bias=True)) == "its MLP has biases"
    assert why_not(model_of("qwen3", head_dim=12)) == "its heads are 12 wide, no power of two"


def test_on_a_gpu_another_family_is_computed_plainly_and_the_log_says_why() -> None:
    with structlog.testing.capture_logs() as logs:
        passes = forward_backward(model_of("gpt2"), Learner(memory_gb=1.0), torch.device("cuda"))
    assert passes.name == "plain"
    assert [line["because"] for line in logs] == ["its family is gpt2"]


def test_rows_on_several_ranks_need_ranks_and_a_family_that_fits() -> None:
    with pytest.raises(ConfigError, match="with 1 learner processes"):
        forward_backward(model_of("qwen2"), Learner(context_parallel=2), CPU)
    with pytest.raises(ConfigError, match="its family is gpt2"):
        forward_backward(model_of("gpt2"), Learner(context_parallel=2), CPU)
    with pytest.raises(ConfigError, match="do not divide by 3"):
        forward_backward(model_of("qwen2"), Learner(context_parallel=3), CPU)


def test_lora_leaves_a_router_alone() -> None:
    policy = wrap_lora(model_of("qwen3_moe"), rank=2)
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[1] for name, _ in policy.named_parameters() if "lora_" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
