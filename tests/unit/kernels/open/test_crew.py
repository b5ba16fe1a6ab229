"""Workers over a list: rows are kept, and a worker that dies costs one task."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Result
from benchmarks.harness.crew import Crew, CrewTask, Flight, Work, rows_of

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


@contextlib.contextmanager
def slow(number: int, jobs: int) -> Iterator[Work]:
    def work(given: str) -> Result:
        time.sleep(0.05)
        return {"state": "ok", "worker": number}

    yield work


def test_so_many_at_once_are_between_two_crews_and_none_is_left_behind() -> None:
    tasks = [CrewTask(f"{group}{number}", group) for group in "abc" for number in range(4)]
    flight, most, under_way = Flight(tasks, 3, lambda task: str(task.given).encode()), 0, 0

    def first() -> None:
        for row in Crew(2).run(tasks, start, flight.begin):
            flight.done(CrewTask(row["name"], row["name"][0]))
        flight.close()

    thread = threading.Thread(target=first)
    thread.start()
    landed: list[str] = []
    for row in Crew(1).run(tasks, slow, flight.take):
        landed.append(row["name"])
        under_way = len(flight.begun) - len(landed)
        most = max(most, under_way)
        flight.landed()
    thread.join()
    assert sorted(landed) == sorted(task.name for task in tasks)
    assert most == 2, "three, of which one has landed"


def test_a_worker_gets_more_of_what_it_had_then_what_no_other_had() -> None:
    tasks = {name: CrewTask(name, None) for name in ("a1", "a2", "b1", "b2", "c1")}
    flight = Flight([], 9, lambda task: task.name[:1].encode())
    for name in ("a1", "a2", "b1"):
        flight.done(tasks[name])
    assert [flight.take(0), flight.take(1), flight.take(0)] == [tasks["a1"], tasks["b1"], tasks["a2"]]
    for name in ("b2", "c1"):
        flight.done(tasks[name])
    flight.close()
    assert [flight.take(0), flight.take(0), flight.take(0)] == [tasks["c1"], tasks["b2"], None]
    assert flight.begin(0) is None
