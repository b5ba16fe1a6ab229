"""What an actor remembers: entries of its state machine in SQLite (WAL), appended before anything is done about them.

::

    append ─▶ [state, entries after it] ─ is_due ─▶ compact(state) ─▶ [new state]   and the entries go to the history

Invariants
* Entries of one call are there together or not at all.
* What is needed to go on is the state and the entries after it: together some three times the state, or `MIN_BYTES`,
  however long the run is (I10). What is needed to look back is in the history (`kbrl_async.runs.archive.history`).
* A crash at any point of a compaction loses nothing and doubles nothing: first the history has the entries, then one
  transaction puts the state in their place.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec

from kbrl_async.runs.archive.history import entries_of, explain, history_of, pack

MIN_BYTES = 1 << 20
"""Entries of fewer bytes are not worth a compaction."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (id INTEGER PRIMARY KEY, group_id TEXT NOT NULL, entry BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS by_group ON entries (group_id) WHERE group_id != '';
CREATE TABLE IF NOT EXISTS state (upto INTEGER PRIMARY KEY, state BLOB NOT NULL);
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
        min_bytes: int = MIN_BYTES,
    ) -> None:
        """Raises `HostError` where the file can't be used."""
        self._path, self._group_of, self._slim, self._min_bytes = path, group_of, slim, min_bytes
        self._decoder: msgspec.msgpack.Decoder[EntryT] = msgspec.msgpack.Decoder(entry_type)
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(f"PRAGMA journal_size_limit={4 << 20}")
            self._db.executescript(_SCHEMA)
            self._measure()
        except sqlite3.Error as error:
            raise explain(error, path) from error

    def _measure(self) -> None:
        self._state_bytes: int
        self._tail_bytes: int
        self._upto, self._state_bytes = self._db.execute(
            "SELECT coalesce(max(upto), 0), coalesce(max(length(state)), 0) FROM state"
        ).fetchone()
        last, self._tail_bytes = self._db.execute(
            "SELECT coalesce(max(id), 0), coalesce(sum(length(entry)), 0) FROM entries"
        ).fetchone()
        self._last = max(last, self._upto)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    # ── to go on ────────────────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> bytes | None:
        """What was given to the last compaction; the entries come after it."""
        found = self._db.execute("SELECT state FROM state").fetchone()
        return found[0] if found else None

    def entries(self) -> Iterator[EntryT]:
        """The entries after the state, in order; all of them where there was no compaction."""
        for (blob,) in self._db.execute("SELECT entry FROM entries ORDER BY id"):
            yield self._decoder.decode(blob)

    def append(self, entries: Iterable[EntryT], ended_groups: Iterable[str] = ()) -> None:
        """Commits `entries`, and slims those of groups that they ended. Raises `DiskFull`, and keeps what was there."""
        blobs = [(self._group_of(entry), msgspec.msgpack.encode(entry)) for entry in entries]
        rows = [(self._last + place, group_id, blob) for place, (group_id, blob) in enumerate(blobs, start=1)]

        def write() -> None:
            self._db.executemany("INSERT INTO entries (id, group_id, entry) VALUES (?, ?, ?)", rows)
            for group_id in ended_groups:
                self._strip(group_id)

        self._transact(write)
        self._last += len(rows)
        self._tail_bytes += sum(len(blob) for _, blob in blobs)

    def _strip(self, group_id: str) -> None:
        found = self._db.execute("SELECT id, entry FROM entries WHERE group_id = ?", (group_id,)).fetchall()
        slim = [(self._slimmed(blob), row) for row, blob in found]
        self._db.executemany("UPDATE entries SET entry = ?, group_id = '' WHERE id = ?", slim)

    def _slimmed(self, blob: bytes) -> bytes:
        return msgspec.msgpack.encode(self._slim(self._decoder.decode(blob)))

    # ── to stay small ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_due(self) -> bool:
        """A compaction would pay: the entries are at least twice the state."""
        return self._tail_bytes >= max(self._min_bytes, 2 * self._state_bytes)

    def compact(self, state: bytes) -> None:
        """From here on the journal is `state`, which all entries so far have led to. Raises `DiskFull`, and changes
        nothing then."""
        found = self._db.execute("SELECT id, group_id, entry FROM entries ORDER BY id").fetchall()
        if not found:
            return
        pack(history_of(self._path), found[0][0], [self._slimmed(blob) if group else blob for _, group, blob in found])

        def write() -> None:
            self._db.execute("DELETE FROM state")
            self._db.execute("INSERT INTO state VALUES (?, ?)", (self._last, state))
            self._db.execute("DELETE FROM entries WHERE id <= ?", (self._last,))

        self._transact(write)
        self._upto, self._state_bytes, self._tail_bytes = self._last, len(state), 0

    def history(self) -> Iterator[EntryT]:
        """All entries from the run's first on; those of ended groups are slim."""
        return map(self._decoder.decode, entries_of(self._path))

    def _transact(self, write: Callable[[], None]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            write()
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise explain(error, self._path) from error
