"""A policy small enough that a training step takes milliseconds."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from protocols.records import TrainGroup, TrainSample

torch.set_num_threads(1)  # threads that spin for a busy core make tiny operations ten times slower

VOCABULARY = 64


def make_model(seed: int = 0, scale: float = 4.0) -> torch.nn.Module:
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
    model: torch.nn.Module = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)  # far from uniform, so that a wrong log-prob shows
    return model


@pytest.fixture
def model() -> torch.nn.Module:
    return make_model()


@pytest.fixture
def groups() -> list[TrainGroup]:
    rng = random.Random(0)
    out = []
    for g in range(3):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(3, 9))]
        samples = []
        for r in range(4):
            tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
            logprobs = [-rng.uniform(3.5, 4.5) for _ in tokens]
            samples.append(TrainSample(f"g{g}.r{r}", prompt, tokens, logprobs, rng.uniform(-1, 1), 0.5, 0))
        out.append(TrainGroup(f"g{g}", f"p{g}", 1, samples))
    return out
