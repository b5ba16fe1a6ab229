"""What a compacted journal has let go of, packed: for replay, report and summary, never for going on.

::

    journal: entries 1 … n ─ compact ─▶ journal: state at n, entries n+1 …      history: entries 1 … n, packed

Invariants
* An entry is in the history before the journal drops it; one that a crash left in both is read once.
* Reading is safe while a run goes on: the tail is taken first, and the history up to where it begins.
* It grows by some 100 bytes a rollout and is never rewritten; nothing of a run's going on depends on it.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kbrl_async.durable import wants_room
from kbrl_async.errors import DiskFull, HostError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS segments (
    first INTEGER PRIMARY KEY, last INTEGER NOT NULL, entries BLOB NOT NULL
);
"""
_BLOBS = msgspec.msgpack.Decoder(list[bytes])
CURE = "Free some space and start again: nothing is lost"


def history_of(journal: Path) -> Path:
    """Where the history of this journal is."""
    return journal.with_name(f"{journal.stem}-history{journal.suffix}")


def pack(path: Path, first: int, entries: Sequence[bytes]) -> None:
    """Adds entries `first`, `first + 1`, …; those that are there already are passed over. Raises `DiskFull`.

    Returns when they are on disk, also for a power cut: the journal drops them next.
    """
    try:
        db = sqlite3.connect(path, isolation_level=None)
        try:
            db.execute("PRAGMA synchronous=FULL")
            db.executescript(_SCHEMA)
            (last,) = db.execute("SELECT coalesce(max(last), 0) FROM segments").fetchone()
            fresh = list(entries[max(0, last + 1 - first) :])
            if fresh:
                begin = first + len(entries) - len(fresh)
                packed = zlib.compress(msgspec.msgpack.encode(fresh), 1)
                db.execute("INSERT INTO segments VALUES (?, ?, ?)", (begin, begin + len(fresh) - 1, packed))
        finally:
            db.close()
    except sqlite3.Error as error:
        raise explain(error, path) from error


def entries_of(journal: Path) -> Iterator[bytes]:
    """All entries that a journal ever had, slimmed where their groups have ended, in order. Raises `sqlite3.Error`."""
    tail = _fetch(journal, "SELECT id, entry FROM entries ORDER BY id")
    begins = tail[0][0] if tail else None
    yield from _packed(history_of(journal), begins)
    yield from (blob for _, blob in tail)


def _packed(path: Path, before: int | None) -> Iterator[bytes]:
    if not path.is_file():
        return
    where = "" if before is None else f" WHERE first < {int(before)}"
    for first, packed in _fetch(path, f"SELECT first, entries FROM segments{where} ORDER BY first"):  # noqa: S608
        blobs = _BLOBS.decode(zlib.decompress(packed))
        yield from blobs if before is None else blobs[: before - first]


def _fetch(path: Path, question: str) -> list[tuple[int, bytes]]:
    with contextlib.closing(open_read_only(path)) as db:
        return db.execute(question).fetchall()


def open_read_only(path: Path) -> sqlite3.Connection:
    """Of a database that a run may be writing. Raises `sqlite3.Error`."""
    uri = path.resolve().as_uri()
    try:
        db = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=10.0)
        db.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        # A folder that can't be written has no room for the shared memory of a WAL; then nobody writes it either.
        db = sqlite3.connect(f"{uri}?immutable=1", uri=True)
    return db


def explain(error: sqlite3.Error, path: Path) -> HostError:
    """The error with its path and its cure."""
    if wants_room(error):
        return DiskFull(f"{path} can't grow: {error}", CURE)
    if isinstance(error, sqlite3.OperationalError):
        return HostError(f"can't use {path}: {error}", "Choose a writable run folder")
    return HostError(f"{path} is damaged: {error}", "Restore it from a copy, or start another run")
