"""`kbrl runs`: how each run stands and what came of it, by its own files, whether it has ended or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kbrl_async import cli
from kbrl_async.runs import summary
from kbrl_async.runs.config import load
from kbrl_async.runs.folder import prepare
from kbrl_async.runs.standing import process
from tests import artificial_run

ENDED = {
    "updates": 14, "first_and_last": "…", "correct_rate_first": 0.164, "correct_rate_last": 0.56,
    "heldout_correct_rate_before": 0.08, "heldout_correct_rate_after": 0.31,
}  # fmt: skip
EVALUATED = {
    "kind": "evaluation", "policy": {"label": "good-v14"},
    "overall": {"raw": {"problems": 30, "correct": {"value": 0.3, "lo": 0.2, "hi": 0.41}}},
}  # fmt: skip


@pytest.fixture
def there(folder: Path) -> Path:
    """A run of each state, and an evaluation."""
    good, stopped, crashed, live = (
        prepare(load(overrides=[f"name={n}"])).path for n in ("good", "stopped", "bad", "on")
    )
    summary.write(good / "summary.json", ENDED)
    with process(stopped, "broker") as end:
        end(0, True)
    with process(crashed, "learner.1") as end:
        end(3, False)
    evaluated = prepare(load(overrides=["name=good-v14", "log_path=runs/evals"])).path
    summary.write(evaluated / "summary.json", EVALUATED)
    return live


def test_each_run_has_its_state_and_its_figures(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with process(there, "broker"):
        assert cli.main(["runs"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[1]: " ".join(line.split()[1:]) for line in out.splitlines() if line.startswith("│")}
    assert rows["good"].startswith("good │ ended │ 14 │ 16% → 56% │ 8% → 31% │")
    assert rows["on"].startswith("on (latest) │ running │ – │ – │ – │")
    assert rows["stopped"].startswith("stopped │ stopped │ –")
    assert rows["bad"].startswith("bad │ crashed │ –")
    assert rows["good-v14"].startswith("good-v14 │ ended │ good-v14 │ 30 │ 30% (20% … 41%) │")
    assert "bad crashed: learner.1 gave up with exit code 3\n  kbrl logs bad --level error" in out


def test_the_list_for_programs(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", "--json"]) == 0
    found = {run["run"]: run for run in json.loads(capsys.readouterr().out)}
    assert {name: run["state"] for name, run in found.items()} == {
        "good": "ended", "on": "stopped", "stopped": "stopped", "bad": "crashed", "good-v14": "ended"
    }  # fmt: skip
    assert found["good"]["correct_rate_last"] == 0.56
    assert found["good-v14"]["correct_rate_95"] == [0.2, 0.41]


def test_a_run_that_has_not_ended_has_the_figures_of_its_answers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prepare(load(overrides=["name=going"])).path
    artificial_run.make(path, 512)
    wanted = json.loads((path / "summary.json").read_text())
    (path / "summary.json").unlink()
    assert cli.main(["runs", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["updates"] == wanted["updates"]
    for name in ("correct_rate_first", "correct_rate_last"):
        assert found[name] == pytest.approx(wanted[name])


def test_where_there_are_no_runs_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs"]) == 2
    assert "there are no runs in runs/" in capsys.readouterr().err


def test_a_damaged_summary_costs_its_figures_only(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/good/summary.json").write_text("{")
    assert cli.main(["runs"]) == 0
    assert "good" in capsys.readouterr().out
