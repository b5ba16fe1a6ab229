"""Who does the work of a service: verifiers of this process, or the farms and benches of a broker.

::

    OwnVerifiers      Ask ─▶ AsyncVerifier (threads, warm processes) ─▶ Outcome
    OverBroker        Ask ─▶ compile ─▶ farm ─▶ bench ─▶ score ─▶ Outcome        (the queues and messages of a run)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kbrl_async.errors import InfraError, UserError
from kbrl_async.kernels.funnel.reading import Reading, read_candidate
from kbrl_async.kernels.funnel.records import result_of
from kbrl_async.kernels.funnel.verifier import choose_device, shapes_for
from kbrl_async.kernels.problems import load_problems, parse_problem
from kbrl_async.kernels.problems.finding import choose
from kbrl_async.kernels.problems.precision import in_precision
from kbrl_async.rollouts.scoring import received
from kbrl_async.serving.documents import Ask, Job, Outcome, as_classes
from protocols.messages import Stage, Task
from protocols.records import Fault, Generation, Problem, Purpose, RolloutRequest, SamplingParams
from protocols.rollout import Record
from services.runtime.worker import HandlerOutcome as TaskOutcome

if TYPE_CHECKING:
    from kbrl_async.kernels.funnel import AsyncVerifier
    from services.runtime.producer import Producer

IN_FLIGHT = 64
"""Jobs at a broker: its benches are busy with fewer, and what is not there yet is still given out fairly."""


class ServedProblems:
    """The problems that a service knows by id, in the sizes of both kinds of device; nothing else is opened."""

    def __init__(self, source: str, device: str | None) -> None:
        self._source, self._device = source, device
        self._listed: dict[str, list[Problem]] = {}

    def listed(self, shapes: str = "cpu") -> list[Problem]:
        if shapes not in self._listed:
            self._listed[shapes] = load_problems(self._source, shapes=shapes)
        return self._listed[shapes]

    def find(self, ask: Ask, backend: str) -> Problem:
        """:raises UserError: there is no such problem; `ProblemError`: the reference breaks the contract."""
        shapes = shapes_for(choose_device(backend, self._device))
        if ask.reference:
            found = parse_problem(ask.reference, f"L0/{ask.about[:12]}", shapes=shapes)
        else:
            found = choose(ask.problem, self.listed(shapes))
        return in_precision(found, ask.precision)


class OwnVerifiers:
    """All in this process."""

    def __init__(self, verifier: AsyncVerifier, problems: ServedProblems, *, timing: bool = True) -> None:
        self.capacity = verifier.workers
        self._verifier, self._problems, self._timing = verifier, problems, timing

    async def verify(self, job: Job) -> Outcome:
        ask = as_classes(job.ask)
        reading, problem = await asyncio.to_thread(_read, ask, self._problems)
        timing = ask.timing and self._timing
        return Outcome(await self._verifier.verify(problem, reading, ask.backend or None, timing=timing))


def _read(ask: Ask, problems: ServedProblems) -> tuple[Reading, Problem]:
    reading = read_candidate(ask.candidate, ask.backend or None, response=ask.response)
    return reading, problems.find(ask, reading.candidate.backend if reading.candidate else ask.backend)


class OverBroker:
    """`handle` is the handler of a worker at the stage `score`, where whatever has become of a job comes."""

    def __init__(self, producer: Producer, problems: ServedProblems, device: str = "", *, timing: bool = True) -> None:
        self.capacity = IN_FLIGHT
        self._producer, self._problems, self._device, self._timing = producer, problems, device, timing
        self._waiting: dict[str, asyncio.Future[Record]] = {}

    async def verify(self, job: Job) -> Outcome:
        record = await asyncio.to_thread(self._record, job)
        if record.candidate is None:
            return Outcome(result_of(record, self._device))
        task_id = f"{job.id}.{job.tries}"
        future = self._waiting[task_id] = asyncio.get_running_loop().create_future()
        try:
            await self._producer.submit(task_id, Stage.COMPILE, record.encode(), task_id, -1, record.request.backend)
            found = await future
        finally:
            del self._waiting[task_id]
        await self._producer.retire(task_id)
        if not found.is_scorable:
            raise InfraError(f"no worker could do it: {found.lost_because}", "See 'kbrl top' and the logs of the run")
        return Outcome(result_of(found, self._device))

    async def handle(self, task: Task, frames: list[bytes]) -> TaskOutcome:
        """One that nobody waits for is of a process before this one: its job is asked for again."""
        future = self._waiting.get(task.task_id)
        if future is not None and not future.done():
            future.set_result(received(frames, task.status))
        return TaskOutcome()

    def lost(self, working: asyncio.Task[None]) -> None:
        """The worker has ended: whatever waits for it is told, and tried again."""
        error = None if working.cancelled() else working.exception()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(InfraError(f"the way to the broker is lost: {error}", "It is tried again"))

    def _record(self, job: Job) -> Record:
        ask = as_classes(job.ask)
        reading = read_candidate(ask.candidate, ask.backend or None, response=ask.response)
        candidate = reading.candidate
        backend = candidate.backend if candidate else ask.backend
        problem, now = self._problems.find(ask, backend), time.time()
        timed = ask.timing and self._timing
        request = RolloutRequest(  # no training: whoever asks for a verdict is told of all secret sets
            job.id, job.id, problem, "", backend, SamplingParams(0), Purpose.EVAL, admitted_at=now, timed=timed
        )
        fault = Fault.FORMAT_ERROR if candidate is None else Fault.OK
        said = Generation(-1, [], [], [], "", "stop", candidate, fault, reading.problem, "", now, now)
        return Record.of(request, said)


def known_backends() -> Mapping[str, frozenset[str]]:
    """Those that a request may name, and the devices that each runs on."""
    from kbrl_async.kernels.backends import backend, backends

    return {name: frozenset(backend(name).runs_on) for name in backends()}


def check_backend(ask: Ask, known: Mapping[str, frozenset[str]]) -> None:
    """:raises UserError: no such backend of ours."""
    if ask.backend and ask.backend not in known:
        raise UserError(f"there is no backend {ask.backend!r}", f"Choose among {', '.join(known)}")
