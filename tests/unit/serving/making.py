"""Questions, results and a service without processes, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

pytest.importorskip("starlette", reason="the extra kbrl-async[serve] is not installed")

from kbrl_async.kernels.funnel.result import Result
from kbrl_async.serving.documents import Job, Outcome
from kbrl_async.serving.journal import FILE, JobJournal
from kbrl_async.serving.settings import Keys, Serve
from protocols.records import REPLAYED, Fault, StageReport, Timing, Verdict
from services.verification.app import Face
from services.verification.desk import Desk
from tests.suite import suite

STEPS = ("format", "static", "compile", "small_inputs", "full_inputs", "timing")
TWICE = Timing(9, 2.1, 2.0, 2.2, 1.0, 2.1)


def result(fault: Fault = Fault.OK) -> Result:
    steps = STEPS if fault is Fault.OK else STEPS[:-1]
    stages = tuple(StageReport(name, fault if name == steps[-1] else Fault.OK, 0.1) for name in steps)
    passed, timing = (10, TWICE) if fault is Fault.OK else (5, None)
    return Result("L1/13_softmax", "c", "cpu", Verdict(fault, passed, 10, "why", trust=REPLAYED), stages, timing)


class Fake:
    """An executor whose answers are said by the test."""

    def __init__(self, does: Callable[[Job], Awaitable[Outcome]] | None = None, capacity: int = 1) -> None:
        self.capacity, self._does = capacity, does
        self.asked: list[Job] = []

    async def verify(self, job: Job) -> Outcome:
        self.asked.append(job)
        return await self._does(job) if self._does else Outcome(result())


@contextlib.asynccontextmanager
async def service(
    folder: Path, fake: Fake, settings: Serve | None = None, keys: Keys | None = None, pages: int = 0
) -> AsyncIterator[tuple[httpx.AsyncClient, Desk]]:
    settings = settings or Serve(wait_s=60)
    with contextlib.closing(JobJournal(folder / FILE, settings.keep, pages)) as journal:
        desk = Desk(fake, journal, settings)
        backends = {"c": frozenset({"cpu"})}
        face = Face(desk, settings, keys, lambda: PROBLEMS, backends, {"devices": {"cpu": "a chip"}})
        working = asyncio.create_task(desk.run())
        transport = httpx.ASGITransport(face.app)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8470", timeout=60) as client:
                yield client, desk
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


PROBLEMS = list(suite())
ASK = {"candidate": "class ModelNew: ...", "problem": "L1/13"}


def ask(number: int = 0, **more: object) -> dict[str, object]:
    """A question that differs from others by its number."""
    return {**ASK, "candidate": f"class ModelNew: ...  # {number}", **more}


def outcome(fault: Fault) -> Outcome:
    return Outcome(result(fault))
