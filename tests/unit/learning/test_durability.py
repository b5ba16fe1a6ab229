"""Published versions and checkpoints: whole or not at all, and resumed bit by bit."""

from __future__ import annotations

import copy
import errno
import json
from pathlib import Path

import pytest
import torch

from kbrl_async.durable import MARKER, write_folder
from kbrl_async.errors import CheckpointError, DiskFull
from kbrl_async.learning import checkpoints
from kbrl_async.learning.checkpoints import LearnerProgress
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import wrap_lora
from kbrl_async.learning.trainer import Trainer
from kbrl_async.weights import prove
from protocols.records import TrainGroup
from tests.models import update_settings

CANARY = [1, 2, 3, 4, 5]
OPTIONS = update_settings(learning_rate=1e-3, minibatches=2, epochs=1)


def publish(directory: Path, model: torch.nn.Module, version: int) -> None:
    versions.publish(directory, model, version, version - 1, version, CANARY)


def test_a_published_version_is_found_and_verified(tmp_path: Path, model: torch.nn.Module) -> None:
    publish(tmp_path, model, 3)
    found = versions.newest(tmp_path)
    assert found is not None
    manifest, folder = found
    assert (manifest.version, manifest.parent, manifest.kind) == (3, 2, "full")
    assert len(manifest.canary_logprobs) == len(CANARY) - 1
    prove(folder, manifest)


def test_a_published_folder_loads_as_a_hugging_face_model(tmp_path: Path, model: torch.nn.Module) -> None:
    from transformers import AutoModelForCausalLM

    publish(tmp_path, model, 0)
    loaded = AutoModelForCausalLM.from_pretrained(versions.version_folder(tmp_path, 0))
    ids = torch.tensor([CANARY])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_lora_publishes_the_adapter_only(tmp_path: Path, model: torch.nn.Module) -> None:
    publish(tmp_path, wrap_lora(model, rank=2), 1)
    names = {p.name for p in versions.version_folder(tmp_path, 1).iterdir()}
    assert names == {"adapter_model.safetensors", "adapter_config.json", "manifest.json", "files.json", MARKER}


def test_changed_weights_are_found(tmp_path: Path, model: torch.nn.Module) -> None:
    publish(tmp_path, model, 0)
    folder = versions.version_folder(tmp_path, 0)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match="SHA-256"):
        prove(folder, versions.load_manifest(folder))


def test_a_crash_while_publishing_leaves_the_version_before_it_newest(tmp_path: Path, model: torch.nn.Module) -> None:
    publish(tmp_path, model, 1)

    def crash(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(versions.version_folder(tmp_path, 2), crash)
    assert versions.newest(tmp_path)[0].version == 1  # type: ignore[index]


def test_a_version_without_its_marker_is_no_version(tmp_path: Path, model: torch.nn.Module) -> None:
    publish(tmp_path, model, 1)
    publish(tmp_path, model, 2)
    half = versions.version_folder(tmp_path, 2)
    (half / MARKER).unlink()
    assert versions.newest(tmp_path)[0].version == 1  # type: ignore[index]
    with pytest.raises(CheckpointError, match="half-written"):
        versions.load_manifest(half)


def test_collection_keeps_the_newest_and_the_protected(tmp_path: Path, model: torch.nn.Module) -> None:
    for version in range(5):
        publish(tmp_path, model, version)
    assert versions.collect_garbage(tmp_path, keep=2, protected=[1]) == [0, 2]
    assert sorted(p.name for p in tmp_path.glob("policy-v*")) == ["policy-v1", "policy-v3", "policy-v4"]


def run(trainer: Trainer, groups: list[TrainGroup], steps: int) -> list[float]:
    return [trainer.step(groups, 1.0)["loss"] for _ in range(steps)]


@pytest.mark.parametrize("lora", [False, True])
def test_resuming_gives_the_same_loss_curve_bit_by_bit(
    tmp_path: Path, model: torch.nn.Module, groups: list[TrainGroup], lora: bool
) -> None:
    def fresh() -> Trainer:
        start = copy.deepcopy(model)
        torch.manual_seed(1)
        return Trainer(wrap_lora(start, 2) if lora else start, OPTIONS)

    unbroken = run(fresh(), groups, 4)
    first = fresh()
    before = run(first, groups, 2)
    checkpoints.save(tmp_path, first, LearnerProgress(version=2, last_batch_id="batch-1"), keep_checkpoints=2)
    second = fresh()
    resumed = checkpoints.resume(tmp_path, second)
    assert resumed is not None
    assert resumed.progress.last_batch_id == "batch-1"
    assert before + run(second, groups, 2) == unbroken


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_it(
    tmp_path: Path, model: torch.nn.Module, groups: list[TrainGroup], damage: str
) -> None:
    trainer = Trainer(model, OPTIONS)
    checkpoints.save(tmp_path, trainer, LearnerProgress(version=1), keep_checkpoints=2)
    trainer.step(groups, 1.0)
    newest = checkpoints.save(tmp_path, trainer, LearnerProgress(version=2), keep_checkpoints=2)
    tensors = newest / checkpoints.TENSORS
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:1000] if damage == "truncated" else whole[:-1] + bytes([whole[-1] ^ 1]))
    resumed = checkpoints.resume(tmp_path, trainer)
    assert resumed is not None
    assert resumed.progress.version == 1
    assert "truncated" in resumed.notes[0]


def test_damage_to_all_checkpoints_is_an_error_and_not_a_fresh_start(tmp_path: Path, model: torch.nn.Module) -> None:
    trainer = Trainer(model, OPTIONS)
    folder = checkpoints.save(tmp_path, trainer, LearnerProgress(version=1), keep_checkpoints=2)
    (folder / checkpoints.STATE).write_text("{")
    with pytest.raises(CheckpointError, match="step-000001"):
        checkpoints.resume(tmp_path, trainer)


def test_no_checkpoint_at_all_is_a_fresh_start(tmp_path: Path, model: torch.nn.Module) -> None:
    assert checkpoints.resume(tmp_path, Trainer(model, OPTIONS)) is None


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, model: torch.nn.Module) -> None:
    checkpoints.save(tmp_path, Trainer(copy.deepcopy(model), OPTIONS), LearnerProgress(version=1), keep_checkpoints=2)
    with pytest.raises(CheckpointError, match="another model"):
        checkpoints.restore(tmp_path / "step-000001", Trainer(wrap_lora(model, 2), OPTIONS))


def test_only_the_last_checkpoints_are_kept_and_leftovers_go(tmp_path: Path, model: torch.nn.Module) -> None:
    trainer = Trainer(model, OPTIONS)
    (tmp_path / ".step-000000.1.tmp").mkdir(parents=True)
    for version in range(1, 4):
        checkpoints.save(tmp_path, trainer, LearnerProgress(version=version), keep_checkpoints=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_a_checkpoint_holds_no_pickle(tmp_path: Path, model: torch.nn.Module) -> None:
    folder = checkpoints.save(tmp_path, Trainer(model, OPTIONS), LearnerProgress(version=1), keep_checkpoints=2)
    assert sorted(p.name for p in folder.iterdir()) == [MARKER, checkpoints.STATE, checkpoints.TENSORS]
    json.loads((folder / checkpoints.STATE).read_text())


def test_a_version_that_a_kill_left_half_written_goes_with_the_next_one(tmp_path: Path, model: torch.nn.Module) -> None:
    (tmp_path / ".policy-v0.77.tmp").mkdir()
    publish(tmp_path, model, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["policy-v1"]


def test_leftovers_go_first_so_that_they_do_not_fill_the_disk(
    tmp_path: Path, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".step-000000.1.tmp"
    left.mkdir()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(DiskFull):
        checkpoints.save(tmp_path, Trainer(model, OPTIONS), LearnerProgress(version=1), keep_checkpoints=2)
    assert not left.exists()
