"""Scratch folders of zygotes, in the system's temporary folder; what a killed process leaves, the next start removes.

Whoever uses one holds a lock on it, which the system releases at death, `kill -9` included: no lock, no owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "kbrl-sandbox-"
YOUNG_S = 60.0
"""Between being made and being locked a folder looks like one that was left."""


class Scratch:
    """A folder of our own until `close`."""

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks keeps what is left
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sweep(folder: Path, young_s: float = YOUNG_S) -> None:
    """Removes scratch folders of ours that nobody holds."""
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            # by the host's own time: a clock that was set back keeps one for longer, no more
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > young_s:
                _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)
