"""Atomic checkpoints of a trainer: weights, optimizer, random state, counters and data order. No pickle (I6, I9).

::

    step-000040/  tensors.safetensors   model.*, optimizer.{i}.*, rng.*
                  state.json            counters, last batch id, SHA-256 of the tensors
                 tinker.json           where weights and optimizer are, if they are not here
                  COMPLETE

Resuming from one continues bit by bit (on a CPU). LoRA checkpoints hold the adapter only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kbrl_async.durable import (
    file_sha256,
    numbered,
    remove_folder,
    remove_leftovers,
    write_folder,
)
from kbrl_async.errors import CheckpointError, KbrlError
from kbrl_async.learning.policies.models import MAIN
from kbrl_async.learning.trainer import Trainer
from kbrl_async.learning.updates import Updates

PREFIX = "step-"
TENSORS = "tensors.safetensors"
STATE = "state.json"


class Progress(msgspec.Struct, frozen=True):
    """What the learner remembers beside the trainer's own state."""

    version: int = 0
    """Policy version of the weights."""
    last_batch_id: str = ""
    """A batch that is delivered again is answered, not trained again (I1)."""
    batches: int = 0
    samples: int = 0
    tokens: int = 0
    last_metrics: dict[str, float] = msgspec.field(default_factory=dict)


class _State(msgspec.Struct, frozen=True):
    progress: Progress
    optimizer_step: int
    tensors_sha256: str
    format: int = 1


class Resumed(NamedTuple):
    progress: Progress
    folder: Path
    notes: list[str]
    """Warnings for the log: checkpoints that could not be read and were passed over."""


def save(directory: Path, trainer: Trainer, progress: Progress, keep_checkpoints: int) -> Path:
    """Writes `step-{version}` and deletes all but the newest `keep_checkpoints`."""
    return _write(directory, _tensors(trainer), progress, trainer.optimizer_step, keep_checkpoints)


def save_remote(
    directory: Path, trainer: Updates, progress: Progress, write: Callable[[Path], None], keep_checkpoints: int
) -> Path:
    """The same where weights and optimizer are held elsewhere: `write` puts into the folder where."""
    tensors = {"rng.order": trainer.order.get_state()}
    return _write(directory, tensors, progress, trainer.optimizer_step, keep_checkpoints, write)


def _write(
    directory: Path,
    tensors: dict[str, torch.Tensor],
    progress: Progress,
    optimizer_step: int,
    keep_checkpoints: int,
    write: Callable[[Path], None] = lambda _: None,
) -> Path:
    folder = directory / f"{PREFIX}{progress.version:06d}"

    def fill(temporary: Path) -> None:
        save_file(tensors, str(temporary / TENSORS))
        state = _State(progress, optimizer_step, file_sha256(temporary / TENSORS))
        (temporary / STATE).write_bytes(msgspec.json.encode(state))
        write(temporary)

    remove_leftovers(directory, PREFIX)  # first: they may be what fills the disk
    write_folder(folder, fill)
    for _, old in numbered(directory, PREFIX)[: -max(1, keep_checkpoints)]:
        remove_folder(old)
    return folder


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint's folder, or None."""
    found = numbered(directory, PREFIX)
    return found[-1][1] if found else None


def oldest(directory: Path) -> int:
    """The version of the oldest complete checkpoint; 0 where there is none."""
    found = numbered(directory, PREFIX)
    return found[0][0] if found else 0


def resume(directory: Path, trainer: Trainer) -> Resumed | None:
    """Restores the newest readable checkpoint into `trainer`; None where there is none at all. See `resume_by`."""
    return resume_by(directory, lambda folder: restore(folder, trainer), (CheckpointError,))


def resume_by(
    directory: Path, restored: Callable[[Path], Progress], damages: tuple[type[KbrlError], ...]
) -> Resumed | None:
    """What `restored` gives of the newest checkpoint that it does not raise one of `damages` for.

    A damaged one is passed over with a note. CheckpointError when every one is damaged: starting afresh in silence
    would throw the run away.
    """
    notes: list[str] = []
    found = numbered(directory, PREFIX)
    for _, folder in reversed(found):
        try:
            return Resumed(restored(folder), folder, notes)
        except damages as error:
            notes.append(f"{error} Falling back to the checkpoint before it.")
    if found:
        raise CheckpointError(f"no checkpoint in {directory} can be read ({notes[0]})", "Delete the folder to restart")
    return None


def restore(folder: Path, trainer: Trainer) -> Progress:
    """Restores exactly this checkpoint; the trainer is untouched when it can't be read."""
    state, tensors = _read(folder)
    expected = _tensor_names(trainer)
    if expected - tensors.keys():
        missing = sorted(expected - tensors.keys())[0]
        raise CheckpointError(f"{folder / TENSORS} lacks {missing}: it is of another model", "Use the run's own model")
    for name, parameter in trainer.parameters.items():
        if parameter.shape != tensors[f"model.{name}"].shape:
            raise CheckpointError(f"{folder / TENSORS}: {name} has another shape", "Use the run's own model")
    _load(trainer, state, tensors)
    return state.progress


def restore_remote(folder: Path, trainer: Updates) -> Progress:
    """What of a checkpoint is here where its weights are held elsewhere."""
    state, tensors = _read(folder)
    if "rng.order" not in tensors:
        raise CheckpointError(f"{folder / TENSORS} lacks the order of data", "Delete this folder")
    trainer.optimizer_step = state.optimizer_step
    trainer.order.set_state(tensors["rng.order"])
    return state.progress


def describe(folder: Path) -> tuple[int, str]:
    """Policy version and SHA-256 of the tensors, as the checkpoint says; the tensors are not read."""
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=_State)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"checkpoint {folder} can't be read: {error}", "Choose another one") from error
    return state.progress.version, state.tensors_sha256


@torch.no_grad()
def load_weights(folder: Path, model: torch.nn.Module) -> None:
    """Puts a checkpoint's weights into `model`, without a trainer. CheckpointError where it is of another model."""
    _, tensors = _read(folder)
    parameters = dict(model.named_parameters())
    stored = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    odd = [name for name, t in stored.items() if name not in parameters or parameters[name].shape != t.shape]
    if odd or not stored:
        raise CheckpointError(f"{folder / TENSORS} is of another model ({[*odd, 'empty'][0]})", "Use its own base")
    for name, tensor in stored.items():
        parameters[name].copy_(tensor)


def adapters_in(folder: Path) -> tuple[str, ...]:
    """Names of the LoRA adapters beside the main one that a checkpoint holds."""
    _, tensors = _read(folder)
    found = {match[1] for name in tensors if (match := re.search(r"\.lora_[AB]\.([^.]+)\.weight$", name))}
    return tuple(sorted(found - {MAIN}))


def _read(folder: Path) -> tuple[_State, dict[str, torch.Tensor]]:
    cure = "Delete this folder to fall back to the checkpoint before it."
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=_State)
        if file_sha256(folder / TENSORS) != state.tensors_sha256:
            raise CheckpointError(f"{folder / TENSORS} is truncated or changed (SHA-256 differs)", cure)
        return state, load_file(str(folder / TENSORS))
    except (OSError, msgspec.DecodeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder} can't be read: {error}", cure) from error


def _tensor_names(trainer: Trainer) -> set[str]:
    return {f"model.{name}" for name in trainer.parameters} | {"rng.torch", "rng.order"}


def _tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    # A tied weight stands there once; buffers are constants of the configuration.
    out = {f"model.{name}": p.detach().cpu().contiguous() for name, p in trainer.parameters.items()}
    for index, entry in trainer.optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            out[f"optimizer.{index}.{key}"] = torch.as_tensor(value).detach().cpu().contiguous()
    out["rng.torch"] = torch.get_rng_state()
    out["rng.order"] = trainer.order.get_state()
    if trainer.device.type == "cuda":
        out["rng.cuda"] = torch.cuda.get_rng_state(trainer.device)
    return out


@torch.no_grad()
def _load(trainer: Trainer, state: _State, tensors: dict[str, torch.Tensor]) -> None:
    for name, parameter in trainer.parameters.items():
        parameter.copy_(tensors[f"model.{name}"])
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            moments.setdefault(int(index), {})[key] = tensor
    groups = trainer.optimizer.state_dict()["param_groups"]
    trainer.optimizer.load_state_dict({"state": moments, "param_groups": groups})
    trainer.optimizer_step = state.optimizer_step
    torch.set_rng_state(tensors["rng.torch"])
    trainer.order.set_state(tensors["rng.order"])
    if trainer.device.type == "cuda" and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"], trainer.device)
