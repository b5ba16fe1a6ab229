"""The archive of scored turns: complete, once, bounded, readable while it is written."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
from pathlib import Path

import msgspec
import pytest

from kbrl_async.errors import CheckpointError, DiskFull
from kbrl_async.runs.archive.archive import (
    ArchiveReader,
    ArchiveWriter,
    GroupEnd,
    TurnOutcome,
    TurnRow,
    UpdateRow,
    make_row,
)
from protocols.rollout import Record
from tests.records import record

DEADLINE_S = 30.0


def row(task_id: str = "g000001.r0", **more: object) -> TurnRow:
    made = make_row(task_id, record(task_id), at=105.0, clock=5.0, reward=0.75)
    return msgspec.structs.replace(made, **more)


def write(path: Path, *rows: TurnRow, max_bytes: int = 0, text: str = "answer") -> None:
    with ArchiveWriter(path, max_bytes) as archive:
        for one in rows:
            archive.add(one, record(one.task_id, text + one.task_id).encode()).result(DEADLINE_S)


def test_a_turn_comes_back_with_its_columns_and_its_whole_record(tmp_path: Path) -> None:
    write(tmp_path / "a.sqlite", row())
    with ArchiveReader(tmp_path / "a.sqlite") as archive:
        (found,) = archive.rows()
        assert (found.problem_id, found.level, found.policy_version, found.tokens) == ("L1/07_relu", 1, 3, 3)
        assert (found.reward, found.compiled, found.correct, found.speedup, found.lo, found.hi) == (
            0.75, True, True, 1.5, 1.4, 1.6,
        )  # fmt: skip
        assert archive.record("g000001.r0") == record("g000001.r0", "answerg000001.r0")
        assert archive.count() == 1


def test_spans_tell_waiting_from_working_by_stage() -> None:
    spans = {span.stage: span for span in row().spans}
    assert (spans["generate"].queued, spans["generate"].started, spans["generate"].worker) == (100, 101, "sampler.1")
    assert (spans["bench"].queued, spans["bench"].started, spans["bench"].finished) == (103, 103.5, 104)
    assert (spans["score"].queued, spans["score"].started) == (104, 105)


def test_a_turn_that_the_infrastructure_lost_has_a_status_and_no_reward() -> None:
    lost = make_row("g000001.r0", Record.of(record().request, status="worker_lost"), at=1.0)
    assert (lost.status, lost.reward, lost.policy_version, lost.correct) == ("worker_lost", None, -1, False)
    assert [span.stage for span in lost.spans] == ["score"]


def test_frames_that_are_no_record_are_an_error_that_names_their_turn(tmp_path: Path) -> None:
    with ArchiveWriter(tmp_path / "a.sqlite") as writer:
        writer.add(row(), record().encode()[1:]).result(DEADLINE_S)
    with (
        ArchiveReader(tmp_path / "a.sqlite") as archive,
        pytest.raises(CheckpointError, match=r"no record of g000001\.r0"),
    ):
        archive.record("g000001.r0")


def test_adding_a_turn_again_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a.sqlite", row(), row(reward=0.1))
    write(tmp_path / "a.sqlite", row(reward=0.2), text="another ")
    with ArchiveReader(tmp_path / "a.sqlite") as archive:
        assert [found.reward for found in archive.rows()] == [0.75]
        assert archive.record("g000001.r0") == record("g000001.r0", "answerg000001.r0")


def test_what_is_done_is_on_disk_before_the_writer_closes(tmp_path: Path) -> None:
    with ArchiveWriter(tmp_path / "a.sqlite") as writer:
        writer.add(row(), record().encode()).result(DEADLINE_S)
        with ArchiveReader(tmp_path / "a.sqlite") as reader:
            assert reader.count() == 1


def test_closing_writes_what_nobody_waited_for(tmp_path: Path) -> None:
    with ArchiveWriter(tmp_path / "a.sqlite") as writer:
        for i in range(100):
            writer.add(row(f"g000001.r{i}"), record().encode())
    with ArchiveReader(tmp_path / "a.sqlite") as archive:
        assert archive.count() == 100


def test_outcomes_group_ends_and_updates_join_the_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.sqlite", row(), row("g000002.r0"))
    with ArchiveWriter(tmp_path / "a.sqlite") as writer:
        writer.outcomes([TurnOutcome("g000001.r0", "batch-000000", 4, 0.9, -1.5)])
        writer.ended(
            [GroupEnd("g000001", "L1/07_relu", "trained"), GroupEnd("g000002", "L1/07_relu", "filtered", "zero")]
        )
        writer.ended([GroupEnd("g000001", "L1/07_relu", "failed")])
        writer.updated(UpdateRow("batch-000000", 5, {"loss": 0.5}, 1.0, 2.0))
    with ArchiveReader(tmp_path / "a.sqlite") as archive:
        trained, other = archive.rows()
        assert (trained.batch_id, trained.trained_on, trained.turn_return, trained.advantage) == (
            "batch-000000", 4, 0.9, -1.5,
        )  # fmt: skip
        assert (other.batch_id, other.trained_on, other.advantage) == ("", None, None)
        assert {name: end.outcome for name, end in archive.groups().items()} == {
            "g000001": "trained",
            "g000002": "filtered",
        }
        assert archive.updates() == [UpdateRow("batch-000000", 5, {"loss": 0.5}, 1.0, 2.0)]
        assert [found.task_id for found in archive.rows(batch_id="batch-000000")] == ["g000001.r0"]


def test_rows_are_chosen_by_what_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "a.sqlite", row(), row("g000002.r0", purpose="before", fault="incorrect"), row("g000002.r1"))
    with ArchiveReader(tmp_path / "a.sqlite") as archive:
        assert [r.task_id for r in archive.rows(group_id="g000002")] == ["g000002.r0", "g000002.r1"]
        assert [r.task_id for r in archive.rows(purpose="before", fault="incorrect")] == ["g000002.r0"]
        assert [r.task_id for r in archive.rows(prefix="g000002.r")] == ["g000002.r0", "g000002.r1"]
        assert list(archive.rows(prefix="g%")) == []


def test_beyond_the_limit_the_oldest_records_go_and_their_columns_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    write(path, row())
    with ArchiveReader(path) as archive:
        (one,) = archive.rows()
    limit = 5 * one.bytes + one.bytes // 2
    with ArchiveWriter(path, limit) as writer:
        best = row("g000000.r0")
        writer.add(best, record(best.task_id).encode(), keep=True).result(DEADLINE_S)
        for i in range(1, 20):
            writer.add(row(f"g000001.r{i}"), record(f"g000001.r{i}").encode()).result(DEADLINE_S)
    with ArchiveReader(path) as archive:
        rows = list(archive.rows())
        assert len(rows) == 21
        assert sum(found.bytes for found in rows) <= limit
        assert archive.record("g000001.r0") is None
        assert archive.record("g000001.r19")
        assert archive.record("g000000.r0"), "a record that is to be kept was evicted"


def test_a_missing_archive_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="keep=all"):
        ArchiveReader(tmp_path / "rollouts.sqlite")


def test_an_archive_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.sqlite", row())
    db = sqlite3.connect(tmp_path / "a.sqlite")
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(CheckpointError, match="newer"):
        ArchiveReader(tmp_path / "a.sqlite")


def test_a_write_that_fails_reaches_the_one_who_waits(tmp_path: Path) -> None:
    with ArchiveWriter(tmp_path / "a.sqlite") as writer:
        db = sqlite3.connect(tmp_path / "a.sqlite")
        db.execute("DROP TABLE outcomes")
        db.close()
        with pytest.raises(Exception, match="outcomes"):
            writer.outcomes([TurnOutcome("t", "b", 0, 0.0, 0.0)]).result(DEADLINE_S)
        writer.add(row()).result(DEADLINE_S)


def test_an_archive_that_may_not_grow_says_so_however_the_system_tells_it(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ArchiveWriter(tmp_path / "rollouts.sqlite") as archive:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # a write fails as it does on a full tmpfs
        try:
            with pytest.raises(DiskFull):
                archive.add(row()).result(DEADLINE_S)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        archive.add(row()).result(DEADLINE_S)


def test_a_waiter_that_is_cancelled_leaves_the_writer_at_work(tmp_path: Path) -> None:
    async def body(archive: ArchiveWriter, other: sqlite3.Connection) -> None:
        other.execute("BEGIN IMMEDIATE")  # nothing can be written until that is over
        waiting = asyncio.create_task(_written(archive, row("g000001.r0")))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        other.execute("ROLLBACK")
        await asyncio.wait_for(_written(archive, row("g000002.r0")), DEADLINE_S)

    with ArchiveWriter(tmp_path / "a.sqlite") as archive:
        other = sqlite3.connect(tmp_path / "a.sqlite", isolation_level=None)
        asyncio.run(body(archive, other))
        other.close()
    with ArchiveReader(tmp_path / "a.sqlite") as found:
        assert found.count() == 2


def test_a_record_that_cannot_be_written_leaves_the_writer_at_work(tmp_path: Path) -> None:
    with ArchiveWriter(tmp_path / "a.sqlite") as archive:
        with pytest.raises(TypeError):
            archive.add(row(), [object()]).result(DEADLINE_S)  # type: ignore[list-item]
        archive.add(row("g000002.r0")).result(DEADLINE_S)
    with ArchiveReader(tmp_path / "a.sqlite") as found:
        assert [one.task_id for one in found.rows()] == ["g000002.r0"]


async def _written(archive: ArchiveWriter, one: TurnRow) -> None:
    await asyncio.wrap_future(archive.add(one))


def test_an_archive_from_before_is_read_and_gets_the_columns_that_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    write(path, row(), row("g000001.r1", lo=0.01, hi=600.0))
    with sqlite3.connect(path) as db:
        for name in ("disturbed", "step"):
            db.execute(f"ALTER TABLE rollouts DROP COLUMN {name}")
    with ArchiveReader(path) as archive:
        assert [(found.disturbed, found.step) for found in archive.rows()] == [(False, ""), (True, "")]
    write(path, row("g000001.r2", disturbed=True))
    with ArchiveReader(path) as archive:
        assert [(found.disturbed, found.step) for found in archive.rows()][1:] == [(True, ""), (True, "full_inputs")]
