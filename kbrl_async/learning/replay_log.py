"""The learner's journal: batches trained since the oldest checkpoint that is kept, to be trained again after a crash.

::

    checkpoints/step-000040/      checkpoints/tail/000040.msgpack  000041.msgpack …     state = checkpoint + its log

Invariants
* A batch is on disk before the version that it made is published, so each can be made again from a checkpoint. One
  that never got so far is not here: a batch that kills the learner must not do so again at every start.
* It holds one batch for each version from the oldest kept checkpoint on: `checkpoint_every · keep_checkpoints` at most,
  or what is trained meanwhile where checkpoints take long to write.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from kbrl_async.durable import write_bytes
from kbrl_async.errors import CheckpointError
from protocols.records import TrainBatch, TrainGroup

FOLDER = "tail"  # persisted: runs have it


class _Entry(msgspec.Struct, frozen=True):
    batch: TrainBatch
    groups: list[TrainGroup]


_decode = msgspec.msgpack.Decoder(_Entry).decode


class ReplayLog:
    """`log.add(…)` once a batch is trained, `log.since(version)` after a restart."""

    def __init__(self, checkpoints: Path) -> None:
        self._folder = checkpoints / FOLDER

    def add(self, batch: TrainBatch, groups: list[TrainGroup]) -> None:
        """Returns when it is on disk. Raises `DiskFull`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_bytes(self._path(batch.index), msgspec.msgpack.encode(_Entry(batch, groups)))

    def since(self, version: int) -> Iterator[tuple[TrainBatch, list[TrainGroup]]]:
        """The batches of `version`, `version + 1`, … up to the first gap. CheckpointError where one is damaged."""
        while (path := self._path(version)).is_file():
            try:
                entry = _decode(path.read_bytes())
            except msgspec.DecodeError as error:
                raise CheckpointError(f"{path} can't be read: {error}", "Delete it to go on from before it") from error
            yield entry.batch, entry.groups
            version += 1

    def forget(self, before: int) -> None:
        """Drops batches of older versions: no checkpoint that is kept needs them."""
        for path in self._folder.glob("*.msgpack"):
            if path.stem.isdigit() and int(path.stem) < before:
                path.unlink(missing_ok=True)

    def _path(self, index: int) -> Path:
        return self._folder / f"{index:06d}.msgpack"
