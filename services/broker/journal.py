"""The broker's memory: tasks, their records and the policy version in SQLite, committed once per turn of the loop.

    actions of one turn ─▶ Journal.perform … ─▶ commit (one transaction) ─▶ only now Acks and tasks leave

Invariants
* Everything of a turn is journaled or nothing is; a task that comes and goes within a turn costs nothing.
* A record is kept as one part per stage that added frames, so appending never rewrites what is there.
* Ended tasks leave only their id; the ledger says when that is forgotten too. So the file is as large as what was live
  at once, however long the run is; after a restart it is as large as what is (I10).
WAL with `synchronous=NORMAL`: a commit survives `kill -9`; a power cut may lose the last turns, never the order.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kbrl_async.errors import AddressTaken, DiskFull, HostError
from protocols import events as ev
from protocols.queues import STAGES

SPARE_PAGES = 4096
"""Free pages (of 4 KiB) that are kept for the next burst."""
_PARTS = 8
"""Keys of a record's parts are `seq * _PARTS + place of the stage that they were added for`: at most one per stage."""
_PLACE = {stage: place for place, stage in enumerate(STAGES)}
assert len(STAGES) <= _PARTS

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tasks (seq INTEGER PRIMARY KEY, row BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS parts (key INTEGER PRIMARY KEY, frames BLOB NOT NULL);
"""

_encode = msgspec.msgpack.Encoder().encode
_decode_frames = msgspec.msgpack.Decoder(list[bytes]).decode
_decode_counters = msgspec.msgpack.Decoder(dict[str, int]).decode
_decode_row = msgspec.msgpack.Decoder(ev.TaskRow).decode


class Journal:
    """Collects the changes of a turn and commits them; raises `DiskFull` and leaves the file as it was before."""

    def __init__(self, path: str, max_pages: int = 0) -> None:
        self.path = path
        self._rows: dict[int, ev.TaskRow] = {}
        self._parts: dict[int, bytes] = {}
        self._dropped: set[int] = set()
        self._forgotten: set[int] = set()
        self._new: set[int] = set()
        self._policy: int | None = None
        self._db = self._open(max_pages)
        self.epoch = self._next_epoch()

    def _open(self, max_pages: int) -> sqlite3.Connection:
        try:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(self.path, isolation_level=None, timeout=0.5)
            # Exclusive: two brokers on one journal would each give every task away.
            for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL", "cache_size=-65536"):
                db.execute(f"PRAGMA {pragma}")
            db.execute(f"PRAGMA journal_size_limit={64 << 20}")
            if max_pages:
                db.execute(f"PRAGMA max_page_count={max_pages}")
            db.executescript(_SCHEMA)
            shrink(db)
        except (sqlite3.Error, OSError) as error:
            raise _explain(error, self.path) from None
        return db

    def _next_epoch(self) -> int:
        epoch = int(self._meta("epoch") or 0) + 1
        self._transact([("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", [(epoch,)])])
        try:
            # On disk before anybody hears of it: a power cut takes the last commits of the write-ahead log, and by an
            # epoch that came twice nobody would notice that tasks are missing.
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            raise _explain(error, self.path) from None
        return epoch

    def _meta(self, key: str) -> bytes | int | None:
        found = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return found[0] if found else None

    def load(self) -> tuple[ev.Snapshot, dict[str, list[bytes]]]:
        """What a restarted ledger needs, and the records of live tasks by task id."""
        rows = [_decode_row(row) for (row,) in self._db.execute("SELECT row FROM tasks ORDER BY seq")]
        ids = {row.seq: row.task_id for row in rows if row.stage}
        records: dict[str, list[bytes]] = {task_id: [] for task_id in ids.values()}
        for key, frames in self._db.execute("SELECT key, frames FROM parts ORDER BY key"):
            records[ids[key // _PARTS]] += _decode_frames(frames)
        counters = self._meta("counters")
        counted = _decode_counters(counters) if isinstance(counters, bytes) else {}
        return ev.Snapshot(rows, int(self._meta("policy_version") or 0), counted), records

    def perform(self, action: ev.Action, payload: list[bytes]) -> None:
        """Take a change into this turn; actions that are no changes are ignored."""
        match action:
            case ev.Update(row):
                self._rows[row.seq] = row
            case ev.Store(row):
                self._new.add(row.seq)
                self._add_part(row, payload)
            case ev.Append(row):
                self._add_part(row, payload)
            case ev.Finish(row):
                self._rows[row.seq] = row
                self._drop_parts(row.seq)
            case ev.Forget(seq):
                self._rows.pop(seq, None)
                self._drop_parts(seq)
                if seq not in self._new:
                    self._forgotten.add(seq)
            case ev.SetPolicy(version):
                self._policy = version

    def _add_part(self, row: ev.TaskRow, payload: list[bytes]) -> None:
        self._rows[row.seq] = row
        if payload:
            self._parts[row.seq * _PARTS + _PLACE[row.stage]] = _encode(payload)

    def _drop_parts(self, seq: int) -> None:
        for key in range(seq * _PARTS, (seq + 1) * _PARTS):
            self._parts.pop(key, None)
        if seq not in self._new:
            self._dropped.add(seq)

    def commit(self, counters: dict[str, int]) -> None:
        """Write the turn. Nothing is written where nothing has changed."""
        if not (self._rows or self._forgotten or self._new or self._policy is not None):
            return
        self._transact(list(self._statements(counters)))
        for changes in (self._rows, self._parts, self._dropped, self._forgotten, self._new):
            changes.clear()
        self._policy = None

    def _statements(self, counters: dict[str, int]) -> Iterator[tuple[str, list[tuple[object, ...]]]]:
        yield (
            "INSERT OR REPLACE INTO tasks VALUES (?, ?)",
            [(seq, _encode(row)) for seq, row in self._rows.items()],
        )
        yield "INSERT INTO parts VALUES (?, ?)", list(self._parts.items())
        yield (
            "DELETE FROM parts WHERE key BETWEEN ? AND ?",
            [(seq * _PARTS, seq * _PARTS + _PARTS - 1) for seq in self._dropped],
        )
        yield "DELETE FROM tasks WHERE seq = ?", [(seq,) for seq in self._forgotten]
        yield "INSERT OR REPLACE INTO meta VALUES ('counters', ?)", [(_encode(counters),)]
        if self._policy is not None:
            yield "INSERT OR REPLACE INTO meta VALUES ('policy_version', ?)", [(self._policy,)]

    def _transact(self, statements: list[tuple[str, list[tuple[object, ...]]]]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for statement, rows in statements:
                if rows:
                    self._db.executemany(statement, rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise _explain(error, self.path) from None

    def close(self) -> None:
        self._db.close()


def shrink(db: sqlite3.Connection) -> None:
    """Gives the disk back what a burst of tasks took, where that is most of the file: it costs a copy of the rest."""
    ((free,), (pages,)) = (db.execute(f"PRAGMA {name}").fetchone() for name in ("freelist_count", "page_count"))
    if free > max(SPARE_PAGES, pages // 2):
        with contextlib.suppress(sqlite3.OperationalError):  # no room for the copy: then it stays as it is
            db.execute("VACUUM")


def _explain(error: sqlite3.Error | OSError, path: str) -> HostError:
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        code &= 0xFF
    if code == sqlite3.SQLITE_FULL:
        return DiskFull(
            f"no space left for the journal {path}", "Free some space and start the run again: nothing is lost"
        )
    if code == sqlite3.SQLITE_BUSY:
        return AddressTaken(f"the journal {path} is in use", "Stop the other broker or choose another run directory")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return HostError(
            f"the journal {path} is damaged: {error}", "Move it away; the aggregator submits its groups again"
        )
    return HostError(f"can't use the journal {path}: {error}", "Choose a writable run directory")
