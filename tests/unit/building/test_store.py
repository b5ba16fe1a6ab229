"""The artifact store: atomic, self-checking, bounded, shared."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from kbrl_async.building import ArtifactStore
from kbrl_async.errors import DiskFull
from protocols.records import BuildReport, Fault


def test_content_is_found_under_its_address(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    path = store.path(store.put(b"content"))
    assert path is not None
    assert path.read_bytes() == b"content"


@pytest.mark.parametrize("damage", [b"", b"conten", b"poison!"])
def test_damaged_content_is_deleted(tmp_path: Path, damage: bytes) -> None:
    store = ArtifactStore(tmp_path)
    address = store.put(b"content")
    path = store.path(address)
    assert path is not None
    path.write_bytes(damage)
    assert store.path(address) is None
    assert not path.exists()


def test_an_unknown_address_is_absent(tmp_path: Path) -> None:
    assert ArtifactStore(tmp_path).path("00" * 32) is None


def test_failures_are_remembered(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    store.remember("ab" * 32, BuildReport(Fault.COMPILE_ERROR, message="no"))
    assert ArtifactStore(tmp_path).recall("ab" * 32) == BuildReport(Fault.COMPILE_ERROR, message="no")


def test_a_success_without_its_artifact_is_forgotten(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    address = store.put(b"content")
    store.remember("ab" * 32, BuildReport(Fault.OK, {"unit": address}))
    path = store.path(address)
    assert path is not None
    path.unlink()
    assert store.recall("ab" * 32) is None


def test_a_truncated_index_entry_is_forgotten(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    store.remember("ab" * 32, BuildReport(Fault.OK))
    (tmp_path / "keys" / "ab" / f"{'ab' * 32}.json").write_bytes(b'{"type": "bui')
    assert store.recall("ab" * 32) is None


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path, max_bytes=4000)
    addresses = [store.put(bytes([i]) * 1000) for i in range(4)]
    for age, address in enumerate(addresses):
        path = store.path(address)
        assert path is not None
        os.utime(path, (time.time() - 100 + age,) * 2)
    store.path(addresses[0])
    newest = store.put(b"x" * 1000)
    assert store.path(addresses[1]) is None
    assert store.path(addresses[0]) is not None
    assert store.path(newest) is not None
    assert store.size <= 4000


def test_concurrent_writers_never_show_a_part(tmp_path: Path) -> None:
    stores = [ArtifactStore(tmp_path) for _ in range(4)]
    content = os.urandom(1 << 16)
    failures: list[str] = []

    def write(store: ArtifactStore) -> None:
        failures.extend("part" for _ in range(20) if store.path(store.put(content)) is None)

    threads = [threading.Thread(target=write, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not list(tmp_path.rglob(".new-*"))


def test_a_full_disk_has_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ArtifactStore(tmp_path)

    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DiskFull):
        store.put(b"content")
    assert not list(tmp_path.rglob(".new-*"))
