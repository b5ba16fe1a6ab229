"""Files and folders that exist whole or not at all: written under a temporary name, flushed, renamed.

A folder is marked as well: one without its `COMPLETE` marker is a crash's leftover; readers never look at it, and the
next writer removes it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from kbrl_async.errors import DiskFull

MARKER = "COMPLETE"


def write_atomically(path: Path, text: str) -> None:
    """Replace `path`: readers, and whoever comes after a crash, see the old or the new text, never a part."""
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Calls `fill(temporary)` and makes the result appear as `target` atomically. An old `target` is replaced."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        fill(temporary)
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                _fsync(path)
        _fsync(temporary)
        if target.exists():
            # Unmark first: a crash between here and the rename must not leave a folder that looks complete.
            (target / MARKER).unlink(missing_ok=True)
            shutil.rmtree(target)
        temporary.rename(target)
        _fsync(target.parent)
        (target / MARKER).touch()
        _fsync(target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno == errno.ENOSPC:
            raise DiskFull(f"no space left while writing {target}", "Free space or lower the number kept") from error
        raise


def is_complete(folder: Path) -> bool:
    return (folder / MARKER).is_file()


def numbered(parent: Path, prefix: str) -> list[tuple[int, Path]]:
    """Complete folders `{prefix}{n}` of `parent`, by ascending n."""
    if not parent.is_dir():
        return []
    found = []
    for path in parent.iterdir():
        digits = path.name.removeprefix(prefix)
        if path.name.startswith(prefix) and digits.isdigit() and is_complete(path):
            found.append((int(digits), path))
    return sorted(found)


def remove_leftovers(parent: Path, prefix: str) -> None:
    """Deletes what crashes left: temporary folders and unmarked ones. Only the one writer of `parent` may call it."""
    if not parent.is_dir():
        return
    for path in parent.iterdir():
        unmarked = path.name.startswith(prefix) and path.is_dir() and not is_complete(path)
        if unmarked or (path.name.startswith(f".{prefix}") and path.name.endswith(".tmp")):
            shutil.rmtree(path, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Unmarks, then deletes, so that a reader never sees a complete folder with files missing."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
