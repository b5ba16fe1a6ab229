"""Harm that is really done: to a run that is a nanny of ours with a child that only waits."""

from __future__ import annotations

import os
import random
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from kbrl_async.errors import UserError
from kbrl_async.lab.chaos.faults import FaultKind, PlannedFault
from kbrl_async.lab.chaos.injuries import BALLAST, Absent, Injuries, flip_byte, tear
from kbrl_async.lab.chaos.processes import ProcessRole, census, matching

PATIENCE_S = 60.0
Found = TypeVar("Found")
LEARNER = """
import asyncio
from services.runtime.nanny import run_service

async def main(stop):
    await stop.wait()

if __name__ == "__main__":
    run_service("learner", main)
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with one process in it, which thinks that it is `services.learner`."""
    tmp_path = tmp_path_factory.mktemp("chaos")
    package = tmp_path / "code" / "services"
    package.mkdir(parents=True)
    (package / "learner.py").write_text(LEARNER)
    (package / "__init__.py").write_text(f"__path__.append({str(Path.cwd() / 'services')!r})\n")
    run = tmp_path / "run"
    run.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": f"{package.parent}:{Path.cwd()}",
        "KBRL_RUN_DIR": str(run),
        "HONCHO_PROCESS_NAME": "learner.1",
    }
    nanny = subprocess.Popen([sys.executable, "-m", "services.learner"], env=environment, cwd=tmp_path)
    try:
        until(lambda: bool(matching(census(run), "learner")))
        yield run
    finally:
        nanny.kill()
        nanny.wait()


def until(is_true: Callable[[], Found]) -> Found:
    """What was true at last."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := is_true()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def child(run: Path) -> int:
    return until(lambda: matching(census(run), "learner"))[0].pid  # of one census: in a second it may be gone


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def injuries(run: Path) -> Injuries:
    return Injuries(run, {}, random.Random(0))


def test_the_census_tells_nanny_and_child_by_name_and_instance(run_dir: Path) -> None:
    child(run_dir)
    found = census(run_dir)
    assert [(p.role, p.service, p.instance) for p in found] == [
        (ProcessRole.CHILD, "learner", "learner.1"),
        (ProcessRole.NANNY, "learner", "learner.1"),
    ]
    assert matching(found, "learner.1") == found[:1]
    assert matching(found, "nanny:learner") == found[1:]
    assert matching(found, "run") == found
    assert matching(found, "learner.2") == []
    assert census(run_dir.parent) == [], "another run's processes are not its own"


def proc_entry(proc: Path, pid: int, parent: int, command: str, **environment: object) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (python) S {parent} 1 1")
    (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode())
    (folder / "environ").write_bytes("\0".join(f"{name}={value}" for name, value in environment.items()).encode())


def test_ranks_that_a_learner_has_started_are_told_from_it_and_from_what_else_it_starts(tmp_path: Path) -> None:
    proc, run = tmp_path / "proc", tmp_path / "run"
    command, inside = "python -m services.learner", {"KBRL_RUN_DIR": run, "KBRL_NANNY_PID": 10}
    proc_entry(proc, 10, 1, command, KBRL_RUN_DIR=run)
    proc_entry(proc, 11, 10, command, **inside, HONCHO_PROCESS_NAME="learner.1")
    proc_entry(proc, 12, 11, command, **inside, HONCHO_PROCESS_NAME="learner.rank1")
    proc_entry(proc, 13, 11, command, **inside, HONCHO_PROCESS_NAME="learner.1")
    found = census(run, proc)
    assert [(p.pid, p.role) for p in matching(found, "learner")] == [(11, ProcessRole.CHILD)]
    assert [(p.pid, p.instance) for p in matching(found, "rank")] == [(12, "learner.rank1")]


def test_a_killed_child_is_another_process_afterwards(run_dir: Path) -> None:
    before = child(run_dir)  # the tests share one run, and some kill its child
    wound = injuries(run_dir).begin(PlannedFault(FaultKind.KILL, "learner"))
    assert wound.pids == [before]
    until(lambda: child(run_dir) != before)


def test_what_is_stopped_goes_on_at_the_end(run_dir: Path) -> None:
    hands, pid = injuries(run_dir), child(run_dir)
    wound = hands.begin(PlannedFault(FaultKind.STOP, "learner", for_s=1))
    until(lambda: state(pid) == "T")
    assert not hands.is_over(wound)
    hands.end(wound)
    until(lambda: state(pid) != "T")


def test_a_stop_on_top_of_a_wedge_does_not_end_it(run_dir: Path) -> None:
    hands, pid = injuries(run_dir), child(run_dir)
    wedge = hands.begin(PlannedFault(FaultKind.WEDGE, "learner", for_s=60))
    stop = hands.begin(PlannedFault(FaultKind.STOP, "learner", for_s=1))
    assert list(stop.stopped) == [pid]
    until(lambda: state(pid) == "T")
    hands.end(stop)
    assert state(pid) == "T"
    hands.release(wedge)
    until(lambda: state(pid) != "T")


def test_a_wedge_is_not_undone_and_is_over_once_the_process_is_gone(run_dir: Path) -> None:
    hands, pid = injuries(run_dir), child(run_dir)
    wound = hands.begin(PlannedFault(FaultKind.WEDGE, "learner", for_s=1))
    until(lambda: state(pid) == "T")
    hands.end(wound)
    assert state(pid) == "T"
    os.kill(pid, 9)
    until(lambda: hands.is_over(wound))


def test_a_full_disk_is_a_limit_on_child_and_nanny_and_is_lifted_again(run_dir: Path) -> None:
    hands, _ = injuries(run_dir), child(run_dir)
    wound = hands.begin(PlannedFault(FaultKind.DISK_FULL, "learner", for_s=1))
    assert len(wound.pids) == 2
    assert {resource.prlimit(pid, resource.RLIMIT_FSIZE)[0] for pid in wound.pids} == {0}
    hands.end(wound)
    assert 0 not in {resource.prlimit(pid, resource.RLIMIT_FSIZE)[0] for pid in wound.pids}


def test_of_two_full_disks_that_overlap_the_last_to_end_gives_the_room_back(run_dir: Path) -> None:
    hands, pid = injuries(run_dir), child(run_dir)
    first, second = (hands.begin(PlannedFault(FaultKind.DISK_FULL, "learner", for_s=1)) for _ in range(2))
    assert pid in first.pids
    hands.end(first)
    assert {resource.prlimit(pid, resource.RLIMIT_FSIZE)[0] for pid in second.pids} == {0}
    hands.end(second)
    assert 0 not in {resource.prlimit(pid, resource.RLIMIT_FSIZE)[0] for pid in second.pids}


def test_a_target_that_is_not_there_is_said(run_dir: Path) -> None:
    with pytest.raises(Absent):
        injuries(run_dir).begin(PlannedFault(FaultKind.KILL, "candidate"))
    with pytest.raises(Absent):
        injuries(run_dir).begin(PlannedFault(FaultKind.CORRUPT, "artifact"))


def test_a_disk_with_much_room_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbrl_async.lab.chaos.injuries.MOST_BALLAST", 0)
    with pytest.raises(UserError, match="it is not filled"):
        injuries(tmp_path).begin(PlannedFault(FaultKind.DISK_FULL, "disk", for_s=1))
    assert not (tmp_path / BALLAST).exists()


def test_without_a_proxy_nothing_is_cut(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Let kbrl chaos start the run"):
        injuries(tmp_path).begin(PlannedFault(FaultKind.PARTITION, "learner", for_s=1))


def test_a_torn_log_has_lost_its_last_commit_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "broker.sqlite"
    script = (
        "import os, sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "db.execute('PRAGMA journal_mode=WAL'); db.execute('CREATE TABLE t (x)');"
        "[db.execute('INSERT INTO t VALUES (zeroblob(9000))') for _ in range(40)];"
        "db.execute('PRAGMA wal_checkpoint(RESTART)');"  # the log begins anew, in a file that keeps its length
        "[db.execute('INSERT INTO t VALUES (?)', (n,)) for n in (1, 2, 3)]; os._exit(0)"  # as kill -9 leaves it
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=60)
    assert tear(path.with_name("broker.sqlite-wal")) > 0
    db = sqlite3.connect(path)
    assert [x for (x,) in db.execute("SELECT x FROM t WHERE typeof(x) = 'integer'")] == [1, 2]
    db.close()
    assert tear(tmp_path / "nothing") == 0


def test_one_bit_is_flipped_and_the_file_keeps_its_size_and_times(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(1000))
    os.utime(path, (1, 2))
    place = flip_byte(path, random.Random(1))
    content = path.read_bytes()
    assert [i for i, byte in enumerate(content) if byte] == [place]
    assert content[place].bit_count() == 1
    assert (len(content), path.stat().st_mtime) == (1000, 2)
