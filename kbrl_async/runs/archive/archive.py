"""Every scored turn of a run in one SQLite file: what it came to as columns, and its whole record to look at again.

::

    scored turn ─ add ─▶ queue ─▶ [writer's thread: compress, one commit for all that waits] ─▶ RUN/rollouts.sqlite
    batch made  ─ outcomes ─▶ │                                        │
    group ended ─ ended ────▶ │                                        └─▶ Archive: rows, records, batches (read-only)

Invariants
* A turn stands there once: adding it again changes nothing. What was trained on it is written beside it, once known.
* A `Future` of `add` that is done means: on disk, and there after `kill -9`. Who waits for it loses nothing.
* Columns stay for ever (half a kilobyte a turn); records are bounded: beyond `max_bytes` the oldest go first, those
  marked `keep` never (I10).
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Queue
from types import TracebackType

import msgspec

from kbrl_async.durable import wants_room
from kbrl_async.errors import CheckpointError, DiskFull, HostError
from kbrl_async.runs.archive.history import open_read_only
from kbrl_async.runs.archive.rows import GroupEnd, TurnOutcome, TurnRow, UpdateRow, make_row
from protocols.records import says_nothing
from protocols.rollout import Record, RecordError, StageSpan

__all__ = ["FILE", "ArchiveReader", "ArchiveWriter", "GroupEnd", "TurnOutcome", "TurnRow", "UpdateRow", "make_row"]

FILE = "rollouts.sqlite"
FORMAT = 1
WAITING = 4096
"""Most rows that wait for the thread; who adds more waits with them."""
EVICT_TO = 0.9
"""Records are evicted down to this share of the limit, so that not every turn evicts one."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rollouts (
    id INTEGER PRIMARY KEY, task_id TEXT NOT NULL UNIQUE, group_id TEXT NOT NULL, rollout_id TEXT NOT NULL,
    turn INTEGER NOT NULL, role TEXT NOT NULL, problem_id TEXT NOT NULL, level INTEGER NOT NULL, purpose TEXT NOT NULL,
    policy_version INTEGER NOT NULL, clock REAL NOT NULL, at REAL NOT NULL, status TEXT NOT NULL, fault TEXT NOT NULL,
    rule TEXT NOT NULL, reward REAL, compiled INTEGER NOT NULL, correct INTEGER NOT NULL,
    speedup REAL, lo REAL, hi REAL, tokens INTEGER NOT NULL, spans BLOB NOT NULL, bytes INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS by_group ON rollouts (group_id);
CREATE INDEX IF NOT EXISTS by_rollout ON rollouts (rollout_id);
CREATE TABLE IF NOT EXISTS frames (id INTEGER PRIMARY KEY, keep INTEGER NOT NULL, frames BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS outcomes (
    task_id TEXT PRIMARY KEY, batch_id TEXT NOT NULL, trained_on INTEGER NOT NULL, return REAL NOT NULL,
    advantage REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_batch ON outcomes (batch_id);
CREATE TABLE IF NOT EXISTS groups (
    group_id TEXT PRIMARY KEY, problem_id TEXT NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL,
    clock REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS updates (
    batch_id TEXT PRIMARY KEY, version INTEGER NOT NULL, metrics BLOB NOT NULL, started REAL NOT NULL,
    finished REAL NOT NULL
) WITHOUT ROWID;
"""

_ADDED = {"disturbed": "0", "step": "''"}
"""Columns that archives from before lack, and what stands for them there."""
_OWN = TurnRow.__struct_fields__[: TurnRow.__struct_fields__.index("batch_id")]
"""Columns of the table; the rest of a `TurnRow` is joined."""
_INSERT_ROW = f"INSERT OR IGNORE INTO rollouts ({', '.join(_OWN)}) VALUES ({', '.join('?' * len(_OWN))})"  # noqa: S608 - constants
_SPANS = msgspec.msgpack.Decoder(tuple[StageSpan, ...])
_METRICS = msgspec.msgpack.Decoder(dict[str, float])
_BLOBS = msgspec.msgpack.Decoder(list[bytes])

Work = Callable[[sqlite3.Connection], None]


class ArchiveWriter:
    """Writes to a run's archive; several processes may.

    with ArchiveWriter(run_dir / FILE) as archive:
        await asyncio.wrap_future(archive.add(row, frames))
    """

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        """`max_bytes` bounds the stored records; 0: no limit. Raises `HostError`."""
        self._path, self._max_bytes = path, max_bytes
        self._queue: Queue[tuple[Work, Future[None]] | None] = Queue(WAITING)
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            _check_format(path, self._db)
            self._db.executescript(_SCHEMA)
            _add_columns(self._db)
            self._db.execute(f"PRAGMA user_version={FORMAT}")
            self._stored = _stored_bytes(self._db)
        except sqlite3.Error as error:
            raise _explain(error, path) from error
        self._thread = threading.Thread(target=self._write, name="archive", daemon=True)
        self._thread.start()

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, row: TurnRow, frames: Sequence[bytes] = (), *, keep: bool = False) -> Future[None]:
        """One scored turn with the frames of its record (none: columns only). `keep`: never evicted."""
        held = list(frames)
        return self._later(lambda db: self._insert(db, row, held, keep))

    def outcomes(self, outcomes: Sequence[TurnOutcome]) -> Future[None]:
        """What a batch was made of."""
        rows = [(o.task_id, o.batch_id, o.trained_on, o.turn_return, o.advantage) for o in outcomes]
        return self._many("INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?, ?, ?)", rows)

    def ended(self, groups: Sequence[GroupEnd]) -> Future[None]:
        """How groups ended; the first end counts."""
        rows = [(g.group_id, g.problem_id, str(g.outcome), g.reason, g.clock) for g in groups]
        return self._many("INSERT OR IGNORE INTO groups VALUES (?, ?, ?, ?, ?)", rows)

    def updated(self, update: UpdateRow) -> Future[None]:
        """What the learner reported."""
        metrics = msgspec.msgpack.encode(update.metrics)
        row = (update.batch_id, update.version, metrics, update.started, update.finished)
        return self._many("INSERT OR REPLACE INTO updates VALUES (?, ?, ?, ?, ?)", [row])

    def close(self) -> None:
        """Writes what waits."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._db.close()

    def _many(self, statement: str, rows: Sequence[tuple[object, ...]]) -> Future[None]:
        return self._later(lambda db: _execute_many(db, statement, rows))

    def _later(self, work: Work) -> Future[None]:
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # who waits may be cancelled; what waits to be written is not
        self._queue.put((work, future))
        return future

    # ── the writer's thread ─────────────────────────────────────────────────────────────────────────────────────

    def _write(self) -> None:
        is_open = True
        while is_open:
            items = [self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get())
            is_open = None not in items
            self._commit([item for item in items if item is not None])

    def _commit(self, items: list[tuple[Work, Future[None]]]) -> None:
        stored = self._stored
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for work, _ in items:
                work(self._db)
            if 0 < self._max_bytes < self._stored:
                self._stored = _stored_bytes(self._db)
                self._evict()
            self._db.execute("COMMIT")
        except Exception as error:  # supervisor: without this thread everybody would wait for ever
            self._stored = stored
            with contextlib.suppress(sqlite3.Error):  # the error before it is the one that counts
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            for _, future in items:
                future.set_exception(_explain(error, self._path) if isinstance(error, sqlite3.Error) else error)
        else:
            for _, future in items:
                future.set_result(None)

    def _insert(self, db: sqlite3.Connection, row: TurnRow, frames: list[bytes], keep: bool) -> None:
        packed = zlib.compress(msgspec.msgpack.encode(frames), 1) if frames else b""
        values = [getattr(row, name) for name in _OWN[:-2]]
        done = db.execute(_INSERT_ROW, [*values, msgspec.msgpack.encode(row.spans), len(packed)])
        if done.rowcount and packed:
            db.execute("INSERT INTO frames VALUES (?, ?, ?)", (done.lastrowid, keep, packed))
            self._stored += len(packed)

    def _evict(self) -> None:
        oldest = "SELECT f.id, r.bytes FROM frames f JOIN rollouts r ON r.id = f.id WHERE NOT f.keep ORDER BY f.id"
        doomed = []
        for key, size in self._db.execute(oldest):
            if self._stored <= EVICT_TO * self._max_bytes:
                break
            doomed.append((key,))
            self._stored -= size
        self._db.executemany("DELETE FROM frames WHERE id = ?", doomed)
        self._db.executemany("UPDATE rollouts SET bytes = 0 WHERE id = ?", doomed)


class ArchiveReader:
    """A run's archive, read-only; a run may go on writing meanwhile.

    with Archive(run_dir / FILE) as archive:
        for row in archive.rows(problem_id="L1/07_relu"): …
    """

    def __init__(self, path: Path) -> None:
        """CheckpointError where there is none, or one of a newer format."""
        if not path.is_file():
            raise CheckpointError(f"{path.parent} has no {path.name}", "Train with archive.keep=all (the default)")
        self._path = path
        self._db = open_read_only(path)
        _check_format(path, self._db)
        there = _columns(self._db)
        own = ", ".join(_ADDED[name] if name in _ADDED and name not in there else f"r.{name}" for name in _OWN)
        self._select = (
            f"SELECT {own}, o.batch_id, o.trained_on, o.return, o.advantage "  # noqa: S608 - constants
            "FROM rollouts r LEFT JOIN outcomes o ON o.task_id = r.task_id"
        )

    def __enter__(self) -> ArchiveReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def count(self) -> int:
        (n,) = self._db.execute("SELECT count(*) FROM rollouts").fetchone()
        return int(n)

    def rows(
        self,
        *,
        task_id: str | None = None,
        rollout_id: str | None = None,
        group_id: str | None = None,
        problem_id: str | None = None,
        purpose: str | None = None,
        batch_id: str | None = None,
        fault: str | None = None,
        prefix: str = "",
    ) -> Iterator[TurnRow]:
        """Rows that have all these values, in order of scoring. `prefix`: of the task id."""
        wanted = {
            "r.task_id": task_id,
            "r.rollout_id": rollout_id,
            "r.group_id": group_id,
            "r.problem_id": problem_id,
            "r.purpose": purpose,
            "o.batch_id": batch_id,
            "r.fault": fault,
        }
        terms = [f"{column} = ?" for column, value in wanted.items() if value is not None]
        values: list[object] = [value for value in wanted.values() if value is not None]
        if prefix:
            terms.append("substr(r.task_id, 1, ?) = ?")
            values += [len(prefix), prefix]
        where = f" WHERE {' AND '.join(terms)}" if terms else ""
        for found in self._db.execute(f"{self._select}{where} ORDER BY r.id", values):
            yield _row(found)

    def record(self, task_id: str) -> Record | None:
        """Of a turn; None where it was never kept or has been evicted. CheckpointError where it can't be read."""
        found = self._db.execute(
            "SELECT f.frames, r.status FROM frames f JOIN rollouts r ON r.id = f.id WHERE r.task_id = ?", (task_id,)
        ).fetchone()
        if found is None:
            return None
        try:
            return Record.decode(_BLOBS.decode(zlib.decompress(found[0])), found[1])
        except RecordError as error:
            raise CheckpointError(f"{self._path} holds no record of {task_id} that can be read: {error}") from None

    def groups(self) -> dict[str, GroupEnd]:
        """How groups ended, by id."""
        return {found[0]: GroupEnd(*found) for found in self._db.execute("SELECT * FROM groups")}

    def updates(self) -> list[UpdateRow]:
        """What the learner reported, by version."""
        found = self._db.execute("SELECT * FROM updates ORDER BY version")
        return [UpdateRow(batch, version, _METRICS.decode(m), start, end) for batch, version, m, start, end in found]


def _row(found: tuple[object, ...]) -> TurnRow:
    values = dict(zip(_OWN, found, strict=False))
    batch_id, trained_on, turn_return, advantage = found[len(_OWN) :]
    spans = _SPANS.decode(values.pop("spans"))  # type: ignore[arg-type] # the column is a blob
    late = {"batch_id": batch_id or "", "trained_on": trained_on, "turn_return": turn_return, "advantage": advantage}
    flags = {name: bool(values.pop(name)) for name in ("compiled", "correct", "disturbed")}
    flags["disturbed"] |= says_nothing(values["lo"], values["hi"])  # type: ignore[arg-type] # numbers or null
    return TurnRow(**values, **flags, **late, spans=spans)  # type: ignore[arg-type] # as they were inserted


def _columns(db: sqlite3.Connection) -> set[str]:
    return {found[1] for found in db.execute("PRAGMA table_info(rollouts)")}


def _add_columns(db: sqlite3.Connection) -> None:
    db.execute("BEGIN IMMEDIATE")
    for name, default in _ADDED.items():
        if name not in _columns(db):
            db.execute(f"ALTER TABLE rollouts ADD COLUMN {name} NOT NULL DEFAULT {default}")
    db.execute("COMMIT")


def _stored_bytes(db: sqlite3.Connection) -> int:
    (stored,) = db.execute("SELECT coalesce(sum(bytes), 0) FROM rollouts").fetchone()
    return int(stored)


def _execute_many(db: sqlite3.Connection, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
    db.executemany(statement, rows)


def _check_format(path: Path, db: sqlite3.Connection) -> None:
    try:
        (found,) = db.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as error:
        raise _explain(error, path) from error
    if found > FORMAT:
        raise CheckpointError(f"{path} has format {found}, newer than {FORMAT}", "Read it with a newer kbrl-async")


def _explain(error: sqlite3.Error, path: Path) -> HostError | CheckpointError:
    if wants_room(error):
        return DiskFull(f"{path} can't grow: {error}", "Free some space and start again, or set archive.keep=none")
    if isinstance(error, sqlite3.OperationalError):
        return HostError(f"can't use {path}: {error}", "Choose a writable run folder, or set archive.keep=none")
    return CheckpointError(f"{path} is damaged: {error}", "Move it away; the run goes on without it")
