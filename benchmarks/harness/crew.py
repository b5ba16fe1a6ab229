"""Several workers over one list: rows as they come, and what a file has already is not done again.

::

    tasks ─▶ one at a time to whichever worker is free ─▶ row ─▶ a line of `out`, at once      (killed: these are kept)
                 └─ a worker that dies, or is silent for `patience_s`: a row with state `host`, and another worker

Workers end with whoever asks them, however that ends.

Of several rows with one name the last counts; `again` names states whose rows do not count.

Two crews work through one list with a `Flight` between them: so many tasks are under way at once, and what the first
has done waits for the second.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import queue
import threading
import time
from collections import deque
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


Take = Callable[[int], CrewTask | None]
"""Given a worker's number: its next task, for which it may wait; None: there is none any more."""


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

    def run(self, tasks: Sequence[CrewTask], start: Start, take: Take | None = None) -> Iterator[Result]:
        """Rows that count: those of before, then new ones as they come. A row has `name` and `state`.

        `take`: which of the tasks comes when; those that are known are left out of it by whoever gives it.
        """
        kept = self.known(tasks)
        yield from kept.values()
        left = [task for task in tasks if task.name not in kept]
        if not left:
            return
        take = take or _in_turn(left)
        with (self.out or Path(os.devnull)).open("ab", buffering=0) as lines:
            lines.write(b"\n" if lines.tell() else b"")  # behind a line that was cut off
            jobs, is_alone = min(self.jobs, len(left)), self.jobs == 1 and not self.is_apart
            for row in self._alone(take, start) if is_alone else self._several(jobs, take, start):
                lines.write(msgspec.json.encode(row) + b"\n")
                yield row

    def known(self, tasks: Sequence[CrewTask]) -> dict[str, Result]:
        """Rows of before that count."""
        known = rows_of(self.out) if self.out is not None else {}
        kept = {task.name: known[task.name] for task in tasks if task.name in known}
        return {name: row for name, row in kept.items() if row["state"] not in self.again}

    def _alone(self, take: Take, start: Start) -> Iterator[Result]:
        until = time.monotonic() + self.seconds
        with start(0, 1) as work:
            while time.monotonic() < until and (task := take(0)) is not None:
                yield {"name": task.name, **work(task.given)}

    def _several(self, jobs: int, take: Take, start: Start) -> Iterator[Result]:
        done: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
        ready: threading.Barrier | None = threading.Barrier(jobs)
        begun = time.monotonic()
        keepers = [
            threading.Thread(target=self._keep, args=(number, start, begun, ready, take, done), daemon=True)
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
        take: Take,
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
                task = take(number)
                if task is None:
                    break
                row = worker.ask(task.given, self.patience_s)
                if row is None:
                    worker.close()
                    worker, row = None, _LOST
                done.put({"name": task.name, **row})
        finally:
            if worker is not None:
                worker.close()
            done.put(None)


def _in_turn(tasks: Sequence[CrewTask]) -> Take:
    left: queue.SimpleQueue[CrewTask] = queue.SimpleQueue()
    for task in tasks:
        left.put(task)

    def take(_number: int) -> CrewTask | None:
        with contextlib.suppress(queue.Empty):
            return left.get_nowait()
        return None

    return take


class Flight:
    """So many of the tasks at once are between their beginning and their end::

        begin ─▶ a worker of the first crew ─▶ done ─▶ take ─▶ a worker of the second ─▶ landed

    A worker of the second crew gets one of the group that it had last, else of one that none of the others had, else
    the one that waits longest. Nothing begins before the second crew is there.
    """

    def __init__(self, tasks: Sequence[CrewTask], most: int, group: Callable[[CrewTask], bytes]) -> None:
        self._left, self._room, self._group = deque(tasks), most, group
        self._waiting: list[CrewTask] = []
        self._last: dict[int, bytes] = {}
        self.begun: dict[str, float] = {}
        """When each was, by the clock of the host."""
        self._changed = threading.Condition()
        self._is_open = self._is_closed = False

    def begin(self, _number: int) -> CrewTask | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._is_open and (self._room or not self._left)))
            if self._is_closed or not self._left:
                return None
            self._room -= 1
            task = self._left.popleft()
            self.begun[task.name] = time.time()
            return task

    def done(self, task: CrewTask) -> None:
        """By the first crew."""
        with self._changed:
            self._waiting.append(task)
            self._changed.notify_all()

    def take(self, number: int) -> CrewTask | None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return None
            last, others = self._last.get(number), self._last.values()
            task = min(self._waiting, key=lambda one: (self._group(one) != last, self._group(one) in others))
            self._waiting.remove(task)
            self._last[number] = self._group(task)
            return task

    def landed(self) -> None:
        """The second crew has done with one."""
        with self._changed:
            self._room += 1
            self._changed.notify_all()

    def close(self) -> None:
        """None begins any more; what waits is taken still."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


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
