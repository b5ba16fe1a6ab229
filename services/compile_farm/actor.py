"""The farm's handler: builds candidates in threads, and says where each goes next."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.funnel import Builder, artifact_paths
from kbrl_async.kernels.sandbox import Isolation
from kbrl_async.runs.telemetry.logs import bound
from kbrl_async.runs.value import ChanceModel, chances_of
from protocols.messages import Stage, Task
from protocols.records import BuildReport, Fault
from protocols.rollout import Record
from services.runtime.service import Service
from services.runtime.transfers import Transfers
from services.runtime.worker import HandlerOutcome

T = TypeVar("T")


class Building:
    """Compilers on `cores`, in `slots` threads. To be entered before the first task."""

    def __init__(self, service: Service, cores: Sequence[int], slots: int) -> None:
        farm = service.config.compile_farm
        self._service = service
        self._builder = Builder(ArtifactStore(service.artifacts, farm.store_max_bytes), farm, tuple(cores))
        self._threads = ThreadPoolExecutor(slots)
        self._next = Stage.VERIFY if service.config.processes.verifier else Stage.BENCH
        self._chances = _chances(service)
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Building:
        self._open.enter_context(self._builder)
        self._open.enter_context(self._threads)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def isolation(self) -> Isolation:
        """What confines compilers on this host; known once entered."""
        return self._builder.isolation

    async def build(self, task: Task, frames: list[bytes]) -> HandlerOutcome:
        record = Record.decode(frames)
        assert record.candidate is not None, "the sampler sends only answers with a candidate here"
        report = await self._beside(self._builder.build, record.candidate, record.request.problem)
        report = msgspec.structs.replace(report, worker_id=self._service.worker_id)
        if self._service.config.turns.profile and report.fault is Fault.OK:
            remarks = await self._beside(self._builder.remarks, record.candidate)
            report = msgspec.structs.replace(report, remarks=remarks)
        with bound(task_id=task.task_id, group_id=task.group_id):
            self._service.log.debug("built", fault=report.fault, cached=report.cached, by=report.toolchain)
        frames = [msgspec.msgpack.encode(report)]
        if report.fault is not Fault.OK:
            return HandlerOutcome(Stage.SCORE, frames)
        if self._chances is None:
            return HandlerOutcome(self._next, frames)
        module, kernel = record.request.problem.source, record.candidate.source
        return HandlerOutcome(self._next, frames, chance=await self._beside(self._chances.chance, module, kernel))

    async def hand_over(self, outcome: HandlerOutcome, transfers: Transfers) -> None:
        """The benches are on other hosts: they get artifacts by hash from the broker."""
        report = msgspec.msgpack.decode(outcome.frames[0], type=BuildReport)
        for path in set(artifact_paths(self._builder.store, report).values()):
            await transfers.send(await asyncio.get_running_loop().run_in_executor(None, path.read_bytes))

    async def _beside(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def _chances(service: Service) -> ChanceModel | None:
    try:
        return chances_of(service.config.timing_bench.likely_first)
    except UserError as error:  # on another host those runs are not
        service.log.warning("what is likely to be right is not predicted here", reason=str(error))
        return None
