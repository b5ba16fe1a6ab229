"""Tiny policies of random weights, of the architecture that runs train, and what else a test of a policy needs."""

from __future__ import annotations

import random
from typing import Any

import torch

from kbrl_async.learning.settings import Learner
from kbrl_async.runs.config import Config
from protocols.records import TrainSample

VOCABULARY, EOS = 64, 63
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
SMALLER = {"num_hidden_layers": 1, "num_attention_heads": 2}
"""For tests that only ask that something is learned."""


def tiny_model(seed: int = 0, scale: float = 4.0, **changes: object) -> torch.nn.Module:
    """A model of `SHAPE`, but for `changes`. Matrices are scaled: far from uniform, so that a wrong log-prob shows."""
    from transformers import Qwen2Config, Qwen2ForCausalLM  # ranks of a plain policy do without it

    torch.manual_seed(seed)
    model: torch.nn.Module = Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model


def drawn_sample(rng: random.Random, rollout_id: str, prompt: list[int], length: int) -> TrainSample:
    """A turn that no model wrote, with log-probs about as a model without training would give them."""
    tokens = [rng.randrange(VOCABULARY) for _ in range(length)]
    logprobs = [-rng.uniform(3.5, 4.5) for _ in tokens]
    return TrainSample(rollout_id, prompt, tokens, logprobs, rng.uniform(-1, 1), 0.5, 0)


class NumberTokenizer:
    """Text is token ids with blanks between."""

    eos_token_id = EOS

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(str(i) for i in token_ids if not (skip_special_tokens and i == EOS))


def update_settings(**given: Any) -> Config:
    """A configuration by the last words of its keys: `learning_rate`, or `epochs` for `learner.epochs`. Negative
    advantages count in full."""
    top = {key: value for key, value in given.items() if key in Config.__struct_fields__}
    learner = {key: value for key, value in given.items() if key not in top}
    return Config(**top, learner=Learner(**{"negative_scale": 1.0, **learner}))
