"""Policy versions at a URL that fsspec knows (file://, s3://, gs://, memory:// …): for other hosts, and to keep.

::

    policies/policy-v17/ ─ every file but the manifest ─▶ URL/policy-v17/… ─ manifest.json last ─▶ it is there
                                                          URL/policy-v17/manifest.json first removed ─▶ it is gone

Invariants
* A version without its manifest is none: readers look for manifests only, so nothing half-written is ever read.
* A fetched version has the SHA-256 of its manifest, or is not there at all.
* Collection keeps the newest `keep` and those that somebody holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from kbrl_async.durable import MARKER, write_folder
from kbrl_async.errors import CheckpointError, ConfigError, InfraError
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.versions import MANIFEST
from kbrl_async.weights import POLICY_PREFIX, prove
from protocols.records import PolicyVersion


class RemotePolicies:
    """The versions at one URL. Every call raises `InfraError` where the store can't be reached."""

    def __init__(self, url: str) -> None:
        """ConfigError where fsspec knows no such URL or lacks its driver."""
        import fsspec

        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            cure = "Use file://…, or install its driver"
            raise ConfigError(f"policy_url={url} can't be opened: {error}", cure) from error
        self.url = url

    def publish(self, folder: Path) -> None:
        """Uploads a complete version; publishing it again replaces it."""
        target = f"{self._root}/{folder.name}"
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARKER]
        try:
            self._remove(target)
            for path in sorted(files, key=lambda path: path == folder / MANIFEST):
                remote = f"{target}/{path.relative_to(folder).as_posix()}"
                self._fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
                self._fs.put_file(str(path), remote)
        except OSError as error:
            raise self._unreachable(error) from error

    def versions(self) -> list[int]:
        """Complete ones, ascending."""
        try:
            self._fs.invalidate_cache()
            names = [Path(entry).name for entry in self._list()]
            numbers = [name.removeprefix(POLICY_PREFIX) for name in names if name.startswith(POLICY_PREFIX)]
            found = sorted(int(n) for n in numbers if n.isdigit())
            return [n for n in found if self._fs.exists(f"{self._root}/{POLICY_PREFIX}{n}/{MANIFEST}")]
        except OSError as error:
            raise self._unreachable(error) from error

    def fetch(self, version: int, directory: Path) -> Path:
        """Downloads a version into `directory`, whole or not at all. CheckpointError where it is not what it says."""
        source = f"{self._root}/{POLICY_PREFIX}{version}"
        if version not in self.versions():
            raise CheckpointError(f"{self.url} holds no version {version}", f"It holds {self.versions() or 'none'}")

        def fill(folder: Path) -> None:
            for remote in self._fs.find(source):
                path = folder / str(remote).partition(f"{POLICY_PREFIX}{version}/")[2]
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fs.get_file(remote, str(path))
            manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=PolicyVersion)
            prove(folder, manifest)

        target = versions.version_folder(directory, version)
        try:
            write_folder(target, fill)
        except (OSError, msgspec.DecodeError) as error:
            raise self._unreachable(error) from error
        return target

    def collect_garbage(self, keep: int, protected: Iterable[int] = ()) -> list[int]:
        """Deletes all but the newest `keep` (≥ 1) versions and those in `protected`; returns what it deleted."""
        held = set(protected)
        doomed = [n for n in self.versions()[: -max(1, keep)] if n not in held]
        try:
            for number in doomed:
                self._remove(f"{self._root}/{POLICY_PREFIX}{number}")
        except OSError as error:
            raise self._unreachable(error) from error
        return doomed

    def _list(self) -> list[str]:
        if not self._fs.isdir(self._root):
            return []
        return [str(entry) for entry in self._fs.ls(self._root, detail=False)]

    def _remove(self, target: str) -> None:
        """The manifest goes first: nobody starts to read what is being deleted."""
        if self._fs.exists(f"{target}/{MANIFEST}"):
            self._fs.rm_file(f"{target}/{MANIFEST}")
        if self._fs.exists(target):
            self._fs.rm(target, recursive=True)

    def _unreachable(self, error: Exception) -> InfraError:
        return InfraError(f"policy_url={self.url}: {error}", "Check the address, its rights and the network")


def open_remote(url: str | None) -> RemotePolicies | None:
    return RemotePolicies(url) if url else None
