"""Reading the JSON logs of a run: one stream by time out of the files of all processes, a line of each in memory.

::

    logs/broker.1.jsonl ─┐
    logs/learner.1.jsonl ┼─ merged ─▶ Line, Line, …          and then, to follow: Follower.new() ─▶ what was added
    logs/….jsonl.1 ──────┘

Invariants
* A file is in the order in which its lines were written. A line's time is never before that of the one above it in its
  file, so merging by time keeps that order whatever the clocks did.
* What is no whole line of JSON is counted and passed over; the last line of a file counts once its end has come.
* A file that is replaced (rotated) is read to its end first; one that was cut short is read from its beginning.
"""

from __future__ import annotations

import datetime
import heapq
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from protocols.messages import TroubleReport

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
MAX_LINE_BYTES = 8 << 20
BLOCK = 1 << 16
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class LoggedEvent(msgspec.Struct, frozen=True):
    """One event."""

    at: str
    """ISO time in UTC, which sorts as text."""
    raw: bytes
    """As it stands in the file, without the line's end."""
    event: dict[str, Any]


class Filter(msgspec.Struct, frozen=True):
    """Which lines are wanted; an empty field wants all."""

    tasks: tuple[str, ...] = ()
    """Task, rollout or group: what stands at the front of a task's id, up to a dot, counts."""
    processes: tuple[str, ...] = ()
    """`learner.1`, or `learner` for all of them."""
    level: int = 0
    since: str = ""
    """ISO time in UTC."""
    until: str = ""

    def wants(self, line: LoggedEvent) -> bool:
        event = line.event
        if line.at < self.since or (self.until and line.at > self.until):
            return False
        if self.level and LEVELS.get(str(event.get("level", "info")), 20) < self.level:
            return False
        if self.processes and not any(_names(wanted, str(event.get("process", ""))) for wanted in self.processes):
            return False
        return not self.tasks or any(_concerns(wanted, event) for wanted in self.tasks)


def _names(wanted: str, process: str) -> bool:
    return process == wanted or process.startswith(f"{wanted}.")


def _concerns(wanted: str, event: dict[str, Any]) -> bool:
    ids = [str(event[key]) for key in ("task_id", "rollout_id", "group_id", "group", "batch") if key in event]
    return any(_names(wanted, found) for found in ids)


def printable(text: str) -> str:
    """Without what would break the line or take over the terminal: candidates write into some of our fields."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class Broken:
    """How many lines were none."""

    def __init__(self) -> None:
        self.count = 0


def parse(raw: bytes, earliest: str, broken: Broken) -> LoggedEvent | None:
    """`earliest`: time of the line above; a line without a time, or with an earlier one, gets that."""
    try:
        event = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        broken.count += bool(raw.strip(b"\0 \t\r\n"))
        return None
    at = str(event.get("timestamp", ""))
    return LoggedEvent(max(at, earliest), raw, event)


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Lines with their ends; one that is longer than any of ours comes in pieces, which are no lines."""
    while piece := file.readline(MAX_LINE_BYTES):
        yield piece


def lines(path: Path, broken: Broken, size: int | None = None) -> Iterator[LoggedEvent]:
    """The lines of one file, one at a time; of its first `size` bytes, where that is given."""
    at = ""
    with path.open("rb") as file:
        for raw in _pieces(file):
            if size is not None and file.tell() > size:
                return
            # half a line at the end: its process has died, or is just writing it
            tolerant = Broken() if not raw.endswith(b"\n") and len(raw) < MAX_LINE_BYTES else broken
            if (line := parse(raw.rstrip(b"\r\n"), at, tolerant)) is not None:
                at = line.at
                yield line


def files(folder: Path) -> list[Path]:
    """The log files of a run, files that were set aside (`NAME.jsonl.1`) included."""
    found = [path for path in folder.glob("*.jsonl*") if path.suffix == ".jsonl" or path.suffix[1:].isdigit()]
    return sorted(found)


def merged(paths: Iterable[Path], broken: Broken, sizes: Mapping[Path, int] | None = None) -> Iterator[LoggedEvent]:
    """All lines of all files by time; files are read as the stream is. `sizes`: read only so much of a file."""
    known = sizes or {}
    return heapq.merge(*(lines(path, broken, known.get(path)) for path in paths), key=lambda line: line.at)


class _Followed:
    """One file that grows: keeps it open, so that what was written before it was set aside is not lost."""

    def __init__(self, path: Path, broken: Broken, offset: int = 0) -> None:
        self._path = path
        self._broken = broken
        # held open from now on, or what is rotated before the first look would be lost
        self._file: IO[bytes] | None = path.open("rb") if path.exists() else None
        self._offset = offset
        self._at = ""

    def new(self) -> Iterator[LoggedEvent]:
        yield from self._read()
        if self._is_replaced():
            self.close()
            self._offset = 0
            yield from self._read()

    def _read(self) -> Iterator[LoggedEvent]:
        try:
            self._file = self._file or self._path.open("rb")
        except FileNotFoundError:
            return
        if os.fstat(self._file.fileno()).st_size < self._offset:
            self._offset = 0
        self._file.seek(self._offset)
        for raw in _pieces(self._file):
            if not raw.endswith(b"\n") and len(raw) < MAX_LINE_BYTES:
                return  # half a line; its rest is still to come
            self._offset += len(raw)
            if (line := parse(raw.rstrip(b"\r\n"), self._at, self._broken)) is not None:
                self._at = line.at
                yield line

    def _is_replaced(self) -> bool:
        if self._file is None:
            return False
        try:
            mine, there = os.fstat(self._file.fileno()), self._path.stat()
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Follower:
    """What is added to the logs of a folder from now on; files that appear later are read from their beginning."""

    def __init__(self, folder: Path, offsets: dict[Path, int], broken: Broken) -> None:
        """`offsets`: how much of each file is known already; files not named there are new."""
        self._folder = folder
        self._broken = broken
        # what was set aside already grows no more
        known = {path: offset for path, offset in offsets.items() if path.suffix == ".jsonl"}
        self._files = {path: _Followed(path, broken, offset) for path, offset in known.items()}

    def new(self) -> list[LoggedEvent]:
        """Whole lines that came since the last call, by time."""
        for path in self._folder.glob("*.jsonl"):
            if path not in self._files:
                self._files[path] = _Followed(path, self._broken)
        return list(heapq.merge(*(file.new() for file in self._files.values()), key=lambda line: line.at))

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def whole_size(path: Path) -> int:
    """Bytes of a file up to the end of its last whole line: where a follower goes on."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - BLOCK)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
    return 0


class LastErrors:
    """The last warnings and errors in a run's logs, for a live view: each look reads only what was added."""

    def __init__(self, folder: Path, kept: int = 20) -> None:
        self._broken = Broken()
        # of what is there already only the end: a long run's logs are not read for the sake of their last lines
        begins = {path: max(0, whole_size(path) - BLOCK) for path in files(folder)}
        self._follower = Follower(folder, begins, self._broken)
        self._last: deque[TroubleReport] = deque(maxlen=kept)

    def look(self) -> list[TroubleReport]:
        """Oldest first."""
        for line in self._follower.new():
            if LEVELS.get(str(line.event.get("level")), 0) >= LEVELS["warning"]:
                self._last.append(_trouble(line))
        return list(self._last)

    def close(self) -> None:
        self._follower.close()


def _trouble(line: LoggedEvent) -> TroubleReport:
    event = line.event
    try:
        at = datetime.datetime.fromisoformat(line.at).timestamp()
    except ValueError:
        at = 0.0
    more = [f"{key}={value}" for key, value in event.items() if key not in _NOT_TOLD]
    reason = str(event.get("exception", "")).strip().rpartition("\n")[2]
    words = " ".join([str(event.get("event", "")), *more, *([reason] if reason else [])])
    return TroubleReport(at, str(event.get("process", "?")), " ".join(words.split()))


_NOT_TOLD = ("process", "pid", "timestamp", "level", "event", "exception", "stack", "logger")
