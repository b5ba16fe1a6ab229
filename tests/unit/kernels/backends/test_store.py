"""The artifact store: atomic, self-checking, bounded, shared."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from kbrl_async.errors import DiskFull
from kbrl_async.kernels.backends.building import ArtifactStore
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
    store = ArtifactStore(tmp_path, store_max_bytes=4000)
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


def test_an_index_entry_that_was_altered_is_forgotten(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    store.remember("ab" * 32, BuildReport(Fault.COMPILE_ERROR, message="no"))
    path = tmp_path / "keys" / "ab" / f"{'ab' * 32}.json"
    path.write_bytes(path.read_bytes().replace(b"compile_error", b"ok"))
    assert store.recall("ab" * 32) is None
    assert not path.exists()


def test_an_index_entry_under_another_name_is_forgotten(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    store.remember("ab" * 32, BuildReport(Fault.OK))
    moved = tmp_path / "keys" / "ab" / f"{'ab' * 31}cd.json"
    (tmp_path / "keys" / "ab" / f"{'ab' * 32}.json").rename(moved)
    assert store.recall("ab" * 31 + "cd") is None


def test_the_index_is_bounded(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path, max_keys=20)
    for number in range(60):
        store.remember(f"{number:064d}", BuildReport(Fault.OK))
    assert len(list(tmp_path.glob("keys/*/*.json"))) <= 20
    assert store.recall(f"{59:064d}") is not None


def test_an_entry_that_is_used_stays_longer(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path, max_keys=10)
    for number in range(10):
        store.remember(f"{number:064d}", BuildReport(Fault.OK))
        os.utime(tmp_path / "keys" / "00" / f"{number:064d}.json", (time.time() - 100 + number,) * 2)
    store.recall(f"{0:064d}")
    store.remember(f"{10:064d}", BuildReport(Fault.OK))
    assert store.recall(f"{0:064d}") is not None
    assert store.recall(f"{1:064d}") is None


def test_what_others_write_counts(tmp_path: Path) -> None:
    stores = [ArtifactStore(tmp_path, store_max_bytes=16_000) for _ in range(4)]
    for number in range(12):
        for place, store in enumerate(stores):
            store.put(bytes([12 * place + number]) * 1000)
    size = sum(path.stat().st_size for path in tmp_path.glob("objects/*/*.so"))
    assert size <= 16_000 * (1 + 4 / 16)


def test_the_same_content_counts_once(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    for _ in range(5):
        store.put(b"content")
    assert store.size == len(b"content")


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    ArtifactStore(tmp_path)
    old, young = tmp_path / "work" / "old", tmp_path / "work" / "young"
    half = tmp_path / "objects" / "ab" / ".new-half"
    half.parent.mkdir()
    half.write_bytes(b"ha")
    for folder in (old, young):
        folder.mkdir()
    for path in (old, half):
        os.utime(path, (time.time() - 8 * 3600,) * 2)
    ArtifactStore(tmp_path)
    assert not old.exists()
    assert not half.exists()
    assert young.exists()


def test_concurrent_writers_and_eviction_leave_only_whole_files(tmp_path: Path) -> None:
    stores = [ArtifactStore(tmp_path, store_max_bytes=8_000, max_keys=10) for _ in range(4)]

    def write(store: ArtifactStore, first: int) -> None:
        for number in range(first, first + 30):
            address = store.put(f"{number}".encode() * 400)
            store.remember(f"{number:064d}", BuildReport(Fault.OK, {"unit": address}))
            store.recall(f"{first:064d}")

    threads = [threading.Thread(target=write, args=(store, 10 * place)) for place, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = [stores[0].path(path.stem) for path in tmp_path.glob("objects/*/*.so")]
    assert all(whole)
    assert not list(tmp_path.rglob(".new-*"))
