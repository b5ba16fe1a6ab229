"""What a service keeps: others may read it meanwhile, nobody else writes it, the past is bounded."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kbrl_async.errors import AddressTaken, HostError
from kbrl_async.serving import journal
from kbrl_async.serving.documents import Ask, Job, Outcome
from kbrl_async.serving.journal import FILE, JobJournal, read_jobs


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[JobJournal]:
    with contextlib.closing(JobJournal(tmp_path / FILE, keep=3)) as found:
        yield found


def job(number: int, outcome: Outcome | None = None) -> Job:
    return Job(f"job{number}", "me", Ask("x" * 3000), float(number), outcome=outcome)


def test_others_read_it_while_it_is_written_and_nobody_else_writes_it(kept: JobJournal) -> None:
    kept.put(job(1))
    assert [found.id for found in read_jobs(kept.path)] == ["job1"]
    with pytest.raises(AddressTaken, match="in use by another service"):
        JobJournal(kept.path, keep=3)


def test_a_checkpoint_takes_the_log_over_and_keeps_nobody_from_writing(kept: JobJournal) -> None:
    log = Path(f"{kept.path}-wal")
    for number in range(40):
        kept.put(job(number))
    grown = log.stat().st_size
    kept.checkpoint()
    for number in range(40, 80):
        kept.put(job(number))
    assert grown > 40 * 3000
    assert log.stat().st_size == grown  # its beginning is written again
    assert len(list(read_jobs(kept.path))) == 80


def test_nothing_but_a_checkpoint_waits_for_the_disk(kept: JobJournal) -> None:
    """SQLite's own way would flush the log after a thousand pages, in the event loop."""
    for number in range(700):
        kept.put(job(number))
    assert Path(f"{kept.path}-wal").stat().st_size > 1500 * 4096


def test_a_checkpoint_that_fails_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sick(sqlite3.Connection):
        is_sick = True

        def execute(self, statement: str, *given: Any) -> sqlite3.Cursor:
            if self.is_sick and "wal_checkpoint" in statement:
                raise sqlite3.OperationalError("disk I/O error")
            return super().execute(statement, *given)

    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Sick))
    with contextlib.closing(JobJournal(tmp_path / "jobs.sqlite", keep=3)) as kept:
        kept.put(job(1))
        with pytest.raises(HostError):
            kept.checkpoint()
        Sick.is_sick = False
        kept.checkpoint()
        assert kept.get("job1") is not None


def test_of_what_ended_the_newest_stay_with_their_names(kept: JobJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "FORGET_EVERY", 1)
    kept.put(job(0))
    for number in range(1, 6):
        kept.put(job(number, Outcome(owner="host")))
        kept.name(f"name{number}", f"job{number}")
    kept.put(job(6, Outcome(owner="host")))
    assert [found.id for found in read_jobs(kept.path)] == ["job0", "job4", "job5", "job6"]
    assert [kept.named(f"name{number}") for number in range(1, 6)] == ["", "", "", "job4", "job5"]
