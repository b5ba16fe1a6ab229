"""Sampler and learner together: an unchanged policy has importance ratio 1, whatever route its weights took."""

from __future__ import annotations

import asyncio
import copy
import math
from pathlib import Path

import pytest
import torch

from kbrl_async.errors import PolicyMismatch
from kbrl_async.learning.policies.models import wrap_lora
from kbrl_async.learning.policies.versions import load_manifest, publish, version_folder
from kbrl_async.learning.trainer import Trainer
from kbrl_async.sampling.engine import Completion
from kbrl_async.sampling.settings import Sampler
from kbrl_async.sampling.transformers.engine import TransformersEngine
from protocols.records import SamplingParams, TrainGroup, TrainSample
from tests.models import NumberTokenizer, update_settings

CANARY = list(range(12))
PROMPTS = ["1 2 3 4 5", "7 8", "20 21 22 23 24 25 26 27 28"]


def sample(model: torch.nn.Module, directory: Path, versions: list[int], temperature: float) -> list[Completion]:
    async def main() -> list[Completion]:
        engine = TransformersEngine(model, NumberTokenizer(), Sampler(slots=5))
        try:
            for version in versions:
                folder = version_folder(directory, version)
                await engine.load(load_manifest(folder), folder)
            params = SamplingParams(max_tokens=40, temperature=temperature)
            return await asyncio.gather(
                *[engine.generate(f"{i}.{r}", p, params) for i, p in enumerate(PROMPTS) for r in range(4)]
            )
        finally:
            await engine.close()

    return asyncio.run(main())


def as_groups(completions: list[Completion]) -> list[TrainGroup]:
    samples = [
        TrainSample(str(i), c.prompt_ids, c.token_ids, c.logprobs, (-1.0) ** i, 0.0, c.policy_version)
        for i, c in enumerate(completions)
    ]
    return [TrainGroup(f"g{i}", "p", 1, samples[4 * i : 4 * i + 4]) for i in range(len(PROMPTS))]


def worst_ratio(trainer: Trainer, groups: list[TrainGroup], temperature: float) -> float:
    samples = [s for g in groups for s in g.samples]
    return max(
        abs(math.exp(new - old) - 1)
        for s, logprobs in zip(samples, trainer.logprobs(samples, temperature), strict=True)
        for new, old in zip(logprobs, s.logprobs, strict=True)
    )


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_every_token_of_an_unchanged_policy_has_ratio_one(
    tmp_path: Path, model: torch.nn.Module, kind: str, temperature: float
) -> None:
    """Two versions: the start, and one that training moved. Both are sampled through a published folder."""
    base = copy.deepcopy(model)
    policy = wrap_lora(model, rank=4) if kind == "lora" else model
    trainer = Trainer(policy, update_settings(learning_rate=1e-2, warmup_steps=0))
    publish(tmp_path, policy, 0, None, 0, CANARY)
    first = as_groups(sample(base, tmp_path, [0], temperature))
    assert worst_ratio(trainer, first, temperature) < 1e-3
    trainer.step(first, temperature)
    publish(tmp_path, policy, 1, 0, 1, CANARY)
    second = as_groups(sample(base, tmp_path, [0, 1], temperature))
    assert {s.policy_version for g in second for s in g.samples} == {1}
    assert worst_ratio(trainer, second, temperature) < 1e-3
    assert worst_ratio(trainer, first, temperature) > 1e-2, "training moved the policy, so old samples must show it"


def test_an_adapter_on_the_wrong_base_is_found(tmp_path: Path, model: torch.nn.Module) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters()).mul_(1.2)
    publish(tmp_path, wrap_lora(model, rank=4), 0, None, 0, CANARY)
    with pytest.raises(PolicyMismatch):
        sample(other, tmp_path, [0], 1.0)
