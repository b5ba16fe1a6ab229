"""A tiny policy, its published versions and a tokenizer of numbers."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from kbrl_async.sampling.canary import canary_logprobs
from protocols.records import PolicyVersion

torch.set_num_threads(1)  # threads that spin for a busy core make tiny operations ten times slower

VOCABULARY, EOS = 64, 63
CANARY = [1, 2, 3, 4, 5, 6]
Publish = Callable[[int], tuple[PolicyVersion, Path]]


class NumberTokenizer:
    """Text is token ids with blanks between."""

    eos_token_id = EOS

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(str(i) for i in token_ids if not (skip_special_tokens and i == EOS))


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    config.eos_token_id = EOS
    model: torch.nn.Module = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model


@pytest.fixture
def model() -> torch.nn.Module:
    return make_model()


@pytest.fixture
def tokenizer() -> NumberTokenizer:
    return NumberTokenizer()


@pytest.fixture
def publish(tmp_path: Path, model: torch.nn.Module) -> Publish:
    """Writes version n: the base for 0, other weights for each higher one."""

    def write(version: int) -> tuple[PolicyVersion, Path]:
        changed = copy.deepcopy(model) if version == 0 else make_model(seed=version)
        folder = tmp_path / f"policy-v{version}"
        folder.mkdir(exist_ok=True)
        tensors = {k: v for k, v in changed.state_dict().items() if k != "lm_head.weight"}
        save_file(tensors, str(folder / "model.safetensors"))
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        return PolicyVersion(
            version, version - 1, version, "full", digest, CANARY, canary_logprobs(changed, CANARY)
        ), folder

    return write
