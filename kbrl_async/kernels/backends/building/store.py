"""The artifact store: files named by the sha256 of their content, and a small index from cache keys to build results.

::

    root/objects/ab/abcd….so     content, checked against its name on every read
    root/keys/ab/abcd….json      hash of key and report, then the report (a success, or the candidate's own failure)
    root/work/                   where compilers write; nothing here is ever trusted

Invariants
* A file appears whole or not at all (temporary file, then rename), whoever else writes at the same time.
* What does not hash to its name is deleted and reported as absent, so that it is built again; so is an index entry.
* Both parts are bounded (I10): beyond `store_max_bytes` the least recently used objects go, beyond `max_keys` the least
  recently used entries. Each writer counts anew after a sixteenth of either, so n writers on one folder stay below
  1 + n/16 times the limits.
* What a killed process left half-written is swept when a store is opened.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kbrl_async.errors import DiskFull
from kbrl_async.kernels.sandbox import remove_tree
from kbrl_async.kernels.settings import CompileFarm
from protocols.records import BuildReport

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(BuildReport).decode
_KEEP = 0.9
_RECOUNT = 16
_STALE_S = 6 * 3600.0
"""Longer than any build, and than a clock is likely to jump: files have no other time than the host's."""
_DIGEST = 64
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

    def __init__(
        self, root: Path, store_max_bytes: int = CompileFarm().store_max_bytes, max_keys: int = 1 << 17
    ) -> None:
        self.root, self._max_bytes, self._max_keys = Path(root), store_max_bytes, max_keys
        self._lock = threading.Lock()
        with disk_errors(self.root):
            for name in ("objects", "keys", "work"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
        self._sweep()
        self._bytes = sum(size for _, size, _ in self._entries("objects"))
        self._keys = len(self._entries("keys"))
        self._new_bytes = self._new_keys = 0

    def put(self, content: bytes) -> str:
        """Publish `content`; its address."""
        address = hashlib.sha256(content).hexdigest()
        if self.path(address) is not None:
            return address
        self._write(self._object(address), content)
        with self._lock:
            self._bytes += len(content)
            self._new_bytes += len(content)
            if self._bytes > self._max_bytes or self._new_bytes * _RECOUNT > self._max_bytes:
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
        data = _encode(report)
        self._write(self._key(key), _digest(key, data) + data)
        with self._lock:
            self._keys += 1
            self._new_keys += 1
            if self._keys > self._max_keys or self._new_keys * _RECOUNT > self._max_keys:
                self._evict_keys(keep=key)

    def recall(self, key: str) -> BuildReport | None:
        """An earlier result, if it and all that it points to is still there and whole."""
        path = self._key(key)
        try:
            content = path.read_bytes()
            digest, data = content[:_DIGEST], content[_DIGEST:]
            if digest != _digest(key, data):
                path.unlink(missing_ok=True)
                return None
            report = _decode(data)
            os.utime(path)
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
            remove_tree(folder)

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

    def _entries(self, part: str) -> list[tuple[float, int, Path]]:
        """(last use, size, path) of every file of `"objects"` or `"keys"`."""
        found = []
        for path in (self.root / part).glob("*/[!.]*"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        return found

    def _evict(self, keep: str) -> None:
        entries = sorted(self._entries("objects"))
        self._bytes, self._new_bytes = sum(size for _, size, _ in entries), 0
        if self._bytes <= self._max_bytes:
            return
        for _, size, path in entries:
            if self._bytes <= self._max_bytes * _KEEP:
                return
            if path.stem != keep:
                path.unlink(missing_ok=True)
                self._bytes -= size

    def _evict_keys(self, keep: str) -> None:
        entries = sorted(self._entries("keys"))
        self._keys, self._new_keys = len(entries), 0
        if self._keys <= self._max_keys:
            return
        for _, _, path in entries[: self._keys - int(self._max_keys * _KEEP)]:
            if path.stem != keep:
                path.unlink(missing_ok=True)
                self._keys -= 1

    def _sweep(self) -> None:
        """Older than any build: nobody writes there any more."""
        before = time.time() - _STALE_S
        for path in [*self.root.glob("objects/*/.new-*"), *self.root.glob("keys/*/.new-*"), *self.root.glob("work/*")]:
            with contextlib.suppress(OSError):
                if path.stat().st_mtime >= before:
                    continue
                if path.is_dir():
                    remove_tree(path)
                else:
                    path.unlink()


def _digest(key: str, data: bytes) -> bytes:
    """Bound to its key: an entry that is copied to another place is none."""
    return hashlib.sha256(key.encode() + b"\0" + data).hexdigest().encode()
