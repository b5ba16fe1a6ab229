"""What an actor remembers: entries of its state machine in SQLite (WAL), appended before anything is done about them.

Invariant: entries of one call are there together or not at all.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec

from kbrl_async.errors import DiskFull

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (id INTEGER PRIMARY KEY, group_id TEXT NOT NULL, entry BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS by_group ON entries (group_id) WHERE group_id != '';
"""
EntryT = TypeVar("EntryT")


class EntryJournal(Generic[EntryT]):
    """`with EntryJournal(path, Entry) as journal: …`

    `group_of(entry)` names the group that an entry's bulk belongs to (empty: it has none); once that group has ended,
    `slim(entry)` is what stays.
    """

    def __init__(
        self,
        path: Path,
        entry_type: Any,
        group_of: Callable[[EntryT], str] = lambda _entry: "",
        slim: Callable[[EntryT], EntryT] = lambda entry: entry,
    ) -> None:
        self._path, self._group_of, self._slim = path, group_of, slim
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)
        self._decoder: msgspec.msgpack.Decoder[EntryT] = msgspec.msgpack.Decoder(entry_type)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()

    def entries(self) -> Iterator[EntryT]:
        """All entries in order."""
        for (blob,) in self._db.execute("SELECT entry FROM entries ORDER BY id"):
            yield self._decoder.decode(blob)

    def append(self, entries: Iterable[EntryT], ended_groups: Iterable[str] = ()) -> None:
        """Commits `entries`, and slims those of groups that they ended. Raises `DiskFull`."""
        rows = [(self._group_of(entry), msgspec.msgpack.encode(entry)) for entry in entries]
        try:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT INTO entries (group_id, entry) VALUES (?, ?)", rows)
            for group_id in ended_groups:
                self._strip(group_id)
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if "full" in str(error):
                raise DiskFull(f"{self._path} can't grow: {error}", "Free some space and start again") from error
            raise

    def _strip(self, group_id: str) -> None:
        found = self._db.execute("SELECT id, entry FROM entries WHERE group_id = ?", (group_id,)).fetchall()
        slim = [(msgspec.msgpack.encode(self._slim(self._decoder.decode(blob))), row) for row, blob in found]
        self._db.executemany("UPDATE entries SET entry = ?, group_id = '' WHERE id = ?", slim)
