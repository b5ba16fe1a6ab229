"""One JSON line a second in `<run_dir>/metrics/system.jsonl`: queues, counters, workers and the broker itself."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec

from kbrl_async.errors import DiskFull, HostError

MAX_BYTES = 64 << 20
"""A full file is set aside as `system.jsonl.1`, and the one before is dropped (I10)."""

_encode = msgspec.json.Encoder().encode


class MetricsFile:
    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _explain(error, path) from None

    def write(self, line: dict[str, object]) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(_encode(line) + b"\n")
                size = file.tell()
            if size > self._max_bytes:
                os.replace(self._path, self._path.with_suffix(".jsonl.1"))
        except OSError as error:
            raise _explain(error, self._path) from None


def _explain(error: OSError, path: Path) -> HostError:
    if error.errno == errno.ENOSPC:
        return DiskFull(f"no space left for {path}", "Free some space and start the run again: nothing is lost")
    return HostError(f"can't write {path}: {error.strerror}", "Choose a writable run directory")
