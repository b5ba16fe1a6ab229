"""Who judges by which rules where nobody says: people's commands by `open`, training by `strict`.

`kbrl optimize --from` has its own: tests/unit/cli/test_optimize.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kbrl_async
from kbrl_async import cli
from kbrl_async.kernels.kernelbench.runs import RunOptions
from kbrl_async.runs.config import Config, load
from protocols.records import Fault
from tests.candidates import affine, elementwise

ONLY_OPEN = "import os\n" + elementwise("2 * x[i] + 1")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A problem, a right kernel that imports `os`, and the same two as a run folder and its problems."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("run", "problems/level1"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("problem.py", "problems/level1/1_affine.py"):
        (tmp_path / name).write_text(affine())
    for name in ("mine.py", "run/level_1_problem_1_sample_0_kernel.py"):
        (tmp_path / name).write_text(ONLY_OPEN)
    return tmp_path


def ways(files: Path) -> dict[str, list[str]]:
    one = ["--problem", str(files / "problem.py"), "--candidate", str(files / "mine.py")]
    return {
        "verify": ["verify", *one, "--no-timing"],
        "bench": ["bench", *one, "--cap", "0.05"],
        "run folder": ["verify", "--run", str(files / "run"), "--problems", str(files / "problems"), "--no-timing"],
    }


def verdict(files: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    cli.main([*words, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    if "verdict" not in document:
        document = json.loads((files / "run" / "kbrl_results.json").read_text())["outcomes"][0]["result"]
    return dict(document["verdict"])


@pytest.mark.parametrize("way", ["verify", "bench", "run folder"])
def test_a_command_takes_any_python_unless_it_is_told_to_be_strict(
    files: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    found = verdict(files, ways(files)[way], capsys)
    assert (found["fault"], found["rules"]) == ("ok", "open"), found
    told = verdict(files, [*ways(files)[way], "--rules", "strict"], capsys)
    assert (told["fault"], told["rule"], told["rules"]) == ("static_violation", "import", "strict"), told


def test_so_does_the_library() -> None:
    found = kbrl_async.verify(affine(), ONLY_OPEN, timing=False).verdict
    assert (found.fault, found.rules) == (Fault.OK, "open"), found
    assert RunOptions().verify.farm.rules == "open"


def test_training_is_strict_and_wants_fresh_outputs() -> None:
    for config in (Config(), load()):
        assert (config.compile_farm.rules, config.timing_bench.outputs) == ("strict", "fresh")
