"""Several workers over one list: rows as they come, and what a file has already is not done again.

::

    tasks ─▶ one at a time to whichever worker is free ─▶ row ─▶ a line of `out`, at once      (killed: these are kept)
                 └─ a worker that dies, or is silent for `patience_s`: a row with state `host`, and another worker

Workers end with whoever asks them, however that ends.

Of several rows with one name the last counts; `again` names states whose rows do not count.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.harness import Result

Work = Callable[[Any], Result]
Start = Callable[[int, int], AbstractContextManager[Work]]
"""Given a worker's number and how many there are: in its process, what does a task. It has to be importable."""
_BEGIN_S = 120.0
_LOST = {"state": "host", **dict.fromkeys(("message", "why"), "its process died or was silent")}


class CrewTask(NamedTuple):
    name: str
    given: Any


class Crew(NamedTuple):
    """How a list is worked through. One worker: in this process, without patience, unless it `is_apart`."""

    jobs: int = 1
    seconds: float = 3600.0
    """After which no further task is begun."""
    patience_s: float = 300.0
    out: Path | None = None
    again: Collection[str] = ()
    is_together: bool = False
    """The first task is begun when every worker is ready."""
    is_apart: bool = False
    """One worker is a process as well."""

    def run(self, tasks: Sequence[CrewTask], start: Start) -> Iterator[Result]:
        """Rows that count: those of before, then new ones as they come. A row has `name` and `state`."""
        known = rows_of(self.out) if self.out is not None else {}
        kept = {task.name: known[task.name] for task in tasks if task.name in known}
        kept = {name: row for name, row in kept.items() if row["state"] not in self.again}
        yield from kept.values()
        left = [task for task in tasks if task.name not in kept]
        with (self.out or Path(os.devnull)).open("ab", buffering=0) as lines:
            lines.write(b"\n" if known else b"")  # behind a line that was cut off
            for row in self._alone(left, start) if self.jobs == 1 and not self.is_apart else self._several(left, start):
                lines.write(msgspec.json.encode(row) + b"\n")
                yield row

    def _alone(self, tasks: Sequence[CrewTask], start: Start) -> Iterator[Result]:
        until = time.monotonic() + self.seconds
        if not tasks:
            return
        with start(0, 1) as work:
            for task in tasks:
                if time.monotonic() < until:
                    yield {"name": task.name, **work(task.given)}

    def _several(self, tasks: Sequence[CrewTask], start: Start) -> Iterator[Result]:
        left: queue.SimpleQueue[CrewTask] = queue.SimpleQueue()
        done: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
        for task in tasks:
            left.put(task)
        jobs = min(self.jobs, len(tasks))
        ready = threading.Barrier(jobs) if jobs else None
        begun = time.monotonic()
        keepers = [
            threading.Thread(target=self._keep, args=(number, start, begun, ready, left, done), daemon=True)
            for number in range(jobs)
        ]
        for keeper in keepers:
            keeper.start()
        for _ in keepers:
            while (row := done.get()) is not None:
                yield row

    def _keep(
        self,
        number: int,
        start: Start,
        begun: float,
        ready: threading.Barrier | None,
        left: queue.SimpleQueue[CrewTask],
        done: queue.SimpleQueue[Result | None],
    ) -> None:
        """One worker, and the next one where it is gone; None to `done` at the end."""
        worker = None
        try:
            while time.monotonic() - begun < self.seconds:
                if worker is None:
                    worker = _Worker(number, self.jobs, start)
                    if self.is_together and ready is not None:
                        with contextlib.suppress(threading.BrokenBarrierError):
                            ready.wait(_BEGIN_S)
                        ready = None
                    continue
                task = left.get_nowait()
                row = worker.ask(task.given, self.patience_s)
                if row is None:
                    worker.close()
                    worker, row = None, _LOST
                done.put({"name": task.name, **row})
        except queue.Empty:
            pass
        finally:
            if worker is not None:
                worker.close()
            done.put(None)


class _Worker:
    """A process, ready for its first task."""

    def __init__(self, number: int, jobs: int, start: Start) -> None:
        context = mp.get_context("spawn")
        self._channel, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, number, jobs, start))
        self._process.start()
        theirs.close()
        self._receive(_BEGIN_S)

    def ask(self, given: Any, patience_s: float) -> Result | None:
        """None where it is gone."""
        try:
            self._channel.send(given)
        except OSError:
            return None
        return self._receive(patience_s)

    def _receive(self, patience_s: float) -> Result | None:
        try:
            return self._channel.recv() if self._channel.poll(patience_s) else None
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        self._channel.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(channel: Connection, number: int, jobs: int, start: Start) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with start(number, jobs) as work, contextlib.suppress(EOFError, BrokenPipeError):
        channel.send({})
        while True:
            channel.send(work(channel.recv()))


def _end_with_parent() -> None:
    """Where that is killed, what a worker had begun would go on for minutes, and hold the GPU."""
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def rows_of(path: Path) -> dict[str, Result]:
    """The last row of each name; a last line that was cut off is none."""
    found: dict[str, Result] = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError, KeyError):
            row = json.loads(line)
            found[row["name"]] = row
    return found
