"""Batches that are kept to be looked at again: those whose loss was not finite, and those of an alarm.

::

    RUN/batches/batch-000012/  batch.msgpack   [TrainBatch, TrainGroup …] as the learner got them
                               about.json      why, and the metrics
                               COMPLETE

Invariants
* A kept batch is whole or not there; at most `max_bytes` of them stay, the oldest go first, the newest always stays.
* The policy version that a kept batch was made for is not collected (`versions_needed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kbrl_async.durable import numbered, remove_folder, remove_leftovers, write_folder
from kbrl_async.errors import CheckpointError
from protocols.records import TrainBatch, TrainGroup

FOLDER = "batches"
PREFIX = "batch-"
FRAMES = "batch.msgpack"
ABOUT = "about.json"


class About(msgspec.Struct, frozen=True):
    batch_id: str
    version: int
    """The policy version that it was trained on."""
    reason: str
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


def keep(run_dir: Path, frames: Sequence[bytes], about: About, max_bytes: int) -> Path:
    """Writes the batch and removes the oldest ones beyond `max_bytes`; one that is there already is left alone."""
    folder = run_dir / FOLDER
    target = folder / about.batch_id

    def fill(temporary: Path) -> None:
        (temporary / FRAMES).write_bytes(msgspec.msgpack.encode(list(frames)))
        (temporary / ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(about)))

    remove_leftovers(folder, PREFIX)
    if target not in [path for _, path in numbered(folder, PREFIX)]:
        write_folder(target, fill)
    _bound(folder, max_bytes)
    return target


def _bound(folder: Path, max_bytes: int) -> None:
    held = numbered(folder, PREFIX)
    sizes = [sum(file.stat().st_size for file in path.iterdir()) for _, path in held]
    total = sum(sizes)
    for (_, path), size in list(zip(held, sizes, strict=True))[:-1]:
        if total <= max_bytes:
            return
        remove_folder(path)
        total -= size


def find(run_dir: Path, batch_id: str) -> tuple[TrainBatch, list[TrainGroup], About] | None:
    """A kept batch; None where it is not there. CheckpointError where it can't be read."""
    folder = run_dir / FOLDER / batch_id
    if folder not in [path for _, path in numbered(run_dir / FOLDER, PREFIX)]:
        return None
    try:
        frames = msgspec.msgpack.decode((folder / FRAMES).read_bytes(), type=list[bytes])
        batch = msgspec.msgpack.decode(frames[0], type=TrainBatch)
        groups = [msgspec.msgpack.decode(frame, type=TrainGroup) for frame in frames[1:]]
        return batch, groups, msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"kept batch {folder} can't be read: {error}", "Delete the folder") from error


def versions_needed(run_dir: Path) -> set[int]:
    """Policy versions that kept batches were made for."""
    abouts = [path / ABOUT for _, path in numbered(run_dir / FOLDER, PREFIX)]
    return {msgspec.json.decode(path.read_bytes(), type=About).version for path in abouts if path.is_file()}
