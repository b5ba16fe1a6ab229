"""The broker's journal: as large as what is live, and whole after a kill between any two statements."""

from __future__ import annotations

import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from kbrl_async.lab.chaos.injuries import tear
from protocols import events as ev
from protocols.messages import Stage
from services.broker import journal as module
from services.broker.journal import Journal
from tests.databases import connections, pages


def row(seq: int, stage: str = Stage.COMPILE) -> ev.TaskRow:
    return ev.TaskRow(seq, f"t{seq}", stage)


def turn(journal: Journal, rng: random.Random, live: list[int], moved: set[int], next_seq: int) -> int:
    """What one turn of the loop may do: tasks come, move on, end, and are forgotten."""
    for seq in rng.sample(live, min(len(live), 3)):
        if seq not in moved:
            moved.add(seq)
            journal.perform(ev.Append(row(seq, Stage.BENCH)), [b"report"])
        else:
            live.remove(seq)
            journal.perform(ev.Finish(row(seq, "")), [])
            if rng.random() < 0.5:
                journal.perform(ev.Forget(seq, f"t{seq}"), [])
    for seq in range(next_seq, next_seq + rng.randint(0, 4)):
        journal.perform(ev.Store(row(seq)), [b"request", bytes(500)])
        live.append(seq)
        next_seq = seq + 1
    journal.commit({"submitted": next_seq})
    return next_seq


def known(folder: Path) -> tuple[object, ...]:
    journal = Journal(str(folder / "broker.sqlite"))
    snapshot, records = journal.load()
    journal.close()
    return snapshot.rows, snapshot.counters, records


def test_a_kill_between_any_two_statements_leaves_a_whole_turn_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    made = connections(monkeypatch)
    journal, rng = Journal(str(run / "broker.sqlite")), random.Random(0)
    db = made[-1]
    copies: list[Path] = []
    after_turn: list[tuple[object, ...]] = []

    def copy(target: Path) -> Path:
        shutil.copytree(run, target)
        return target

    live: list[int] = []
    moved: set[int] = set()
    next_seq = 1
    for number in range(6):
        db.set_trace_callback(lambda _: copies.append(copy(tmp_path / f"crash-{len(copies)}")))
        next_seq = turn(journal, rng, live, moved, next_seq)
        db.set_trace_callback(None)
        after_turn.append(known(copy(tmp_path / f"turn-{number}")))
    journal.close()
    assert len(copies) > 20
    seen = [known(path) for path in copies]
    for state in seen:
        assert state in after_turn or state == ([], {}, {})
    assert len({repr(state) for state in seen}) > 4, "they are not all the same"


def test_what_is_left_of_ended_tasks_does_not_grow_with_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = connections(monkeypatch)
    journal, rng = Journal(str(tmp_path / "broker.sqlite")), random.Random(1)
    live: list[int] = []
    moved: set[int] = set()
    next_seq, sizes = 1, []
    for _ in range(300):
        next_seq = turn(journal, rng, live, moved, next_seq)
        for seq in live[:-20]:
            live.remove(seq)
            journal.perform(ev.Finish(row(seq, "")), [])
            journal.perform(ev.Forget(seq, f"t{seq}"), [])
        journal.commit({})
        sizes.append(pages(made[0]))
    journal.close()
    assert next_seq > 400
    assert max(sizes[150:]) <= max(sizes[:150]) * 1.5


def test_a_burst_leaves_a_small_file_behind_it_after_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "broker.sqlite"
    journal = Journal(str(path))
    for seq in range(1, 801):
        journal.perform(ev.Store(row(seq)), [bytes(30_000)])
    journal.commit({})
    for seq in range(1, 800):
        journal.perform(ev.Finish(row(seq, "")), [])
        journal.perform(ev.Forget(seq, f"t{seq}"), [])
    journal.commit({})
    journal.close()
    large = path.stat().st_size
    assert large > module.SPARE_PAGES * 4096
    again = Journal(str(path))
    _, records = again.load()
    again.close()
    assert list(records) == ["t800"]
    assert records["t800"] == [bytes(30_000)]
    assert path.stat().st_size < large / 10


def test_a_disk_without_room_for_the_smaller_copy_stops_no_start(tmp_path: Path) -> None:
    class Refusing:
        def __init__(self, db: sqlite3.Connection) -> None:
            self._db, self.asked = db, 0

        def execute(self, statement: str) -> object:
            if statement == "VACUUM":
                self.asked += 1
                raise sqlite3.OperationalError("database or disk is full")
            if statement == "PRAGMA freelist_count":
                return self._db.execute("SELECT 1000000")
            return self._db.execute(statement)

    db = Refusing(sqlite3.connect(tmp_path / "j.sqlite"))
    module.shrink(db)  # type: ignore[arg-type]
    assert db.asked == 1


def test_an_epoch_does_not_come_again_though_a_power_cut_took_the_last_commit(tmp_path: Path) -> None:
    run, after = tmp_path / "run", tmp_path / "after"
    run.mkdir()
    journal = Journal(str(run / "broker.sqlite"))
    shutil.copytree(run, after)
    tear(after / "broker.sqlite-wal")
    again = Journal(str(after / "broker.sqlite"))
    assert again.epoch > journal.epoch
    journal.close()
    again.close()
