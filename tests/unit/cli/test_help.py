"""What every command's help says, that it fits into 80 columns, and what the shell is told on Tab."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kbrl_async import cli
from kbrl_async.cli import shared
from kbrl_async.evaluation import document, show
from kbrl_async.evaluation.metrics import Sample
from kbrl_async.runs.config import load, to_yaml
from kbrl_async.runs.folder import prepare
from tests import artificial_run

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
    code = capsys.readouterr().out
    assert "kbrl" in code
    if program := shutil.which(shell):
        made = subprocess.run([program], input=f"{code}\n", capture_output=True, text=True, check=False)
        assert (made.returncode, made.stderr) == (0, ""), "a shell without a start file takes it"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("kbrl summ", {"summary"}),
        ("kbrl summary --j", {"--json"}),
        ("kbrl train log_level=w", {"log_level=warning"}),
        ("kbrl report mi", {"mine"}),
        ("kbrl eval mi", {"mine"}),
        ("kbrl eval reward.p", {"reward.preset=", "reward.plan_part=", "reward.plan_weight="}),
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


BOX = "┏┃┡│└├"


@pytest.mark.parametrize(
    "words",
    [
        ("summary", "made"), ("runs",), ("compare", "made", "made"), ("inspect", "made", "g000000.r0"),
        ("problems", "list"), ("config",), ("config", "learner"),
        ("plan", "--rollouts-per-hour", "1e9", "--times", "generate=4,compile=1.1,bench=2.5,train=0.3"),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_tables_fit_into_80_columns(
    words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = prepare(load(overrides=["name=made"]))
    artificial_run.make(run.path, 256, turns=2)
    (run.path / "config.yaml").write_text(to_yaml(run.config))
    assert cli.main(list(words)) == 0
    out = capsys.readouterr().out
    has_table = any(line.startswith(tuple(BOX)) for line in out.splitlines())
    rows = [line for line in out.splitlines() if line.startswith(tuple(BOX)) or not has_table]
    assert [line for line in rows if len(line) > 80] == []


def test_the_figures_of_an_evaluation_fit_into_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = {"eager": (1234.5, 0.01, 9999.9), "compile": (1.2, 1.0, 1.4)}
    samples = [
        Sample(
            problem_id=f"L{level}/{n}_a_problem_with_quite_a_long_name", level=level, sample=sample, compiled=True,
            correct=True, speedups=speeds, flags=("zeros",) * (n % 2), fault="runtime_error" if n == 3 else "ok",
        )
        for level in (1, 2, 3) for n in range(4) for sample in range(2)
    ]  # fmt: skip
    console = Console(width=80, file=io.StringIO())
    console.print(show.render(document.build(samples, policy={"label": "a" * 40}, settings={})))
    assert isinstance(console.file, io.StringIO)
    assert [line for line in console.file.getvalue().splitlines() if len(line) > 80] == []
