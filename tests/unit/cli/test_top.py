"""`kbrl top` shows a running system, waits for one that is away, and ends with one that has ended."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from kbrl_async.cli import main, top
from kbrl_async.errors import UserError
from kbrl_async.runs import status_client
from kbrl_async.runs.config import Config, to_yaml
from protocols.messages import Load, StatusReport, WorkerStanding
from services.broker.server import BrokerServer
from services.runtime import addresses
from tests.brokers import beside, serving


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "smoke"
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(Config(name="smoke")))
    return folder


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "PATIENCE_S", 0.1)
    monkeypatch.setattr(top.Watcher.look, "__defaults__", (0.1,))


def while_served(run: Path, act: Callable[[], int]) -> int:
    """Call it in a thread, beside a broker of this run."""

    async def play() -> int:
        options = beside(run, status_address=addresses(run).status, metrics_s=0.05)
        async with serving(BrokerServer(options)), asyncio.timeout(120):
            return await asyncio.to_thread(act)

    return asyncio.run(play())


def test_once_as_json_for_scripts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert while_served(run, lambda: main(["top", str(run), "--once", "--json", "--interval", "0.1"])) == 0
    *_, line = capsys.readouterr().out.splitlines()
    seen = json.loads(line)
    assert (seen["run"], seen["state"]) == ("smoke", "running")
    assert [stage["stage"] for stage in seen["stages"]][:2] == ["generate", "compile"]
    assert seen["workers"][0]["worker_id"] == "broker"
    absent = ["compile_farm", "learner", "reward_aggregator", "sampler", "timing_bench"]
    assert [(worker["worker_id"], worker["state"]) for worker in seen["workers"][1:]] == [
        (name, "starting") for name in absent
    ]


def test_once_for_people_by_address(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address, keys = status_client.of_run(run)
    assert keys is None
    assert while_served(run, lambda: main(["top", "--connect", address, "--once", "--interval", "0.1"])) == 0
    assert "running" in capsys.readouterr().out


@pytest.mark.usefixtures("impatient")
def test_nobody_there_is_an_error_with_a_cure(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(run), "--once"]) == 4
    assert "no broker answers for smoke" in capsys.readouterr().err


@pytest.mark.usefixtures("impatient")
def test_a_run_that_has_ended_says_so_and_how_to_see_its_result(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").write_text("{}")
    assert main(["top", str(run), "--once"]) == 0
    assert capsys.readouterr().out.strip() == "smoke has ended; its result: kbrl summary smoke"
    assert main(["top", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "ended"


def test_watching_goes_on_through_an_absence_and_ends_with_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    def report(at: float, done: int, *, draining: bool = False) -> StatusReport:
        standing = WorkerStanding("a.1", ["score"], load=Load(done=done))
        return StatusReport(at=at, epoch=1, run="x", draining=draining, workers=[standing])

    answers = [report(1.0, 5), None, report(3.0, 9), report(4.0, 9, draining=True), None]
    watcher = top.Watcher(lambda _: answers.pop(0), None)
    views = list(top.views_until_the_end(watcher, 0.0))
    assert [view.state for view in views] == ["running", "away", "running", "stopping", "stopped"]
    assert views[1].run == "x", "it shows how things stood"
    assert views[2].workers[1].done_per_s == 2.0


def test_on_a_terminal_each_look_is_one_picture_on_a_screen_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, height=24, legacy_windows=False)
    monkeypatch.setattr(top, "Console", lambda: console)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    answers = [StatusReport(at=1.0, run="x", policy_version=3), StatusReport(at=2.0, run="x", draining=True), None]
    watcher = top.Watcher(lambda _: answers.pop(0), None)
    assert top.watch_until_the_end(watcher, argparse.Namespace(interval=0.0, json=False)) == 0
    before, entered, screen = written.getvalue().partition("\x1b[?1049h")
    pictures, left, after = screen.partition("\x1b[?1049l")
    assert (before, bool(entered), bool(left)) == ("", True, True)
    assert "policy v3" in pictures
    assert "\x1b[2J" not in pictures, "no clearing, so no flicker"
    assert "x has ended or was stopped" in after


def test_errors_of_the_log_files_are_shown_with_those_of_the_broker(run: Path) -> None:
    line = {"process": "learner.1", "event": "odd", "level": "error", "timestamp": "2026-01-01T00:00:00Z"}
    (run / "logs" / "learner.1.jsonl").write_text(json.dumps(line) + "\n")
    with contextlib.closing(top.Watcher(lambda _: StatusReport(at=1.0), run)) as watcher:
        assert [(error.who, error.what) for error in watcher.look().errors] == [("learner.1", "odd")]


def test_a_configured_address_is_asked_and_without_keys_for_it_there_is_a_cure(run: Path, tmp_path: Path) -> None:
    config = to_yaml(Config(name="smoke")).replace("  status: null", "  status: tcp://127.0.0.1:5757")
    (run / "config.yaml").write_text(config)
    assert status_client.of_run(run) == ("tcp://127.0.0.1:5757", None)
    (run / "config.yaml").write_text(config.replace("  keys: null", f"  keys: {tmp_path / 'keys'}"))
    with pytest.raises(UserError, match="key"):
        status_client.of_run(run)


@pytest.mark.parametrize("interval", ["0", "-1", "nan"])
def test_an_interval_out_of_range_is_refused(run: Path, interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(run), "--interval", interval]) == 2
    assert "--interval" in capsys.readouterr().err


def test_a_picture_that_costs_more_comes_less_often() -> None:
    assert top.pause(1.0, 0.25, 0.01) == 0.75
    assert top.pause(1.0, 0.25, 0.3) == pytest.approx(10.0 - 0.25)
    assert top.pause(1.0, 5.0, 0.01) == 0.0
