"""Atomic checkpoints of a trainer: weights, optimizer, random state, counters and data order. No pickle (I6, I9).

::

    step-000040/  tensors.safetensors   model.*, optimizer.{i}.*, rng.*
                  shard-00001-model-….safetensors, …    in place of it where ranks share the weights out: each its own
                  state.json            counters, last batch id, SHA-256 of the tensors
                  tinker.json           where weights and optimizer are, if they are not here
                  COMPLETE

Invariants
* Resuming from one with as many ranks continues bit by bit (on a CPU); any number of ranks can.
* LoRA checkpoints hold the adapter only.
* Shards are written while training goes on: such a checkpoint is there a while after `save`, or, after a crash, never;
  then the one before it and the replay log are the truth.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kbrl_async.durable import (
    complete,
    file_sha256,
    numbered,
    remove_folder,
    remove_leftovers,
    temporary_of,
    write_folder,
)
from kbrl_async.errors import CheckpointError, KbrlError
from kbrl_async.learning import shards, training_state
from kbrl_async.learning.policies.models import MAIN
from kbrl_async.learning.trainer import Trainer
from kbrl_async.learning.updates import Updates

PREFIX = "step-"
TENSORS = "tensors.safetensors"
STATE = "state.json"


class LearnerProgress(msgspec.Struct, frozen=True):
    """What the learner remembers beside the trainer's own state."""

    version: int = 0
    """Policy version of the weights."""
    last_batch_id: str = ""
    """A batch that is delivered again is answered, not trained again (I1)."""
    batches: int = 0
    samples: int = 0
    tokens: int = 0
    last_metrics: dict[str, float] = msgspec.field(default_factory=dict)
    trained: dict[str, str] = msgspec.field(default_factory=dict)
    """The last batches by id, with the SHA-256 of each: one that comes later than the next ones is known by it."""


class _State(msgspec.Struct, frozen=True):
    progress: LearnerProgress
    optimizer_step: int
    tensors_sha256: str
    """Of `TENSORS`, or of the sums of the shards."""
    format: int = 1
    shards: dict[str, str] = msgspec.field(default_factory=dict)
    """SHA-256 of each, by file name."""

    @property
    def files(self) -> dict[str, str]:
        return self.shards or {TENSORS: self.tensors_sha256}


class Resumed(NamedTuple):
    progress: LearnerProgress
    folder: Path
    notes: list[str]
    """Warnings for the log: checkpoints that could not be read and were passed over."""


def save(directory: Path, trainer: Trainer, progress: LearnerProgress, keep_checkpoints: int) -> Path:
    """Writes `step-{version}` and deletes all but the newest `keep_checkpoints`."""
    if trainer.is_sharded:
        return _save_shards(directory, trainer, progress, keep_checkpoints)
    live = training_state.tensors(trainer) | training_state.random_state(trainer)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in live.items()}
    return _write(directory, tensors, progress, trainer.optimizer_step, keep_checkpoints)


def _save_shards(directory: Path, trainer: Trainer, progress: LearnerProgress, keep_checkpoints: int) -> Path:
    """The same by all ranks. Returns before it is there; a run's first one is waited for, nothing else could be
    resumed from."""
    trainer.settle()
    remove_leftovers(directory, PREFIX)
    folder = directory / f"{PREFIX}{progress.version:06d}"
    temporary, step = temporary_of(folder), trainer.optimizer_step
    temporary.mkdir(parents=True)

    def commit() -> None:
        sums = shards.take_sums(temporary)
        digest = hashlib.sha256("".join(sums.values()).encode()).hexdigest()
        (temporary / STATE).write_bytes(msgspec.json.encode(_State(progress, step, digest, format=2, shards=sums)))
        complete(temporary, folder)
        _forget(directory, keep_checkpoints)

    is_first = latest(directory) is None
    trainer.save(temporary, commit)
    if is_first:
        trainer.settle()
    return folder


def _forget(directory: Path, keep_checkpoints: int) -> None:
    for _, old in numbered(directory, PREFIX)[: -max(1, keep_checkpoints)]:
        remove_folder(old)


def save_remote(
    directory: Path, trainer: Updates, progress: LearnerProgress, write: Callable[[Path], None], keep_checkpoints: int
) -> Path:
    """The same where weights and optimizer are held elsewhere: `write` puts into the folder where."""
    tensors = {training_state.ORDER: trainer.order.get_state()}
    return _write(directory, tensors, progress, trainer.optimizer_step, keep_checkpoints, write)


def _write(
    directory: Path,
    tensors: dict[str, torch.Tensor],
    progress: LearnerProgress,
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
    _forget(directory, keep_checkpoints)
    return folder


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint's folder, or None."""
    found = numbered(directory, PREFIX)
    return found[-1][1] if found else None


def newest(directory: Path) -> int:
    """The version of the newest complete checkpoint; -1 where there is none."""
    found = numbered(directory, PREFIX)
    return found[-1][0] if found else -1


def oldest(directory: Path) -> int:
    """The version of the oldest complete checkpoint; 0 where there is none."""
    found = numbered(directory, PREFIX)
    return found[0][0] if found else 0


def resume(directory: Path, trainer: Trainer) -> Resumed | None:
    """Restores the newest readable checkpoint into `trainer`; None where there is none at all. See `resume_by`."""
    trainer.settle()
    return resume_by(directory, lambda folder: restore(folder, trainer), (CheckpointError,))


def resume_by(
    directory: Path, restored: Callable[[Path], LearnerProgress], damages: tuple[type[KbrlError], ...]
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


def restore(folder: Path, trainer: Trainer) -> LearnerProgress:
    """Restores exactly this checkpoint; the trainer is untouched when it can't be read."""
    if trainer.is_sharded:
        state = _state(folder)
        trainer.load(folder, state.files)
    else:
        state, tensors = _read(folder)
        training_state.check(trainer, {name: tensor.shape for name, tensor in tensors.items()}, folder)
        for name, mine in training_state.to_read_into(trainer, tensors).items():
            mine.copy_(tensors[name].view_as(mine))
        training_state.set_random_state(trainer, tensors)
    trainer.optimizer_step = state.optimizer_step
    return state.progress


def restore_remote(folder: Path, trainer: Updates) -> LearnerProgress:
    """What of a checkpoint is here where its weights are held elsewhere."""
    state, tensors = _read(folder)
    if training_state.ORDER not in tensors:
        raise CheckpointError(f"{folder / TENSORS} lacks the order of data", "Delete this folder")
    trainer.optimizer_step = state.optimizer_step
    trainer.order.set_state(tensors[training_state.ORDER])
    return state.progress


def describe(folder: Path) -> tuple[int, str]:
    """Policy version and SHA-256 of the tensors, as the checkpoint says; the tensors are not read."""
    state = _state(folder)
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


_CURE = "Delete this folder to fall back to the checkpoint before it."


def _state(folder: Path) -> _State:
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=_State)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"checkpoint {folder} can't be read: {error}", _CURE) from error


def _read(folder: Path) -> tuple[_State, dict[str, torch.Tensor]]:
    """All of it, whoever wrote it."""
    state = _state(folder)
    try:
        for name, digest in state.files.items():
            if file_sha256(folder / name) != digest:
                raise CheckpointError(f"{folder / name} is truncated or changed (SHA-256 differs)", _CURE)
        return state, shards.read_whole(folder) if state.shards else load_file(str(folder / TENSORS))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder} can't be read: {error}", _CURE) from error
