"""`kbrl chaos` before it does harm: what is asked for, and what is refused with a cure."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from kbrl_async.cli import chaos, launch, main, preflight
from kbrl_async.lab.chaos.faults import LINKED, FaultKind
from kbrl_async.lab.chaos.link import Link
from kbrl_async.runs.config import BEHIND, Endpoints, bound, endpoints, load
from kbrl_async.runs.folder import plan

PLAN = '[[fault]]\nat_s = 1\nkind = "partition"\ntarget = "learner"\nfor_s = 2\n'


def drawn(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert main(["chaos", "--dry-run", *words]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_the_same_seed_prints_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    first = drawn(capsys, "--train", "--random", "30", "--seed", "5")
    assert first == drawn(capsys, "--train", "--random", "30", "--seed", "5")
    assert first != drawn(capsys, "--train", "--random", "30", "--seed", "6")
    assert len(first) == 30


def test_kinds_are_chosen_and_a_run_that_goes_on_is_not_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert {fault["kind"] for fault in drawn(capsys, "--random", "40", "--faults", "kill,stop")} == {"kill", "stop"}
    assert {fault["kind"] for fault in drawn(capsys, "--random", "90")} == set(FaultKind) - LINKED


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "what shall be done?"),
        (["--random", "3", "--plan", "plan.toml"], "what shall be done?"),
        (["--random", "0"], "above 0"),
        (["--random", "3", "--faults", "melt"], "There are kill"),
        (["--random", "3", "max_steps=2"], "Add --train"),
        (["--plan", "plan.toml"], "Let kbrl chaos start the run: --train"),
        (["--plan", "missing.toml"], "can't be read"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_cure(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(PLAN)
    assert main(["chaos", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_run_that_is_not_running_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    assert main(["chaos", "--run", str(tmp_path), "--random", "2"]) == 2
    assert "is not running here" in capsys.readouterr().err
    assert not (tmp_path / "chaos.json").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_undoes_what_is_open(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    undone = []

    def running(*_: object) -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), number)  # a second one changes nothing
            undone.append(number)

    def ours(*_: object) -> None:
        """In place of the default, which would end the tests where the command did nothing."""

    monkeypatch.setattr(chaos, "on_running", running)
    before = signal.signal(number, ours)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["chaos", "--random", "2"])
        assert signal.getsignal(number) is ours
    finally:
        signal.signal(number, before)
    assert ended.value.code == 128 + number
    assert undone == [number]


def test_nohup_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with launch.undone_at_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_only_a_broker_behind_a_proxy_binds_elsewhere() -> None:
    given = Endpoints("ipc:///run/submit", "tcp://127.0.0.1:5756", "ipc:///run/status")
    assert bound(given, {}) == given
    assert bound(given, {BEHIND: "1"}) == Endpoints(
        "ipc:///run/submit.behind", "tcp://127.0.0.1:5756", "ipc:///run/status"
    )


def test_the_checks_before_a_run_leave_the_proxy_its_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    todo = plan(load(overrides=[f"log_path={tmp_path}", "name=x"]))
    work = Path(endpoints(todo.config, todo.path).work.removeprefix("ipc://"))
    work.parent.mkdir(parents=True, mode=0o700)
    monkeypatch.setenv(BEHIND, "1")
    with Link([(work, work.with_name("work.behind"))], lambda _pid: ""):
        before = work.stat().st_ino
        preflight.check_addresses(todo)
        assert work.stat().st_ino == before
