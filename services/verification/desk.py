"""The desk of the service: takes questions, has as many worked on at once as its executor can, tells who waits.

::

    submit ─▶ known? ─▶ journal ─▶ FairQueue ─▶ a task each ─▶ executor.verify ─▶ journal ─▶ whoever waits
                 └─▶ the same job

Invariants
* A question is one job however often it comes; a job ends once. Only a fault of the host is tried again, here up to
  `TRIES` times, and by whoever asks again later.
* Whoever goes away takes nothing along: a job that was accepted is worked on, and its answer is kept.
* A problem that failed is not tried again for `BAD_S`: its next candidates are answered at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Literal, Protocol

import msgspec
import structlog

from kbrl_async.errors import HostError, KbrlError, UserError
from kbrl_async.serving.documents import Ask, Job, Outcome, Trouble
from kbrl_async.serving.fairness import FairQueue
from kbrl_async.serving.journal import JobJournal
from kbrl_async.serving.settings import Serve
from services.verification.lag import Lag

TRIES = 3
AGAIN_S = 0.5
"""Before a job whose host failed is tried again; doubled each time."""
BAD_S = 600.0
BAD_MOST = 1_000
CHECKPOINT_S = 1.0
"""Between two of the journal's checkpoints, which wait for the disk: so no question does."""
log = structlog.get_logger()


class Full(KbrlError):  # noqa: N818 - reads as what it says
    """Too much waits already; come back later."""


class Executor(Protocol):
    """Who does the work: verifiers of this process, or the farms and benches of a broker."""

    capacity: int

    async def verify(self, job: Job) -> Outcome:
        """:raises KbrlError: whose fault it is, is in its class."""
        ...


class Desk:
    """`run` works until it is cancelled."""

    def __init__(
        self, executor: Executor, journal: JobJournal, settings: Serve, clock: Callable[[], float] = time.time
    ) -> None:
        self._executor, self._journal, self._settings, self._clock = executor, journal, settings, clock
        self._queue: FairQueue[Job] = FairQueue()
        self._live: dict[str, Job] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._bad: dict[str, tuple[float, Trouble]] = {}
        self._work = asyncio.Event()
        self.done = 0
        """Jobs that ended since the start."""
        self.is_full = False
        self.lag = Lag()
        for job in journal.unfinished():
            self._enqueue(job)

    # ── for the handlers ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._live) - len(self._queue)

    def submit(self, client: str, ask: Ask) -> Job:
        """The job of this question, which may have ended long ago.

        :raises Full: no more may wait.
        :raises DiskFull: it can't be journaled, so it is not accepted.
        """
        known = self._live.get(ask.id) or self._journal.get(ask.id)
        if known is not None and (known.outcome is None or known.outcome.owner != "host"):
            return known
        if len(self._queue) >= self._settings.max_waiting or self._queue.of(client) >= self._settings.max_waiting_each:
            raise Full(f"{len(self._queue)} questions wait already", "Ask again in some seconds")
        job = Job(ask.id, client, ask, self._clock())
        self._journal.put(job)
        self._enqueue(job)
        return job

    def find(self, job_id: str) -> Job | None:
        return self._live.get(job_id) or self._journal.get(job_id)

    def name(self, name: str, job: Job) -> None:
        self._journal.name(name, job.id)

    def named(self, name: str) -> Job | None:
        return self.find(self._journal.named(name))

    async def wait(self, job: Job, seconds: float) -> Job:
        """The job once it has ended, or as it stands after so long."""
        until = self._clock() + seconds
        while job.outcome is None and (left := until - self._clock()) > 0:
            event = self._changed.get(job.id)
            if event is None:
                break
            try:
                await asyncio.wait_for(event.wait(), left)
            except TimeoutError:
                break
        return job

    async def follow(self, job: Job) -> AsyncIterator[Job]:
        """The job now, and after each change until it has ended."""
        while job.outcome is None and (event := self._changed.get(job.id)) is not None:
            yield job
            await event.wait()  # set already where it ended while that was being sent
        yield job

    # ── the work ──────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._checkpoints())
            group.create_task(self.lag.watch())
            while True:
                while self.running < self._executor.capacity and (taken := self._queue.take()) is not None:
                    group.create_task(self._serve(*taken))
                self._work.clear()
                await self._work.wait()

    async def _checkpoints(self) -> None:
        while True:
            await asyncio.sleep(CHECKPOINT_S)
            try:
                await asyncio.to_thread(self._journal.checkpoint)
            except HostError as error:  # the log has everything
                log.warning("the journal's log can't be taken over yet", cause=error.cause, cure=error.cure)

    async def _serve(self, client: str, job: Job) -> None:
        began = self._clock()
        try:
            await self._do(job)
        finally:
            self._queue.ended(client, self._clock() - began)
            self._work.set()

    async def _do(self, job: Job) -> None:
        job.started_at = self._clock()
        self._tell(job)
        while True:
            job.tries += 1
            outcome = self._remembered(job) or await self._tried(job)
            if outcome.owner != "host" or job.tries >= TRIES:
                break
            await asyncio.sleep(AGAIN_S * 2 ** (job.tries - 1))
        ended = msgspec.structs.replace(job, finished_at=self._clock(), outcome=outcome)
        await self._keep(ended)
        job.finished_at, job.outcome = ended.finished_at, ended.outcome
        self.done += 1
        del self._live[job.id]
        self._tell(job)
        self._changed.pop(job.id, None)

    async def _tried(self, job: Job) -> Outcome:
        began = self._clock()
        try:
            outcome = await self._executor.verify(job)
        except KbrlError as error:
            outcome = Outcome(owner=owner_of(error), trouble=Trouble(error.cause, error.cure))
        except Exception as error:  # supervisor: one job's unforeseen end must not end the service, nor its reward be 0
            log.exception("a verification failed", job=job.id)
            outcome = Outcome(
                owner="host", trouble=Trouble(f"{type(error).__name__}: {error}", "See the service's log")
            )
        if outcome.owner == "problem" and outcome.trouble is not None:
            self._remember(job, outcome.trouble)
        return Outcome(outcome.result, outcome.owner, outcome.trouble, round(self._clock() - began, 6))

    async def _keep(self, job: Job) -> None:
        """On disk before anybody hears of it; where there is no room, it waits until there is."""
        while True:
            try:
                self._journal.put(job)
                self.is_full = False
                return
            except HostError as error:
                self.is_full = True
                log.warning("an outcome can't be written yet", cause=error.cause, cure=error.cure)
                await asyncio.sleep(AGAIN_S)

    def _enqueue(self, job: Job) -> None:
        self._live[job.id] = job
        self._changed[job.id] = asyncio.Event()
        self._queue.add(job.client, job, job.ask.priority)
        self._work.set()

    def _tell(self, job: Job) -> None:
        event = self._changed.get(job.id)
        if event is not None:
            self._changed[job.id] = asyncio.Event()
            event.set()

    def _remembered(self, job: Job) -> Outcome | None:
        until, trouble = self._bad.get(job.ask.about, (0.0, None))
        return Outcome(owner="problem", trouble=trouble) if trouble is not None and self._clock() < until else None

    def _remember(self, job: Job, trouble: Trouble) -> None:
        self._bad[job.ask.about] = (self._clock() + BAD_S, trouble)
        if len(self._bad) > BAD_MOST:
            del self._bad[next(iter(self._bad))]


def owner_of(error: KbrlError) -> Literal["problem", "host"]:
    """Whose fault it is that there is no verdict; the candidate's faults are verdicts."""
    return "problem" if isinstance(error, UserError) else "host"
