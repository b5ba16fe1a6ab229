"""Files and folders that are whole or not at all, whatever write, flush or rename a crash or a full disk precedes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kbrl_async import durable
from kbrl_async.errors import DiskFull

PREFIX = "step-"


class Killed(BaseException):
    """As SIGKILL: nothing that follows is done, no handler runs."""


class Disk:
    """Counts what is done to the disk, and ends it before the n-th."""

    def __init__(self, patch: pytest.MonkeyPatch, before: int, error: Callable[[], BaseException]) -> None:
        self.done, self._before, self._error = 0, before, error
        for owner, name in (
            (os, "fsync"),
            (os, "replace"),
            (Path, "replace"),
            (Path, "rename"),
            (Path, "touch"),
            (Path, "mkdir"),
            (Path, "write_text"),
        ):
            patch.setattr(owner, name, self._counted(getattr(owner, name)))
        if error is Killed:  # a full disk lets things be deleted
            for owner, name in ((Path, "unlink"), (shutil, "rmtree")):
                patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, real: Callable[..., object]) -> Callable[..., object]:
        def act(*args: object, **more: object) -> object:
            self.done += 1
            if self.done >= self._before:
                raise self._error()
            return real(*args, **more)

        return act


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def fill(number: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in ("a", "b"):
            (folder / name).write_text(f"{name}{number}")

    return write


def save(parent: Path, number: int, keep: int = 2) -> None:
    """As checkpoints and policies are saved."""
    durable.write_folder(parent / f"{PREFIX}{number}", fill(number))
    durable.remove_leftovers(parent, PREFIX)
    for _, old in durable.numbered(parent, PREFIX)[:-keep]:
        durable.remove_folder(old)


def points(tmp_path: Path, error: Callable[[], BaseException]) -> Iterator[tuple[int, Path]]:
    """A folder for each point at which a third checkpoint, beside two whole ones, was cut short."""
    for before in range(1, 100):
        parent = tmp_path / f"cut-{before}"
        for number in (1, 2):
            save(parent, number)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, before, error)
            with contextlib.suppress(Killed, DiskFull):
                save(parent, 3)
        if disk.done < before:
            assert before > 8, "this one was behind the last thing that is done"
            return
        yield before, parent


def whole(parent: Path) -> list[int]:
    found = durable.numbered(parent, PREFIX)
    for number, path in found:
        assert sorted(p.name for p in path.iterdir()) == [durable.MARKER, "a", "b"]
        assert [(path / name).read_text() for name in "ab"] == [f"a{number}", f"b{number}"]
    return [number for number, _ in found]


def test_a_kill_at_any_point_leaves_whole_folders_only_and_the_next_save_cleans_up(tmp_path: Path) -> None:
    for before, parent in points(tmp_path, Killed):
        assert whole(parent) in ([1, 2], [1, 2, 3], [2, 3]), before
        save(parent, 3)
        save(parent, 4)
        assert whole(parent) == [3, 4]
        assert sorted(path.name for path in parent.iterdir() if path.is_dir()) == ["step-3", "step-4"], before


def test_a_full_disk_at_any_point_names_the_path_and_the_cure_and_leaves_no_half_folder(tmp_path: Path) -> None:
    for before, parent in points(tmp_path, full):
        assert 2 in whole(parent), before
        save(parent, 3)
        assert whole(parent)[-1] == 3
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, 3, full)
        with pytest.raises(DiskFull, match=r"no space left while writing .*step-9\. Free some"):
            save(tmp_path, 9)


@pytest.mark.parametrize("error", [Killed, full])
def test_a_file_is_the_old_or_the_new_one_whatever_happens_on_the_way(
    tmp_path: Path, error: Callable[[], BaseException]
) -> None:
    path, seen = tmp_path / "config.yaml", set()
    for before in range(1, 10):
        path.write_text("old")
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, before, error)
            try:
                durable.write_atomically(path, "new")
            except (Killed, DiskFull):
                pass
            else:
                break
        seen.add(path.read_text())
    assert path.read_text() == "new"
    assert before > 2
    assert seen <= {"old", "new"}
    assert "old" in seen
    if error is full:
        assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"], "what could not be finished takes no room"


def test_a_safetensors_file_that_finds_no_room_is_a_full_disk_too(tmp_path: Path) -> None:
    class SafetensorError(Exception):
        pass

    def fails(_: Path) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(DiskFull, match=r"step-1"):
        durable.write_folder(tmp_path / "step-1", fails)
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_is_no_matter_of_room_stays_what_it_is(tmp_path: Path) -> None:
    def fails(_: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        durable.write_folder(tmp_path / "step-1", fails)
