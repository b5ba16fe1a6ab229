"""The artifact store: files named by the sha256 of their content, and a small index from cache keys to build results.

::

    root/objects/ab/abcd….so     content, checked against its name on every read
    root/keys/ab/abcd….json      BuildReport of a cache key (a success, or the candidate's own failure)
    root/work/                   where compilers write; nothing here is ever trusted

Invariants
* A file appears whole or not at all (temporary file, then rename), whoever else writes at the same time.
* What does not hash to its name is deleted and reported as absent, so that it is built again.
* The size is bounded: beyond `max_bytes` the least recently used objects go (I10).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kbrl_async.errors import DiskFull
from protocols.records import BuildReport

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(BuildReport).decode
_KEEP = 0.9
_DISK_CODES = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """A full disk is the host's fault, with a name of its own."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_CODES:
            raise DiskFull(
                f"no space is left on the disk of {root}", "Free some, or lower the store's size limit"
            ) from error
        raise


class ArtifactStore:
    """Only the trusted side may hold one. Safe for many processes on one folder."""

    def __init__(self, root: Path, max_bytes: int = 1 << 30) -> None:
        self.root, self._max_bytes = Path(root), max_bytes
        self._lock = threading.Lock()
        with disk_errors(self.root):
            for name in ("objects", "keys", "work"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
        self._bytes = sum(size for _, size, _ in self._entries())

    def put(self, content: bytes) -> str:
        """Publish `content`; its address."""
        address = hashlib.sha256(content).hexdigest()
        self._write(self._object(address), content)
        with self._lock:
            self._bytes += len(content)
            if self._bytes > self._max_bytes:
                self._evict(keep=address)
        return address

    def path(self, address: str) -> Path | None:
        """Where the content lies, after checking it; None where it is absent or was poisoned (then it is deleted)."""
        path = self._object(address)
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if hashlib.sha256(content).hexdigest() != address:
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
        return path

    def remember(self, key: str, report: BuildReport) -> None:
        """Keep the result of a build under its cache key."""
        self._write(self._key(key), _encode(report))

    def recall(self, key: str) -> BuildReport | None:
        """An earlier result, if all that it points to is still there and whole."""
        try:
            report = _decode(self._key(key).read_bytes())
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        whole = all(self.path(address) is not None for address in report.artifacts.values())
        return report if whole else None

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """A new folder for one compiler run, gone afterwards."""
        with disk_errors(self.root):
            folder = Path(tempfile.mkdtemp(dir=self.root / "work"))
        try:
            with disk_errors(self.root):
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def size(self) -> int:
        """Bytes of all objects, as last counted."""
        return self._bytes

    def _object(self, address: str) -> Path:
        return self.root / "objects" / address[:2] / f"{address}.so"

    def _key(self, key: str) -> Path:
        return self.root / "keys" / key[:2] / f"{key}.json"

    def _write(self, target: Path, content: bytes) -> None:
        with disk_errors(self.root):
            target.parent.mkdir(exist_ok=True)
            fd, temporary = tempfile.mkstemp(dir=target.parent, prefix=".new-")
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(content)
                os.replace(temporary, target)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
                raise

    def _entries(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in (self.root / "objects").glob("*/*.so"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        return found

    def _evict(self, keep: str) -> None:
        entries = sorted(self._entries())
        self._bytes = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if self._bytes <= self._max_bytes * _KEEP:
                return
            if path.stem != keep:
                path.unlink(missing_ok=True)
                self._bytes -= size
