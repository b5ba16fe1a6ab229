"""How a run stands is told from what its processes leave, and `latest` is never a start that has failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kbrl_async.runs.archive.archive import FILE, ArchiveWriter, make_row
from kbrl_async.runs.config import load
from kbrl_async.runs.folder import latest, prepare, runs_in, settle_latest
from kbrl_async.runs.standing import PROCESSES, SUMMARY_FILE, RunStatus, process, standing
from tests.records import record

ROOT = Path(__file__).parents[3]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def run(name: str) -> Path:
    """A run that was started a moment after the one before."""
    path = prepare(load(overrides=[f"name={name}"])).path
    for other in Path("runs").glob("*/config.yaml"):
        at = other.stat().st_mtime - 10
        os.utime(other, (at, at))
    os.utime(path / "config.yaml")
    return path


def ended(path: Path, **processes: tuple[int, bool]) -> None:
    for name, (code, was_asked) in processes.items():
        with process(path, name) as end:
            end(code, was_asked)


def answered(path: Path) -> None:
    with ArchiveWriter(path / FILE) as archive:
        archive.add(make_row("g000000.r0", record("g000000.r0"), at=1.0, reward=1.0)).result(30)


def test_a_run_is_running_while_one_of_its_processes_lives(runs: Path) -> None:
    path = run("a")
    assert standing(path).state is RunStatus.STOPPED
    with process(path, "learner.1") as end:
        assert standing(path).state is RunStatus.RUNNING
        end(0, False)
        assert standing(path).state is RunStatus.RUNNING
    assert standing(path).state is RunStatus.STOPPED


def test_processes_that_were_asked_to_end_have_stopped(runs: Path) -> None:
    path = run("a")
    ended(path, broker=(0, True), learner=(1, True))
    assert standing(path) == (RunStatus.STOPPED, "")


def test_a_process_that_gave_up_is_named_though_the_others_were_asked_to_end(runs: Path) -> None:
    path = run("a")
    ended(path, broker=(0, True), learner=(3, False), sampler=(0, True))
    assert standing(path) == (RunStatus.CRASHED, "learner gave up with exit code 3")


def test_a_nanny_that_was_killed_has_crashed(runs: Path) -> None:
    path = run("a")
    ended(path, broker=(0, True))
    program = (
        "import sys, time; from pathlib import Path; from kbrl_async.runs.standing import process\n"
        "with process(Path(sys.argv[1]), 'learner.1'):\n    print('here', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path.resolve())], stdout=subprocess.PIPE, cwd=ROOT
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert standing(path).state is RunStatus.RUNNING
        child.send_signal(signal.SIGKILL)
    assert standing(path) == (RunStatus.CRASHED, "learner.1 was killed")


def test_all_that_were_killed_are_named(runs: Path) -> None:
    path = run("a")
    for name in ("broker", "learner", "sampler"):
        with process(path, name):
            pass
    assert standing(path) == (RunStatus.CRASHED, "all were killed")
    ended(path, broker=(0, True))
    assert standing(path) == (RunStatus.CRASHED, "learner, sampler were killed")


def test_a_summary_is_the_end_whatever_became_of_the_processes(runs: Path) -> None:
    path = run("a")
    ended(path, learner=(3, False))
    (path / SUMMARY_FILE).write_text("{}")
    assert standing(path).state is RunStatus.ENDED


def test_who_only_looks_keeps_no_process_from_its_file(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, waited = run("a"), list[float]()
    monkeypatch.setattr(time, "sleep", waited.append)
    for _ in range(5):
        with process(path, "x") as end:
            standing(path)
            end(0, True)
    assert waited == []


def test_a_new_start_forgets_how_the_last_one_ended(runs: Path) -> None:
    path = run("a")
    ended(path, compile_farm=(1, False))
    assert standing(path).state is RunStatus.CRASHED
    run("a")
    assert list((path / PROCESSES).iterdir()) == []


def test_a_failed_start_never_becomes_latest(runs: Path) -> None:
    good = run("good")
    answered(good)
    ended(good, learner=(0, True))
    failed = run("failed")
    assert latest(runs) == failed.resolve(), "while it starts, it is what one wants to see"
    ended(failed, learner=(2, False))
    assert latest(runs) == good.resolve()
    settle_latest(failed)
    assert os.readlink(runs / "latest") == "good"


def test_where_only_a_start_has_failed_there_is_no_latest_run(runs: Path) -> None:
    failed = run("failed")
    ended(failed, learner=(2, False))
    settle_latest(failed)
    assert latest(runs) is None
    assert not (runs / "latest").is_symlink()


def test_a_run_that_crashed_later_stays_the_latest(runs: Path) -> None:
    run("good")
    crashed = run("crashed")
    answered(crashed)
    ended(crashed, learner=(2, False))
    settle_latest(crashed)
    assert latest(runs) == crashed.resolve()


def test_runs_are_listed_by_their_last_start(runs: Path) -> None:
    for name in ("a", "b", "a"):
        run(name)
    assert [path.name for path in runs_in(runs)] == ["a", "b"]
