"""Shapes of models, counted from their `config.json` alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from kbrl_async.errors import ConfigError, UserError
from kbrl_async.learning.policies.models import wrap_lora
from kbrl_async.shapes import KNOWN, known_shape, parse_shape, read_shape, shape_of

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "head_dim": 16}
FAMILIES = [(Qwen2Config, {}), (Qwen3Config, {"head_dim": 16}), (LlamaConfig, {}), (MistralConfig, {})]
PUBLISHED = {
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.1-8B": 8_030_261_248,
    "Mistral-7B": 7_248_023_552,
}
"""Elements of the weights that their authors publish."""


def weights_of(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("family", "more"), [*FAMILIES, (Qwen3MoeConfig, EXPERTS)])
def test_weights_are_counted_exactly(family: Any, more: dict[str, Any], tied: bool) -> None:
    config = family(**SIZES, **more, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape_of(config.to_dict()).parameters == weights_of(model)


@pytest.mark.parametrize(("family", "more"), FAMILIES)
def test_an_adapter_is_counted_exactly(family: Any, more: dict[str, Any]) -> None:
    config = family(**SIZES, **more)
    with torch.device("meta"):
        model = wrap_lora(AutoModelForCausalLM.from_config(config), 4)
    assert shape_of(config.to_dict()).adapter(4) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_public_models_have_the_weights_that_were_published() -> None:
    assert {name: KNOWN[name].parameters for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "Qwen2.5-7B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B"),
        ("meta-llama/Meta-Llama-3.1-8B", "Llama-3.1-8B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B"),
    ],
)
def test_a_variant_has_the_shape_of_its_model(name: str, known: str) -> None:
    assert known_shape(name) == KNOWN[known]


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-72B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "7B"])
def test_another_size_or_family_is_not_guessed(name: str) -> None:
    assert known_shape(name) is None


def test_a_cached_config_is_read_before_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--Qwen2.5-7B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(SIZES))
    assert read_shape("org/Qwen2.5-7B").hidden == SIZES["hidden_size"]


def test_keys_and_values_of_a_token() -> None:
    assert KNOWN["Qwen2.5-7B"].kv_bytes(2) == 2 * 28 * 4 * 128 * 2


def test_a_model_that_nobody_knows_is_named_with_a_cure() -> None:
    with pytest.raises(UserError, match=r"the shape of some/model is not known here\. Give a folder"):
        read_shape("some/model")


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": 64}', '{"hidden_size": "wide"}'])
def test_a_damaged_config_is_an_error_with_its_place(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        parse_shape(path)
