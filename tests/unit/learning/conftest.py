"""A policy small enough that a training step takes milliseconds."""

from __future__ import annotations

import random

import pytest
import torch

from protocols.records import TrainGroup
from tests.models import VOCABULARY, drawn_sample, tiny_model

torch.set_num_threads(1)  # threads that spin for a busy core make tiny operations ten times slower


@pytest.fixture
def model() -> torch.nn.Module:
    return tiny_model()


@pytest.fixture
def groups() -> list[TrainGroup]:
    rng = random.Random(0)
    out = []
    for g in range(3):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(3, 9))]
        samples = [drawn_sample(rng, f"g{g}.r{r}", prompt, rng.randint(1, 12)) for r in range(4)]
        out.append(TrainGroup(f"g{g}", f"p{g}", 1, samples))
    return out
