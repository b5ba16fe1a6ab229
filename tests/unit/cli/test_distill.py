"""`kbrl distill`: who is asked, what is taken from runs that are there, and that a whole set is not asked for again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kbrl_async.cli import distill, main, parse
from kbrl_async.cli import eval as evaluate
from kbrl_async.cli.launch import ProcessesEnded
from kbrl_async.evaluation import document
from kbrl_async.evaluation.metrics import Sample
from kbrl_async.runs.archive.archive import FILE, ArchiveWriter, make_row
from kbrl_async.runs.config import Config, to_yaml
from kbrl_async.runs.folder import SUMMARY_FILE
from kbrl_async.runs.targets import Target
from tests.records import record

EVALUATED = document.build([Sample(problem_id="L1/a", level=1, sample=0)], policy={}, settings={})


def filled(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with ArchiveWriter(folder / FILE) as archive:
        archive.add(make_row("t0", record(), reward=1.0, at=0.0), record().encode())
    return folder


def test_what_runs_hold_is_taken_and_nobody_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(folder / "runs" / "mine")
    assert main(["distill", "--from", "mine", "--output", "set.jsonl"]) == 0
    (line,) = Path("set.jsonl").read_text().splitlines()
    found = msgspec.json.decode(line)
    assert (found["asked"], found["answer"], found["found_in"], found["lo"]) == ("prompt", "answer", "mine:t0", 1.4)
    assert "proven answers 1, repairs 0, timed 1, problems 1" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--from", "mine", "default"], "--from asks nobody"),
        (["--from", "mine", "--keep", "0"], "--keep 0 keeps nothing"),
        (["mine", "evaluation.split=heldout"], "only training problems are distilled"),
    ],
)
def test_what_contradicts_is_refused(
    words: list[str], cause: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(folder / "runs" / "mine")
    assert main(["distill", *words]) == 2
    assert cause in " ".join(capsys.readouterr().err.split())


def test_training_problems_are_asked_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Config] = []

    def ask(target: Target, config: Config) -> tuple[Path, ProcessesEnded]:
        asked.append(config)
        made = filled(Path(config.log_path) / str(config.name))
        (made / "config.yaml").write_text(to_yaml(config))
        document.write(made / document.FILE, EVALUATED)
        (made / SUMMARY_FILE).write_text("{}")
        return made, ProcessesEnded("", 0)

    monkeypatch.setattr(evaluate, "ask", ask)
    for samples in ("2", "2", "3"):
        words = ["distill", "model_name=owner/model", "level=1", "--samples", samples, "--output", "set.jsonl"]
        assert distill.run(parse(words)) == 0
    assert [(config.evaluation.samples, config.evaluation.split) for config in asked] == [(2, "train"), (3, "train")]
    assert Path("set.jsonl").read_text().count("\n") == 1


def test_a_set_that_was_stopped_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(target: Target, config: Config) -> tuple[Path, ProcessesEnded]:
        return filled(Path(config.log_path) / str(config.name)), ProcessesEnded("", 130)

    monkeypatch.setattr(evaluate, "ask", ask)
    assert distill.run(parse(["distill", "model_name=owner/model", "--output", "set.jsonl"])) == 130
    assert not Path("set.jsonl").exists()
