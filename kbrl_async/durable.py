"""Files and folders that exist whole or not at all: written under a temporary name, flushed, renamed.

A folder is marked as well: one without its `COMPLETE` marker is a crash's leftover; readers never look at it, and the
next writer removes it. And who may write at all: `alone`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kbrl_async.errors import AddressTaken, DiskFull

MARKER = "COMPLETE"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_SQLITE_NO_ROOM = frozenset({13, 778, 1034, 1546, 4874})
"""SQLITE_FULL, and SQLITE_IOERR_ WRITE, FSYNC, TRUNCATE, SHMSIZE: how a limit on files, or a full tmpfs, is told."""
_NO_TEMPORARY = "No usable temporary directory"
_RUST_NO_ROOM = tuple(f"os error {number}" for number in sorted(_NO_ROOM))


def wants_room(error: BaseException) -> bool:
    """Whether an error, or one that it came from, says that a file could not grow: all goes on once there is room."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        found = pending.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, DiskFull) or (isinstance(found, OSError) and found.errno in _NO_ROOM):
            return True
        if isinstance(found, FileNotFoundError) and _NO_TEMPORARY in str(found) and not _temporary_has_room():
            return True
        if getattr(found, "sqlite_errorcode", None) in _SQLITE_NO_ROOM:
            return True
        if type(found).__name__ == "SafetensorError" and any(words in str(found) for words in _RUST_NO_ROOM):
            return True
        pending += [found.__cause__, found.__context__]
        if isinstance(found, BaseExceptionGroup):
            pending += found.exceptions
    return False


def _temporary_has_room() -> bool:
    """`tempfile` says of full folders that there are none, and keeps the reason for itself: ask once more."""
    try:
        with tempfile.TemporaryFile(buffering=0, dir=os.environ.get("TMPDIR", "/tmp")) as file:  # noqa: S108 - asked only
            file.write(b"-")
    except OSError as error:
        return error.errno not in _NO_ROOM
    return True


def write_atomically(path: Path, text: str) -> None:
    """Replace `path`: readers, and whoever comes after a crash, see the old or the new text, never a part.

    :raises DiskFull: there is no room for it; `path` is as it was.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """`write_atomically` for bytes."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        _fsync(path.parent)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        if wants_room(error):
            raise disk_full(path) from error
        raise


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Calls `fill(temporary)` and makes the result appear as `target` atomically. An old `target` is replaced."""
    temporary = temporary_of(target)
    try:
        temporary.mkdir(parents=True)
        fill(temporary)
        complete(temporary, target)
    except Exception as error:  # whatever `fill` raises: safetensors has errors of its own
        shutil.rmtree(temporary, ignore_errors=True)
        if wants_room(error):
            raise disk_full(target) from error
        raise


def temporary_of(target: Path) -> Path:
    """The folder, not there yet, in which this process fills what shall be `target`."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    return temporary


def complete(temporary: Path, target: Path) -> None:
    """Makes a filled folder appear as `target`."""
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


def disk_full(path: Path) -> DiskFull:
    return DiskFull(f"no space left while writing {path}", "Free some: it goes on from the last whole one")


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


@contextlib.contextmanager
def alone(lock: Path, *, why: str, cure: str) -> Iterator[None]:
    """Nobody else is in here with the same file. The kernel frees it with its process, however that ends.

    :param why: what the one who has it is doing.
    :raises AddressTaken: it is another's, whose process is named.
    """
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            cause = f"{lock.parent} is held by process {file.read().strip() or '?'}: {why}"
            raise AddressTaken(cause, cure) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
