"""The aggregator's memory: entries of the campaign in SQLite (WAL), appended before anything is done about them.

Invariants
* Entries of one call are there together or not at all.
* Rollouts of ended groups keep no tokens, so the file stays small however long the run is (I10).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from kbrl_async.errors import DiskFull
from services.reward_aggregator.campaign import Entry, group_of, without_tokens

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (id INTEGER PRIMARY KEY, group_id TEXT NOT NULL, entry BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS by_group ON entries (group_id) WHERE group_id != '';
"""


class Journal:
    """`with Journal(path) as journal: …`"""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)
        self._decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()

    def entries(self) -> Iterator[Entry]:
        """All entries in order."""
        for (blob,) in self._db.execute("SELECT entry FROM entries ORDER BY id"):
            yield self._decoder.decode(blob)

    def append(self, entries: Iterable[Entry], ended_groups: Iterable[str] = ()) -> None:
        """Commits `entries`, and strips the tokens of groups that they ended. Raises `DiskFull`."""
        rows = [(group_of(entry), msgspec.msgpack.encode(entry)) for entry in entries]
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
        slim = [(msgspec.msgpack.encode(without_tokens(self._decoder.decode(blob))), row) for row, blob in found]
        self._db.executemany("UPDATE entries SET entry = ?, group_id = '' WHERE id = ?", slim)
