"""One LoRA adapter a role: trained apart, saved, resumed, published, served, and proven."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch

from kbrl_async.errors import CheckpointError, PolicyMismatch
from kbrl_async.learning import checkpoints
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import MAIN, active, adapter_names, adapter_of, add_adapters, wrap_lora
from kbrl_async.learning.trainer import Trainer
from kbrl_async.sampling.settings import Sampler
from kbrl_async.sampling.transformers.engine import TransformersEngine
from kbrl_async.weights import FILES, prove
from protocols.records import SamplingParams, TrainGroup
from tests.models import NumberTokenizer, tiny_model, update_settings

CANARY = [1, 2, 3, 4, 5]
ROLES = ("verifier", "corrector")


def policy() -> torch.nn.Module:
    wrapped = wrap_lora(tiny_model(), 4)
    add_adapters(wrapped, ROLES)
    return wrapped


def weights(model: torch.nn.Module, adapter: str) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for name, p in model.named_parameters() if f".{adapter}." in name])


def as_role(groups: list[TrainGroup], role: str) -> list[TrainGroup]:
    return [
        msgspec.structs.replace(g, samples=[msgspec.structs.replace(s, role=role) for s in g.samples]) for g in groups
    ]


def test_a_role_without_an_adapter_uses_the_main_one() -> None:
    assert adapter_of("verifier", (MAIN, "verifier")) == "verifier"
    assert adapter_of("solver", (MAIN, "verifier")) == MAIN
    assert adapter_names(tiny_model()) == (MAIN,)


def test_each_roles_samples_train_its_own_adapter_only(groups: list[TrainGroup]) -> None:
    model = policy()
    trainer = Trainer(model, update_settings(learning_rate=1e-2, warmup_steps=0))
    before = {name: weights(model, name) for name in (MAIN, *ROLES)}
    trainer.step(as_role(groups, "verifier"), 1.0)
    assert torch.equal(weights(model, MAIN), before[MAIN])
    assert torch.equal(weights(model, "corrector"), before["corrector"])
    assert not torch.equal(weights(model, "verifier"), before["verifier"])
    trainer.step([*groups, *as_role(groups, "corrector")], 1.0)
    assert not torch.equal(weights(model, MAIN), before[MAIN])
    assert not torch.equal(weights(model, "corrector"), before["corrector"])


@pytest.mark.long
def test_a_checkpoint_holds_all_adapters_and_resumes_bit_by_bit(groups: list[TrainGroup], tmp_path: Path) -> None:
    mixed = [*groups, *as_role(groups, "verifier"), *as_role(groups, "corrector")]
    first = Trainer(policy(), update_settings(learning_rate=1e-2))
    first.step(mixed, 1.0)
    checkpoints.save(tmp_path, first, checkpoints.LearnerProgress(version=1), keep_checkpoints=2)
    second = Trainer(policy(), update_settings(learning_rate=1e-2))
    assert checkpoints.resume(tmp_path, second) is not None
    assert first.step(mixed, 1.0)["loss"] == second.step(mixed, 1.0)["loss"]
    for name in (MAIN, *ROLES):
        assert torch.equal(weights(first.model, name), weights(second.model, name))


def _shaken() -> torch.nn.Module:
    model = policy()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


def test_the_engine_serves_each_role_by_its_own_adapter(tmp_path: Path) -> None:
    model = _shaken()
    manifest = versions.publish(tmp_path, model, 0, None, 0, CANARY)
    expected = {}
    for role in (MAIN, *ROLES):
        with active(model, role), torch.inference_mode():
            logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1].float()
            expected[role] = torch.log_softmax(logits, -1)

    async def ask() -> dict[str, tuple[int, float]]:
        engine = TransformersEngine(tiny_model(), NumberTokenizer(), Sampler())
        try:
            await engine.load(manifest, tmp_path / "policy-v0")
            names = {"solver": MAIN, "verifier": "verifier", "corrector": "corrector"}
            done = await asyncio.gather(
                *(engine.generate(role, "1 2 3", SamplingParams(1), adapter=role) for role in names)
            )
            return {name: (d.token_ids[0], d.logprobs[0]) for name, d in zip(names.values(), done, strict=True)}
        finally:
            await engine.close()

    for role, (token, logprob) in asyncio.run(ask()).items():
        assert logprob == pytest.approx(float(expected[role][token]), abs=1e-4), role
    assert not torch.allclose(expected[MAIN], expected["verifier"])


def test_two_adapters_that_were_swapped_are_found_by_their_canaries(tmp_path: Path) -> None:
    manifest = versions.publish(tmp_path, _shaken(), 0, None, 0, CANARY)
    swapped = {"verifier": manifest.adapters["corrector"], "corrector": manifest.adapters["verifier"]}
    folder = tmp_path / "policy-v0"
    (folder / "verifier").rename(folder / "x")
    (folder / "corrector").rename(folder / "verifier")
    (folder / "x").rename(folder / "corrector")
    proofs = {
        name: msgspec.structs.replace(manifest.adapters[name], weights_sha256=swapped[name].weights_sha256)
        for name in ROLES
    }

    async def load() -> None:
        engine = TransformersEngine(tiny_model(), NumberTokenizer(), Sampler())
        try:
            await engine.load(msgspec.structs.replace(manifest, adapters=proofs), folder)
        finally:
            await engine.close()

    with pytest.raises(PolicyMismatch, match="verifier"):
        asyncio.run(load())


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_the_weights_of_each_role_are_proven(tmp_path: Path, damage: str) -> None:
    manifest = versions.publish(tmp_path, policy(), 0, None, 0, CANARY)
    folder = versions.version_folder(tmp_path, 0)
    prove(folder, manifest)
    file = folder / "verifier" / FILES["lora"]
    file.write_bytes(b"other") if damage == "changed" else file.unlink()
    with pytest.raises(CheckpointError, match="SHA-256" if damage == "changed" else "is missing"):
        prove(folder, manifest)
