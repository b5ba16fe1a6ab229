"""The jobs of a service on disk: what was accepted is found again after `kill -9`, and so is what came of it.

Invariants
* A job is on disk before its acceptance is answered, an outcome before anybody hears of it.
* The past is bounded (I10): of ended jobs the newest `keep` stay.
* Only `checkpoint` waits for the disk. It has a connection of its own, so that the event loop's never does.
"""

from __future__ import annotations

import contextlib
import fcntl
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec

from kbrl_async.durable import wants_room
from kbrl_async.errors import AddressTaken, DiskFull, HostError
from kbrl_async.serving.documents import Job

FILE = "jobs.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, job BLOB NOT NULL, ended INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS ended ON jobs (ended, seq);
CREATE TABLE IF NOT EXISTS names (name TEXT PRIMARY KEY, id TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS named ON names (id);
"""
FORGET_EVERY = 64
"""Ended jobs between two looks at how many there are."""


class JobJournal:
    """One process at a time; used from one thread, but for `checkpoint`."""

    def __init__(self, path: Path, keep: int, max_pages: int = 0) -> None:
        """:raises HostError: the file can't be used; `AddressTaken`: another process has it."""
        self.path, self._keep, self._since = path, keep, 0
        self._lock, self._checkpointing = _locked(path), threading.Lock()
        try:
            self._db, self._checkpoints = _opened(path), _opened(path)
            self._db.execute("PRAGMA wal_autocheckpoint = 0")
            if max_pages:
                self._db.execute(f"PRAGMA max_page_count = {max_pages}")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            self._lock.close()
            raise _explained(error, path) from None

    def unfinished(self) -> list[Job]:
        """In the order in which they came; none of them is running now."""
        rows = self._db.execute("SELECT job FROM jobs WHERE ended = 0 ORDER BY seq")
        jobs = [_decode(blob) for (blob,) in rows]
        for job in jobs:
            job.started_at = 0.0
        return jobs

    def get(self, job_id: str) -> Job | None:
        found = self._db.execute("SELECT job FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return _decode(found[0]) if found else None

    def put(self, job: Job) -> None:
        """New, or as it is now.

        :raises DiskFull: there is no room; what was on disk before is as it was.
        """
        ended = int(job.outcome is not None)
        self._write(
            "INSERT INTO jobs (id, job, ended) VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET job = ?2, ended = ?3",
            (job.id, _encode(job), ended),
        )
        self._since += ended
        if self._since >= FORGET_EVERY:
            self._since = 0
            self._forget()

    def name(self, name: str, job_id: str) -> None:
        """Another id of the same job, such as a client's own."""
        self._write("INSERT OR REPLACE INTO names VALUES (?, ?)", (name, job_id))

    def named(self, name: str) -> str:
        """The job's id; empty where nobody gave that name."""
        found = self._db.execute("SELECT id FROM names WHERE name = ?", (name,)).fetchone()
        return found[0] if found else ""

    def ended(self) -> int:
        count: int = self._db.execute("SELECT COUNT(*) FROM jobs WHERE ended = 1").fetchone()[0]
        return count

    def checkpoint(self) -> None:
        """Take what was appended to the log over into the database: flushes both, for some hundredths of a second.

        Called now and then from any one thread; the log grows until then.

        :raises HostError: it could not, such as for a full disk. Nothing is lost; call it again later.
        """
        try:
            with self._checkpointing:
                self._checkpoints.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            raise _explained(error, self.path) from None

    def close(self) -> None:
        with self._checkpointing:
            self._checkpoints.close()
        self._db.close()
        self._lock.close()

    def _forget(self) -> None:
        oldest = "SELECT seq FROM jobs WHERE ended = 1 ORDER BY seq DESC LIMIT 1 OFFSET ?"
        found = self._db.execute(oldest, (self._keep,)).fetchone()
        if found is not None:
            old = "SELECT id FROM jobs WHERE ended = 1 AND seq <= ?"
            self._write(f"DELETE FROM names WHERE id IN ({old})", found)  # noqa: S608
            self._write("DELETE FROM jobs WHERE ended = 1 AND seq <= ?", found)

    def _write(self, statement: str, values: tuple[Any, ...]) -> None:
        try:
            self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise _explained(error, self.path) from None


def _locked(path: Path) -> TextIO:
    """:raises AddressTaken: another process has it. SQLite's own exclusive mode would keep readers out, too."""
    try:
        file = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise HostError(f"can't use {path}: {error.strerror}", "Choose a folder that can be written") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise AddressTaken(f"{path} is in use by another service", "Stop it, or choose another folder") from None
    return file


def _opened(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=1.0, check_same_thread=False)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    return db


def read_jobs(path: Path) -> Iterator[Job]:
    """Those of a service that may go on meanwhile, in the order in which they came.

    :raises HostError: the file can't be read.
    """
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            yield from (_decode(blob) for (blob,) in db.execute("SELECT job FROM jobs ORDER BY seq"))
    except sqlite3.Error as error:
        raise _explained(error, path) from None


def _encode(job: Job) -> bytes:
    return msgspec.msgpack.encode(job)


def _decode(blob: bytes) -> Job:
    return msgspec.msgpack.decode(blob, type=Job)


def _explained(error: sqlite3.Error, path: Path) -> HostError:
    if wants_room(error):
        return DiskFull(f"no space left for {path}", "Free some; nothing that was accepted is lost")
    return HostError(f"can't use {path}: {error}", "Choose a folder that can be written")
