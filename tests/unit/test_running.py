"""What workers of a test session share is made once, and again only where a try has failed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.running import made_once


def test_the_first_makes_it_and_the_others_wait_until_it_is_whole(tmp_path: Path) -> None:
    begun, made = threading.Event(), list[str]()

    def make(folder: Path) -> None:
        begun.set()
        threading.Event().wait(0.2)
        (folder / "file").write_text("whole")
        made.append("once")

    def seen() -> str:
        return (made_once(tmp_path / "shared", make) / "file").read_text()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(seen)
        assert begun.wait(60)
        assert pool.submit(seen).result(60) == first.result(60) == "whole"
    assert made == ["once"]


def test_a_try_that_failed_is_made_again_in_an_empty_folder(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        made_once(tmp_path / "shared", fail)
    folder = made_once(tmp_path / "shared", lambda folder: (folder / "file").touch())
    assert sorted(path.name for path in folder.iterdir()) == ["WHOLE", "file"]
