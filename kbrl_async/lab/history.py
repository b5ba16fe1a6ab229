"""What was asked of a workbench, bounded in number and size; with a file, of earlier processes, too."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from pathlib import Path

import msgspec

from kbrl_async.durable import write_atomically
from kbrl_async.errors import UserError
from kbrl_async.lab.answers import HistoryEntry, HistoryList

MOST_KEPT, MOST_KEPT_BYTES = 1000, 64 << 20


class History:
    """What was asked of this bench, bounded; with a file, of earlier processes, too."""

    def __init__(self, path: Path | None = None, most: int = MOST_KEPT, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._path, self._most, self._most_bytes = path, most, most_bytes
        self._lock = threading.Lock()
        self._entries: list[HistoryEntry] = []
        self._bytes = 0
        self._read()

    def _read(self) -> None:
        """What earlier processes left, and again what of it is kept: so the file is bounded, and a line that a crash
        cut is gone.

        :raises UserError: the file is none of ours.
        """
        if self._path is None or not self._path.exists():
            return
        lines = self._path.read_bytes().splitlines()
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                self._append(msgspec.json.decode(line, type=HistoryEntry))
        if lines and not self._entries:
            raise UserError(f"{self._path} is no history", "Name another file")
        write_atomically(self._path, "".join(map(_line, self._entries)))

    def add(self, entry: HistoryEntry) -> None:
        with self._lock:
            self._append(entry)
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a") as file:
                    file.write(_line(entry))

    def _append(self, entry: HistoryEntry) -> None:
        self._entries.append(entry)
        self._bytes += len(entry.source)
        while len(self._entries) > self._most or self._bytes > self._most_bytes:
            self._bytes -= len(self._entries.pop(0).source)

    def source(self, kernel_id: str) -> str:
        """Empty where nothing of that name is kept."""
        return next((e.source for e in reversed(self._entries) if e.kernel_id == kernel_id), "")

    def list(self, problem_id: str, limit: int, sources: bool) -> HistoryList:
        fitting = [e for e in self._entries if problem_id.lower() in e.problem_id.lower()]
        correct = [e for e in fitting if e.ok and e.lo is not None]
        best = max(correct, key=lambda e: e.lo or 0.0, default=None)
        shown = [*reversed(fitting)][: max(0, limit)]
        return HistoryList([_bare(e, sources) for e in shown], None if best is None else _bare(best, sources))


def _line(entry: HistoryEntry) -> str:
    return msgspec.json.encode(entry).decode() + "\n"


def _bare(entry: HistoryEntry, sources: bool) -> HistoryEntry:
    return entry if sources else replace(entry, source="")
