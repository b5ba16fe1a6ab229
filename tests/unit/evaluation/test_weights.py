"""A policy that is evaluated is proven to samplers as one that is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kbrl_async.errors import PolicyMismatch
from kbrl_async.lab.small_policy.making import train_tokenizer
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import load_model, load_tokenizer
from kbrl_async.runs import origins
from kbrl_async.runs.config import load
from kbrl_async.runs.publishing import publish
from kbrl_async.runs.targets import resolve
from kbrl_async.sampling.canary import check_canary, check_tokenizer
from protocols.records import PolicyVersion
from tests.models import tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model(vocab_size=400).save_pretrained(str(folder))  # type: ignore[operator]
    train_tokenizer(["def forward(self, x): return x", "class Model"], 300).save_pretrained(str(folder))
    return folder


def evaluated(what: Path, scratch: Path) -> PolicyVersion:
    publish(resolve(str(what), scratch), scratch / "policies", load())
    return versions.newest(scratch / "policies")[0]  # type: ignore[index]


@pytest.fixture(params=["model", "adapter"])
def manifest(request: pytest.FixtureRequest, base: Path, tmp_path: Path) -> PolicyVersion:
    """What an evaluation of the base, or of an adapter on it, publishes."""
    if request.param == "model":
        return evaluated(base, tmp_path)
    load_model(str(base), lora_rank=2).save_pretrained(str(tmp_path / "adapter"))  # type: ignore[operator]
    return evaluated(tmp_path / "adapter", tmp_path)


def test_it_carries_all_the_canaries_that_training_publishes(manifest: PolicyVersion, base: Path) -> None:
    trained = origins.canaries(load(), load_tokenizer(str(base)))
    assert manifest.canary_ids == trained.ids
    assert [(canary.text, canary.ids) for canary in manifest.canaries] == trained.texts
    assert len(manifest.canaries) == len(origins.CANARY_TEXTS)


def test_a_sampler_finds_another_tokenizer_and_other_weights_by_them(base: Path, tmp_path: Path) -> None:
    manifest, tokenizer, model = (
        evaluated(base, tmp_path),
        load_tokenizer(str(base)),
        load_model(str(base)),
    )
    check_tokenizer(manifest, lambda text: tokenizer.encode(text, add_special_tokens=False))
    with pytest.raises(PolicyMismatch, match="tokenizer"):
        check_tokenizer(manifest, lambda text: [1 + i for i in tokenizer.encode(text, add_special_tokens=False)])
    assert check_canary(manifest, model) < 1e-5
    only_read_here = set.union(*(set(canary.ids) for canary in manifest.canaries)) - set(manifest.canary_ids)
    with torch.no_grad():
        model.get_input_embeddings().weight[sorted(only_read_here)] += 1.0  # type: ignore[operator, index]
    with pytest.raises(PolicyMismatch, match="differ"):
        check_canary(manifest, model)
