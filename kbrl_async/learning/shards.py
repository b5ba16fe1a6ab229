"""Sharded tensors on disk, by torch.distributed.checkpoint in its safetensors form: no pickle, any number of ranks.

::

    rank r ─ copy to the host ─▶ [thread: shard-0000r-model-….safetensors, its SHA-256] ─▶ rank 0: commit
                     └─ training goes on

Invariants
* `commit` runs at rank 0 once the files of all ranks are on disk, and never if one of them could not be written.
* A file holds about `FILE_BYTES` of a rank at most: it is put together in memory before it is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult

from kbrl_async.durable import file_sha256

FILE_BYTES = 4 << 30
_SUM = ".sha256"

Commit = Callable[[], None]


def write(state: Mapping[str, torch.Tensor], folder: Path, group: Any, ranks: int, commit: Commit) -> Future[Any]:
    """Writes this rank's share of `state` into `folder`, which is there; returns once `state` may change.

    All ranks call it, `group` is theirs and used for nothing else meanwhile. Plain tensors are those of rank 0.
    """
    writer = _Writer(folder, _file_numbers(state, ranks), commit)
    pending = async_save(dict(state), storage_writer=writer, process_group=group)
    assert isinstance(pending, Future)
    return pending


def read(folder: Path, into: dict[str, torch.Tensor], group: Any = None) -> None:
    """Reads what each tensor of `into` holds of the whole, whoever wrote it; all ranks of `group` call it."""
    reader = HuggingFaceStorageReader(str(folder))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it shall be
        load(into, storage_reader=reader, process_group=group, no_dist=group is None)


def shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Of all tensors that the files of a folder hold together."""
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    stored = {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}
    return {name: (entry.size, entry.properties.dtype) for name, entry in stored.items()}


def read_whole(folder: Path) -> dict[str, torch.Tensor]:
    """All of a folder's tensors, put together, on the host."""
    out = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in shapes(folder).items()}
    read(folder, out)
    return out


def take_sums(folder: Path) -> dict[str, str]:
    """SHA-256 by file, as the ranks found them when they wrote; what said so goes."""
    out = {}
    for path in sorted(folder.glob(f"*{_SUM}")):
        out[path.name.removesuffix(_SUM)] = path.read_text()
        path.unlink()
    return out


class _Writer(HuggingFaceStorageWriter):
    """Adds the sums of files and the commit to torch's own."""

    def __init__(self, folder: Path, file_numbers: dict[str, int], commit: Commit) -> None:
        super().__init__(str(folder), fqn_to_index_mapping=file_numbers, save_distributed=True)
        self._folder, self._commit = folder, commit

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        for name in names:
            (self._folder / f"{name}{_SUM}").write_text(file_sha256(self._folder / name))
        return written

    def finish(self, metadata: Metadata, results: Sequence[list[WriteResult]]) -> None:
        self._commit()


def _file_numbers(state: Mapping[str, torch.Tensor], ranks: int) -> dict[str, int]:
    """Which of a rank's files each tensor goes into."""
    out, filled = {}, 0
    for name, tensor in state.items():
        filled += tensor.numel() * tensor.element_size() // ranks
        out[name] = 1 + filled // FILE_BYTES
    return out
