"""A learner's allocator is told how to take memory before torch is there, unless somebody has chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.learner.__main__ import GROWING, NAMES, SETTING, let_segments_grow

STARTED = """
import os, runpy, sys
sys.argv = ["learner"]
try:
    runpy.run_module("services.learner", run_name="__main__", alter_sys=True)
except SystemExit:
    pass
print(os.environ["{name}"], "torch" in sys.modules)
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_choice_is_kept(name: str) -> None:
    environment = {name: "max_split_size_mb:128"}
    let_segments_grow(environment)
    assert environment == {name: "max_split_size_mb:128"}


def test_the_process_itself_says_so_before_it_loads_torch(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    environment["KBRL_RUN_DIR"] = str(tmp_path / "no-run")
    done = subprocess.run(
        [sys.executable, "-c", STARTED.format(name=SETTING)], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == [GROWING, "False"], done.stderr
