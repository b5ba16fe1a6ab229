"""The bench's handler: judges one candidate after the other in a thread of its own.

Its device may be others' too. Other benches and verifiers take turns with it (`DeviceTurns`); samplers and learners
stand still while it times (`QuietWindows`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kbrl_async.errors import InfraError, ProblemError
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.funnel import Judge
from kbrl_async.kernels.sandbox import Isolation
from kbrl_async.kernels.timing.device import timed_device
from kbrl_async.kernels.timing.peaks import peaks_of
from kbrl_async.runs.telemetry.logs import bound
from protocols.messages import Stage, Task
from protocols.records import BenchReport, Fault, Purpose, RolloutRequest
from protocols.rollout import Record
from services.runtime.service import Service
from services.runtime.worker import HandlerOutcome, Worker
from services.timing_bench.place import Place


class Benching:
    """One bench, or a verifier: a bench without its clock. To be entered before the first task."""

    def __init__(self, service: Service, place: Place, worker: Worker) -> None:
        config, settings = service.config, service.config.timing_bench
        self._service, self._place, self._worker = service, place, worker
        self._store = ArtifactStore(service.artifacts, config.compile_farm.store_max_bytes)
        self._windows = worker.quiet_windows(place.resource) if place.asks_for_quiet else None
        self._judge = Judge(
            self._store,
            place.options(service),
            backend=config.backend,
            sanitize_share=0.0 if place.is_verifier and settings.timed else settings.sanitize_share,
            baselines=[] if place.is_verifier else settings.baselines,
            quiet=self._quiet,
            probe=lambda: peaks_of(place.device, place.cache, place.hardware, again=True),
        )
        self._thread = ThreadPoolExecutor(1)
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Benching:
        device, mode = timed_device(self._place.device), self._service.config.timing_bench.clocks
        with contextlib.ExitStack() as opening:
            if not self._place.is_verifier:
                opening.enter_context(device.held_clocks(mode, self._service.run_dir / "locks"))
            opening.enter_context(self._judge)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def isolation(self) -> Isolation:
        """What confines candidates on this host; known once entered."""
        return self._judge.zygote.isolation

    async def fetch(self, frames: list[bytes]) -> None:
        """The farms are on other hosts: their artifacts come by hash from the broker."""
        build = Record.decode(frames).build
        assert build is not None
        for address in set(build.artifacts.values()):
            if self._store.path(address) is None:
                self._store.put(await self._worker.transfers.fetch(address))

    async def bench(self, task: Task, frames: list[bytes]) -> HandlerOutcome:
        record = Record.decode(frames)
        report = await asyncio.get_running_loop().run_in_executor(self._thread, self._judged, record)
        report = msgspec.structs.replace(report, worker_id=self._service.worker_id)
        with bound(task_id=task.task_id, group_id=task.group_id):
            speedup = None if report.timing is None else round(report.timing.speedup, 3)
            self._service.log.debug("judged", fault=report.verdict.fault, speedup=speedup)
        is_right = report.verdict.fault is Fault.OK
        is_next = self._place.is_verifier and is_right and self._is_timed(record.request)
        return HandlerOutcome(Stage.BENCH if is_next else Stage.SCORE, [msgspec.msgpack.encode(report)])

    def _judged(self, record: Record) -> BenchReport:
        """In the thread. What verifiers reported is not reported again."""
        request, verified, is_verifier = record.request, record.bench, self._place.is_verifier
        assert record.candidate is not None
        assert record.build is not None
        turns = self._place.turns
        try:
            with contextlib.nullcontext() if turns is None else turns.working():
                report = self._judge.judge(
                    request.problem,
                    record.candidate,
                    record.build,
                    timing=self._is_timed(request) and not is_verifier,
                    strictness=request.strictness,
                    tick=self._tick,
                    alive=self._worker.progress,
                    profile=self._service.config.turns.profile and not is_verifier,
                    verified=verified,
                    group=request.group_id if request.purpose is Purpose.TRAIN else "",
                )
        except ProblemError as error:
            raise InfraError(str(error)) from error
        known = () if verified is None else tuple(stage.name for stage in verified.stages)
        return msgspec.structs.replace(report, stages=tuple(s for s in report.stages if s.name not in known))

    def _is_timed(self, request: RolloutRequest) -> bool:
        return self._service.config.timing_bench.timed and request.timed

    def _tick(self) -> None:
        """Other benches of this device may be timing."""
        if self._place.turns is not None:
            self._place.turns.breathe()
        self._worker.breathe()

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        with contextlib.ExitStack() as alone:
            if self._place.turns is not None:
                alone.enter_context(self._place.turns.alone())
            if self._windows is not None:
                alone.enter_context(self._windows.insist(2 * self._service.config.timing_bench.cap_s + 1.0))
            yield
