"""Kept batches: whole, found again, bounded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kbrl_async.durable import MARKER
from kbrl_async.errors import CheckpointError
from kbrl_async.learning import kept
from protocols.records import TrainBatch, TrainGroup, TrainSample

SAMPLE = TrainSample("g0.r0", [1], [2, 3], [-1.0, -2.0], 0.5, 1.0, 4)


def frames(batch_id: str) -> list[bytes]:
    group = TrainGroup("g0", "p", 1, [SAMPLE] * 20)
    return [msgspec.msgpack.encode(TrainBatch(batch_id, 5, 1.0, ["g0"])), msgspec.msgpack.encode(group)]


def keep(run_dir: Path, number: int, max_bytes: int = 1 << 20) -> None:
    name = f"batch-{number:06d}"
    kept.keep(run_dir, frames(name), kept.About(name, number, "alarm: ess", {"ess": 0.1}), max_bytes)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / kept.FOLDER).iterdir())


def test_a_kept_batch_comes_back_with_the_reason(tmp_path: Path) -> None:
    keep(tmp_path, 7)
    found = kept.find(tmp_path, "batch-000007")
    assert found is not None
    batch, groups, about = found
    assert (batch.batch_id, batch.index, groups[0].samples[0]) == ("batch-000007", 5, SAMPLE)
    assert (about.reason, about.metrics) == ("alarm: ess", {"ess": 0.1})
    assert kept.find(tmp_path, "batch-000008") is None


def test_beyond_the_limit_the_oldest_go_and_the_newest_always_stays(tmp_path: Path) -> None:
    keep(tmp_path, 0)
    size = sum(file.stat().st_size for file in (tmp_path / kept.FOLDER / "batch-000000").iterdir())
    for number in range(1, 5):
        keep(tmp_path, number, 2 * size + 10)
    assert names(tmp_path) == ["batch-000003", "batch-000004"]
    keep(tmp_path, 5, 1)
    assert names(tmp_path) == ["batch-000005"]


def test_a_half_written_batch_is_none_and_goes_with_the_next(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    (tmp_path / kept.FOLDER / "batch-000001" / MARKER).unlink()
    assert kept.find(tmp_path, "batch-000001") is None
    keep(tmp_path, 2)
    assert names(tmp_path) == ["batch-000002"]


def test_a_damaged_batch_is_an_error_with_a_cure(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    (tmp_path / kept.FOLDER / "batch-000001" / kept.FRAMES).write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="can't be read"):
        kept.find(tmp_path, "batch-000001")


def test_the_versions_that_are_needed_are_those_of_what_is_kept(tmp_path: Path) -> None:
    assert kept.versions_needed(tmp_path) == set()
    keep(tmp_path, 3)
    keep(tmp_path, 9)
    assert kept.versions_needed(tmp_path) == {3, 9}
