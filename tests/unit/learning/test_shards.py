"""Checkpoints that ranks write while training goes on, weights that come layer by layer: one rank stands for all."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from kbrl_async.errors import CheckpointError, ConfigError, DiskFull
from kbrl_async.learning import checkpoints, shards
from kbrl_async.learning.checkpoints import LearnerProgress
from kbrl_async.learning.distributed import ProcessGroup
from kbrl_async.learning.policies.models import causal_lm, load_model
from kbrl_async.learning.policies.streaming import Folder, RandomWeights, materialise, skeleton
from kbrl_async.learning.trainer import Trainer
from protocols.records import TrainGroup
from services.learner.policy import make_trainer, unfilled
from tests.ports import free_port
from tests.unit.learning.rank import settings
from tests.unit.learning.test_process_group import policy

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy(tmp_path_factory.mktemp("base"), "full")


@pytest.fixture(scope="module")
def alone() -> Iterator[ProcessGroup]:
    """A group of one rank."""
    with pytest.MonkeyPatch.context() as patch:
        port = str(free_port())
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            patch.setenv(name, value)
        group = ProcessGroup(CPU)
    yield group
    group.close()


@pytest.fixture
def trainer(base: Path, alone: ProcessGroup) -> Trainer:
    return make_trainer(settings("lora"), base, "cpu", alone)


def save(folder: Path, trainer: Trainer, version: int) -> None:
    checkpoints.save(folder, trainer, LearnerProgress(version=version), keep_checkpoints=2)


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, trainer: Trainer, groups: list[TrainGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, trainer, 1)
    assert checkpoints.latest(tmp_path) is not None, "a run's first one is waited for"
    may_write, write = threading.Event(), HuggingFaceStorageWriter.write_data

    def write_late(*given: Any) -> Any:
        may_write.wait(60)
        return write(*given)

    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", write_late)
    save(tmp_path, trainer, 2)
    held = {name: whole.clone() for name, whole in trainer.gathered_weights() or ()}
    trainer.step(groups, 1.0)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000001"]
    may_write.set()
    trainer.settle()
    resumed = checkpoints.resume(tmp_path, trainer)
    assert resumed is not None
    assert resumed.progress.version == 2
    for name, whole in trainer.gathered_weights() or ():
        assert torch.equal(whole, held[name]), "what was saved is what was there at its time"


def test_only_the_last_checkpoints_are_kept(tmp_path: Path, trainer: Trainer) -> None:
    for version in range(1, 5):
        save(tmp_path, trainer, version)
    trainer.settle()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004"]


@pytest.mark.parametrize("damage", ["truncated", "changed", "gone"])
def test_a_damaged_shard_falls_back_to_the_checkpoint_before(tmp_path: Path, trainer: Trainer, damage: str) -> None:
    for version in (1, 2):
        save(tmp_path, trainer, version)
    trainer.settle()
    (shard,) = (tmp_path / "step-000002").glob("shard-*")
    whole = shard.read_bytes()
    shard.unlink()
    if damage != "gone":
        shard.write_bytes(whole[:1000] if damage == "truncated" else whole[:-1] + bytes([whole[-1] ^ 1]))
    resumed = checkpoints.resume(tmp_path, trainer)
    assert resumed is not None
    assert (resumed.progress.version, len(resumed.notes)) == (1, 1)
    assert "SHA-256" in resumed.notes[0]
    with pytest.raises(CheckpointError):
        checkpoints.adapters_in(tmp_path / "step-000002")


def test_a_checkpoint_of_another_model_is_refused_and_nothing_changes(
    tmp_path: Path, trainer: Trainer, base: Path
) -> None:
    whole = make_trainer(settings("full"), base, "cpu")
    checkpoints.save(tmp_path, whole, LearnerProgress(version=1), keep_checkpoints=2)
    before = dict(trainer.gathered_weights() or ())
    with pytest.raises(CheckpointError, match="another model"):
        checkpoints.restore(tmp_path / "step-000001", trainer)
    after = dict(trainer.gathered_weights() or ())
    assert before
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_full_disk_is_said_at_the_next_checkpoint(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> str:
        raise OSError(errno.ENOSPC, "no space left")

    save(tmp_path, trainer, 1)
    monkeypatch.setattr(shards, "file_sha256", full)
    save(tmp_path, trainer, 2)
    with pytest.raises(DiskFull):
        save(tmp_path, trainer, 3)
    monkeypatch.undo()
    save(tmp_path, trainer, 3)
    trainer.settle()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003"]


@pytest.mark.parametrize("master_dtype", ["float32", "bfloat16"])
def test_bf16_is_computed_in_and_masters_are_as_set(
    tmp_path: Path, base: Path, alone: ProcessGroup, groups: list[TrainGroup], master_dtype: str
) -> None:
    exact = settings("full")
    learner = msgspec.structs.replace(exact.learner, dtype="bfloat16", master_dtype=master_dtype)
    sampler = msgspec.structs.replace(exact.sampler, engine="vllm")
    rounded = msgspec.structs.replace(exact, learner=learner, sampler=sampler)
    trainer = make_trainer(rounded, base, "cpu", alone)
    held = {p.dtype for p in trainer.parameters.values()}
    assert held == {getattr(torch, master_dtype)}
    expected = make_trainer(exact, base, "cpu").step(groups, 1.0)
    found = trainer.step(groups, 1.0)
    assert found["loss"] != expected["loss"], "bf16 rounds"
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
    save(tmp_path, trainer, 1)
    again = make_trainer(rounded, base, "cpu", alone)
    checkpoints.restore(tmp_path / "step-000001", again)
    assert again.step(groups, 1.0)["loss"] == trainer.step(groups, 1.0)["loss"]


# ── weights layer by layer ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_layers_get_the_weights_and_adapters_that_the_whole_model_has(base: Path, lora_rank: int) -> None:
    torch.manual_seed(0)
    expected = load_model(str(base), lora_rank=lora_rank)
    torch.manual_seed(0)
    model, source = unfilled(str(base), "fp32", lora_rank)
    lm = causal_lm(model)
    for unit in (*lm.get_decoder().layers, lm):  # type: ignore[operator]
        materialise(lm, unit, CPU, source)
    tensors = model.state_dict()
    assert tensors.keys() == expected.state_dict().keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in expected.state_dict().items())
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(ids).logits, expected(ids).logits), "buffers, too"


def test_a_base_that_is_not_there_is_said_as_for_a_whole_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        unfilled(str(tmp_path / "nothing"), "fp32", 0)


def test_a_shape_is_enough_for_random_weights(base: Path) -> None:
    lm = skeleton(str(base), torch.float32)
    assert all(p.is_meta for p in lm.parameters())
    materialise(lm, lm, CPU, RandomWeights())
    assert 0.01 < float(lm.get_decoder().layers[0].mlp.up_proj.weight.detach().std()) < 0.03  # type: ignore[operator]
    assert torch.isfinite(lm(torch.tensor([[1, 2, 3]])).logits).all()


def test_a_folder_without_a_weight_does_not_fill_a_model(base: Path, tmp_path: Path) -> None:
    tensors = load_file(str(base / "model.safetensors"))
    tensors.pop("model.norm.weight")
    save_file(tensors, str(tmp_path / "model.safetensors"))
    assert Folder.of(str(tmp_path), skeleton(str(base), torch.float32)) is None
    assert Folder.of(str(base), skeleton(str(base), torch.float32)) is not None
