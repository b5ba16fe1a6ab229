"""Workers over a list: rows are kept, and a worker that dies costs one task."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Result
from benchmarks.harness.crew import Crew, CrewTask, Work, rows_of

TASKS = [CrewTask(name, name) for name in ("one", "dies", "two", "three")]


@contextlib.contextmanager
def start(number: int, jobs: int) -> Iterator[Work]:
    def work(given: str) -> Result:
        if given == "dies" and jobs > 1:
            os._exit(1)
        if given.startswith("/"):
            Path(given).write_text(str(os.getpid()))
            time.sleep(600)
        return {"state": "ok", "worker": number}

    yield work


def test_what_a_file_has_is_not_done_again_unless_it_is_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text('{"name": "one", "state": "before"}\n{"name": "two", "state": "host"}\n{"name": "thr')
    found = {row["name"]: row["state"] for row in Crew(out=out, again=("host",)).run(TASKS, start)}
    assert found == {"one": "before", "dies": "ok", "two": "ok", "three": "ok"}
    assert {name: row["state"] for name, row in rows_of(out).items()} == found
    assert not [row for row in Crew(out=out, seconds=0).run(TASKS, start) if row["name"] not in found]


def test_a_worker_that_dies_costs_one_task(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    found = {row["name"]: row["state"] for row in Crew(2, out=out, is_together=True).run(TASKS, start)}
    assert found == {"one": "ok", "dies": "host", "two": "ok", "three": "ok"}
    assert rows_of(out).keys() == found.keys()


def test_one_worker_may_be_apart_and_a_silent_one_costs_one_task(tmp_path: Path) -> None:
    tasks = [CrewTask("silent", str(tmp_path / "pid")), CrewTask("one", "one")]
    found = {row["name"]: row["state"] for row in Crew(patience_s=1.0, is_apart=True).run(tasks, start)}
    assert found == {"silent": "host", "one": "ok"}


def ask_for_ever(place: str) -> None:
    list(Crew(2).run([CrewTask("for ever", place), CrewTask("one", "one")], start))


def test_workers_end_with_whoever_asked_them(tmp_path: Path) -> None:
    """They went on for minutes behind a benchmark that was killed, and tests after it found no memory on the GPU."""
    place = tmp_path / "pid"
    asking = mp.get_context("spawn").Process(target=ask_for_ever, args=(str(place),))
    asking.start()
    until = time.monotonic() + 60.0
    while not (place.is_file() and place.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    asking.kill()
    asking.join()
    worker = Path("/proc") / place.read_text()
    while worker.exists() and "State:\tZ" not in (worker / "status").read_text() and time.monotonic() < until:
        time.sleep(0.05)
    assert not worker.exists() or "State:\tZ" in (worker / "status").read_text()
