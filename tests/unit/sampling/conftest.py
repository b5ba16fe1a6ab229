"""A tiny policy, its published versions and a tokenizer of numbers."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kbrl_async.sampling.canary import canary_logprobs
from protocols.records import PolicyVersion
from tests.models import EOS, NumberTokenizer, tiny_model

torch.set_num_threads(1)  # threads that spin for a busy core make tiny operations ten times slower

CANARY = [1, 2, 3, 4, 5, 6]
Publish = Callable[[int], tuple[PolicyVersion, Path]]


def make_model(seed: int = 0) -> torch.nn.Module:
    return tiny_model(seed, eos_token_id=EOS)


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
