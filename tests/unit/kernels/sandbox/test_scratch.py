"""Scratch folders: each has one owner, and what a killed owner leaves is removed by whoever comes next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kbrl_async.kernels.sandbox.scratch import PREFIX, Scratch, sweep


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_scratch_folder_goes_with_its_owner(temporary: Path) -> None:
    made = Scratch()
    assert [path.name.startswith(PREFIX) for path in temporary.iterdir()] == [True]
    sweep(temporary, young_s=-1.0)
    assert Path(made.path).is_dir(), "it has an owner"
    made.close()
    made.close()
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_start(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, signal\nfrom kbrl_async.kernels.sandbox.scratch import Scratch\nmade = Scratch()\n"
    code += "open(made.path + '/x', 'w').close()\nos.kill(os.getpid(), signal.SIGKILL)"
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert len(list(temporary.iterdir())) == 1
    sweep(temporary)
    assert len(list(temporary.iterdir())) == 1, "it may be that of a process that has just begun"
    sweep(temporary, young_s=-1.0)
    assert list(temporary.iterdir()) == []


def test_links_and_other_folders_are_left_alone(temporary: Path) -> None:
    (temporary / "mine").mkdir()
    (temporary / f"{PREFIX}link").symlink_to(temporary / "mine")
    sweep(temporary, young_s=-1.0)
    assert (temporary / "mine").is_dir()
