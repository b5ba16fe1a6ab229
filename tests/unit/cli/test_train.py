"""`kbrl train` from the first line to the exit code, with stand-ins for the services."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from kbrl_async.runs import summary
from kbrl_async.runs.config import SERVICES
from kbrl_async.runs.summary import RunCounters
from kbrl_async.runs.telemetry.by_version import Answers

ROOT = Path(__file__).parents[3]
WAITS = "import time; print('ready', flush=True); time.sleep(300)"
COUNTERS = RunCounters(
    groups_admitted=1, groups_trained=1, groups_filtered=0, groups_dropped_stale=0, groups_failed=0, rollouts=8,
    updates=7, max_staleness=1,
)  # fmt: skip


def stand_ins(folder: Path, **programs: str) -> None:
    """A `services` package in the working folder comes before the real one."""
    package = folder / "services"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name in SERVICES:
        (package / f"{name}.py").write_text(programs.get(name, WAITS))


def ends_with_a_summary(folder: Path) -> str:
    summary.write(folder / "made.json", summary.build(counters=COUNTERS, answers=Answers(), wall_s=60.0, busy={}))
    return "import os, shutil; shutil.copy('made.json', os.environ['KBRL_RUN_DIR'] + '/summary.json')"


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kbrl_async", "train", "compile_farm.store_max_bytes=1", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def test_a_run_ends_with_its_table_and_zero(folder: Path) -> None:
    stand_ins(folder, reward_aggregator=ends_with_a_summary(folder))
    out, err = (process := start("name=x")).communicate(timeout=110)
    assert (process.returncode, err) == (0, "")
    assert "starting runs/x" in out
    assert "7 in 60 s" in out
    assert "everything is in runs/x" in out


def test_a_service_that_gives_up_ends_the_run_with_its_code(folder: Path) -> None:
    stand_ins(folder, learner="import sys; sys.exit(4)")
    _, err = (process := start()).communicate(timeout=110)
    assert process.returncode == 4
    assert err.startswith("error: learner ended with exit code 4 before the run did. Read its last lines")
    assert err.count("\n") == 1


def test_what_a_service_says_before_it_gives_up_is_the_last_line(folder: Path) -> None:
    program = "import sys; print('error: no checkpoint can be read. Delete the folder', file=sys.stderr); sys.exit(2)"
    stand_ins(folder, learner=program)
    _, err = (process := start()).communicate(timeout=110)
    assert process.returncode == 2
    assert err == "error: learner gave up: no checkpoint can be read. Delete the folder\n"


def test_a_run_without_a_summary_has_not_succeeded(folder: Path) -> None:
    stand_ins(folder, reward_aggregator="")
    _, err = (process := start()).communicate(timeout=110)
    assert process.returncode == 4
    assert "reward_aggregator ended with exit code 0 before the run did" in err


def test_a_stopped_run_is_continued_by_the_same_command(folder: Path) -> None:
    stand_ins(folder)
    process = start()
    assert process.stdout is not None
    while "ready" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 130
    assert "stopping all processes" in out
    assert "stopped; continue with 'kbrl train resume=runs/default'" in err

    (folder / "services/reward_aggregator.py").write_text(ends_with_a_summary(folder))
    out, _ = (again := start()).communicate(timeout=110)
    assert again.returncode == 0
    assert "continuing runs/default" in out
