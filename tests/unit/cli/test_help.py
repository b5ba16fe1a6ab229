"""What every command's help says, that it fits into 80 columns, and what the shell is told on Tab."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kbrl_async import cli
from kbrl_async.cli import shared
from kbrl_async.runs.config import load
from kbrl_async.runs.folder import prepare

ROOT = Path(__file__).parents[3]
PAGES = [(), *((name,) for name in cli.COMMANDS), ("index", "build"), ("index", "query")]


def help_of(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main([*words, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", PAGES, ids=lambda words: " ".join(words) or "kbrl")
def test_help_fits_into_80_columns(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert [line for line in help_of(words, capsys).splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_begins_with_what_it_does_an_example_and_how_long_it_takes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = cli.COMMANDS[name]
    opening = f"\n{command.does}\n\nexample: {command.example}\ntakes:   {command.takes}\n"
    assert opening in help_of((name,), capsys)
    assert f"kbrl {name}" in command.example


def test_every_module_of_a_command_is_a_command() -> None:
    files = (ROOT / "kbrl_async" / "cli").glob("*.py")
    modules = {path.stem for path in files if "\ndef add_arguments" in path.read_text()}
    assert modules == set(cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_example_of_a_command_is_one_that_it_takes(name: str) -> None:
    words = cli.COMMANDS[name].example.removeprefix('eval "$(').removesuffix(')"').split()[1:]
    assert cli.parse(words).command == name


def test_the_shell_completes_runs_and_settings(folder: Path) -> None:
    prepare(load(overrides=["name=mine"]))
    prepare(load(overrides=["name=mine-v3", "log_path=runs/evals"]))
    assert shared.run_names() == ["mine", "mine-v3"]
    assert "learner.epochs=" in shared.setting_words("lear")
    levels = {f"log_level={word}" for word in ("debug", "info", "warning", "error")}
    assert set(shared.setting_words("log_level=")) == levels
    assert shared.setting_words("nothing=") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_s_code_names_the_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("argcomplete")
    assert cli.main(["completion", shell]) == 0
    assert "kbrl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("kbrl summ", {"summary"}),
        ("kbrl summary --j", {"--json"}),
        ("kbrl train log_level=w", {"log_level=warning"}),
        ("kbrl report mi", {"mine"}),
        ("kbrl completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_a_tab_is_answered(line: str, wanted: set[str], folder: Path) -> None:
    pytest.importorskip("argcomplete")
    prepare(load(overrides=["name=mine"]))
    (answer := folder / "answer").touch()
    told = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
    }
    environment = {
        **os.environ,
        **told,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "_ARGCOMPLETE_IFS": "\n",
    }
    subprocess.run([sys.executable, "-m", "kbrl_async"], check=True, cwd=folder, env=environment, capture_output=True)
    assert {word.strip() for word in answer.read_text().splitlines()} >= wanted
