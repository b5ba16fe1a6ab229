"""Workers over a list: rows are kept, and a worker that dies costs one task."""

from __future__ import annotations

import contextlib
import os
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
