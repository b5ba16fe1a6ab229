"""Commands print what was asked for; what is wrong is one line with cause and cure, and nothing is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from kbrl_async import cli
from kbrl_async.cli import preflight, train
from kbrl_async.cli.launch import ProcessesEnded
from kbrl_async.errors import MissingTool, RunError
from kbrl_async.runs import summary
from kbrl_async.runs.config import KEYS, load
from kbrl_async.runs.folder import Run, prepare
from kbrl_async.runs.summary import RunCounters
from kbrl_async.runs.telemetry.by_version import Answers

SUMMARY = summary.build(
    counters=RunCounters(
        groups_admitted=1, groups_trained=1, groups_filtered=0, groups_dropped_stale=0, groups_failed=0, rollouts=8,
        updates=7, max_staleness=1,
    ),
    answers=Answers(), wall_s=60.0, busy={},
)  # fmt: skip


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = cli.main(argv)
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.count("\n") == 1
    return code, out.err.rstrip()


def test_help_teaches_by_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "kbrl train resume=runs/default" in out
    for name, command in cli.COMMANDS.items():
        assert f"  {name:<11} {command.does}\n" in out


def test_a_dry_run_prints_what_was_resolved_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "batch_size=3", "--dry-run", "name=x", "--processes", "compile_farm=2"]) == 0
    out = capsys.readouterr().out
    printed = yaml.safe_load(out)
    assert (printed["batch_size"], printed["name"], printed["processes"]["compile_farm"]) == (3, "x", 2)
    assert "# run folder: runs/x (new)" in out
    assert "compile_farm × 2" in out
    assert list(folder.iterdir()) == []


def test_a_dry_run_knows_what_would_fail(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--dry-run", "level=9"]) == 2
    assert "level [9]" in capsys.readouterr().err
    assert cli.main(["train", "--dry-run", "cache_path=/proc/x"]) == 2
    assert "cannot write to /proc" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_a_dry_run_of_a_file_with_overrides(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.yaml").write_text("batch_size: 3\ngroup_size: 4\n")
    assert cli.main(["train", "--config", "a.yaml", "--dry-run", "group_size=5"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["batch_size"], printed["group_size"]) == (3, 5)


def test_dotenv_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / ".env").write_text("KBRL_BATCH_SIZE=6\n")
    cli.main(["train", "--dry-run"])
    assert yaml.safe_load(capsys.readouterr().out)["batch_size"] == 6


def test_an_unknown_key_ends_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = fails(capsys, "train", "batchsize=3")
    assert (code, line) == (2, "error: unknown key 'batchsize' (command line). Did you mean batch_size?")
    assert list(folder.iterdir()) == []


def test_an_unknown_option_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(capsys, "train", "--batchsize", "3")[0] == 2
    assert (
        fails(capsys, "summary", "x", "seed=1")[1]
        == "error: kbrl summary has no argument seed=1. See 'kbrl summary --help'"
    )


def test_only_some_services_can_be_several(capsys: pytest.CaptureFixture[str]) -> None:
    code, line = fails(capsys, "train", "--processes", "learner=2")
    assert code == 2
    assert "only sampler, compile_farm, timing_bench, verifier can be several" in line


def test_a_failed_check_leaves_nothing_behind(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_gcc(_plan: Run) -> None:
        raise MissingTool("gcc was not found", "Install it")

    monkeypatch.setattr(preflight, "check", no_gcc)
    assert fails(capsys, "train") == (3, "error: gcc was not found. Install it")
    assert list(folder.iterdir()) == []


def test_prepare_makes_the_folder_that_services_will_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "check", lambda _plan, **_where: None)
    assert cli.main(["prepare", "name=x"]) == 0
    assert capsys.readouterr().out == "runs/x\n"
    assert Path("runs/latest/config.yaml").is_file()


def test_the_reference_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["config"])
    text = capsys.readouterr().out
    cli.main(["config", "--docs"])
    markdown = capsys.readouterr().out
    for name, key in KEYS.items():
        assert f"{name} = " in text
        assert f"| `{name}` |" in markdown
        assert key.doc in markdown


def test_a_key_is_explained_with_its_value_and_where_that_was_set(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "mine.yaml").write_text("seed: 1\nlearner:\n  epochs: 5\n")
    monkeypatch.setenv("KBRL_LEARNER__EPOCHS", "6")
    assert cli.main(["config", "learner.epochs", "max_staleness", "--config", "mine.yaml", "preset=dapo", "loss"]) == 0
    out = capsys.readouterr().out
    assert "learner.epochs = 6\n" in out
    assert "set by:  variable KBRL_LEARNER__EPOCHS, over 5 (mine.yaml:3)\n" in out
    assert "max_staleness = 2\n    S: how many versions older" in out
    assert "set by:  the default\n    default: 2\n    takes:   an integer ≥ 0" in out
    assert "loss = grpo\n" in out
    assert "set by:  preset dapo\n" in out


def test_a_section_and_an_old_name_are_explained_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "archive", "dataset_builder.raicl_k"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name} = " in out for name in KEYS if name.startswith("archive."))
    assert "prompt.examples = 3" in out
    assert fails(capsys, "config", "batchsize")[1].endswith("Did you mean batch_size?")


def test_a_misspelt_command_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(capsys, "trian") == (2, "error: there is no command trian. Did you mean 'kbrl train'?")
    assert fails(capsys, "xyz", "--help") == (2, "error: there is no command xyz. 'kbrl --help' lists the commands")


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 0
    assert "kbrl train resume=runs/default" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"kbrl {metadata.version('kbrl-async')}\n"


def test_the_summary_as_json_is_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    run = prepare(load(overrides=["name=x"]))
    summary.write(run.path / "summary.json", SUMMARY)
    assert cli.main(["summary", "x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((run.path / "summary.json").read_text())


def test_a_file_of_another_format_is_refused_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    prepare(load(overrides=["name=x"]))
    assert (
        "Write --output FILE.html; --plot FILE.svg writes a picture"
        in fails(capsys, "compare", "x", "--output", "a.png")[1]
    )
    assert fails(capsys, "compare", "x", "--plot", "a.png")[1].endswith("writes SVG, not .png. Write --plot FILE.svg")
    assert fails(capsys, "report", "x", "--output", "a.pdf")[0] == 2


def test_the_variables_of_the_dotenv_file_are_passed_on(folder: Path) -> None:
    """A provider's key, and where KernelBench is; the shell's win."""
    (folder / ".env").write_text("MY_KEY=secret\nKERNELBENCH_ROOT=/nowhere\nKBRL_SEED=3\nHOME_OF=file\n")
    program = (
        "import os; from kbrl_async import cli; assert cli.main(['keys', 'list']) == 0;"
        "print(*(os.environ.get(name) for name in ('MY_KEY', 'KERNELBENCH_ROOT', 'KBRL_SEED', 'HOME_OF')))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "HOME_OF": "shell"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == "secret /nowhere None shell"


def test_the_summary_of_the_newest_run_is_printed_again(capsys: pytest.CaptureFixture[str]) -> None:
    run = prepare(load(overrides=["name=x"]))
    summary.write(run.path / "summary.json", SUMMARY)
    for argv in (["summary"], ["summary", "x"], ["summary", "runs/x"]):
        assert cli.main(argv) == 0
        assert "7 in 60 s" in capsys.readouterr().out


def test_a_run_without_a_summary_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    prepare(load(overrides=["name=x"]))
    code, line = fails(capsys, "summary", "x")
    assert code == 2
    assert "has not ended: it has no summary.json. Continue it with 'kbrl train resume=" in line


def test_a_run_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(capsys, "summary", "nobody") == (
        2, "error: there are no runs in runs/. Make one with 'kbrl train', or go to the folder that has them"
    )  # fmt: skip
    assert fails(capsys, "summary") == fails(capsys, "logs", "nobody")
    prepare(load(overrides=["name=anybody"]))
    assert fails(capsys, "summary", "nobody") == (2, "error: there is no run nobody. Did you mean anybody?")
    assert fails(capsys, "summary", "x") == (
        2, "error: there is no run x. There is anybody; 'kbrl runs' lists all"
    )  # fmt: skip


def test_problems_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["problems", "list", "--level", "1"]) == 0
    out = capsys.readouterr().out
    assert "L1/" in out
    assert "L2/" not in out


def test_a_finished_run_ends_with_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    run = prepare(load(overrides=["name=x"]))
    summary.write(run.path / "summary.json", SUMMARY)
    assert train.conclude(run.path, ProcessesEnded(first="reward_aggregator", code=0)) == 0
    assert "7 in 60 s" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "expected"), [(4, 4), (0, 4), (1, 4), (2, 2), (137, 137)])
def test_a_service_that_gave_up_gives_its_exit_code(code: int, expected: int) -> None:
    run = prepare(load(overrides=["name=x"]))
    with pytest.raises(
        RunError, match=rf"learner ended with exit code {code} before the run did\. .*resume=runs/x"
    ) as caught:
        train.conclude(run.path, ProcessesEnded(first="learner", code=code))
    assert caught.value.exit_code == expected


def test_a_stopped_run_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    run = prepare(load(overrides=["name=x"]))
    assert train.conclude(run.path, ProcessesEnded(first="", code=130)) == 130
    assert "continue with 'kbrl train resume=runs/x'" in capsys.readouterr().err


def test_help_imports_no_command() -> None:
    program = """
import sys
from kbrl_async import cli
try:
    cli.main(["--help"])
except SystemExit:
    pass
assert not {"msgspec", "numpy", "rich", "yaml"} & set(sys.modules)
assert [name for name in sys.modules if name.startswith("kbrl_async.cli.")] == []
"""
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, check=False, cwd=Path(__file__).parents[3], capture_output=True).returncode == 0


def test_no_command_s_arguments_need_torch() -> None:
    program = (
        "import sys, importlib, kbrl_async.cli as cli\n"
        "for name in cli.COMMANDS: importlib.import_module(f'kbrl_async.cli.{name}')\n"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=Path(__file__).parents[3]).returncode == 0


def test_the_configuration_is_read_without_heavy_packages() -> None:
    """Its sections lie in their wings, and whatever those import each command would wait for."""
    heavy = {"torch", "scipy", "numpy", "transformers"}
    program = f"import sys, kbrl_async.runs.config\nassert not {heavy} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=Path(__file__).parents[3]).returncode == 0


def test_output_that_nobody_reads_any_more_is_no_error() -> None:
    command = [sys.executable, "-m", "kbrl_async", "config"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=120) == 141


def test_the_summary_file_is_json_for_programs() -> None:
    run = prepare(load(overrides=["name=x"]))
    summary.write(run.path / "summary.json", SUMMARY)
    assert json.loads((run.path / "summary.json").read_text())["updates"] == 7


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(13, "Permission denied", "/nonexistent"), "/nonexistent: Permission denied"),
        (OSError(30, "Read-only file system", "/x"), "/x: Read-only file system"),
        (OSError(28, "No space left on device"), "no space left"),
    ],
)
def test_what_the_host_refuses_is_one_line_and_code_3(
    error: OSError, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(_args: object) -> int:
        raise error

    monkeypatch.setattr("kbrl_async.cli.config.run", refused)
    assert cli.main(["config"]) == 3
    assert capsys.readouterr().err.startswith(f"error: {line}")


def test_a_mistake_of_ours_is_called_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def mistaken(_args: object) -> int:
        raise FileNotFoundError(2, "No such file")

    monkeypatch.setattr("kbrl_async.cli.config.run", mistaken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cli.main(["config"]) == 3
    assert capsys.readouterr().err.startswith("error: unexpected FileNotFoundError: [Errno 2] No such file.")
