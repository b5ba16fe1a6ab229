"""Timing bench: correctness first, then timing, one candidate at a time on a core of its own.

`python -m services.timing_bench`

::

    bench ─▶ [Bench in one thread: reference and candidate in sandboxed children] ─▶ score
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from services.runtime.nanny import run_service
from services.runtime.service import choose_run

if TYPE_CHECKING:
    from kbrl_async.kernels.verify import Bench
    from services.runtime.quiet import Gate


def stand_aside(gate: Gate, bench: Bench) -> None:
    """Where another bench times, what was started for the next candidate has to end before this one stands still."""
    if not gate.is_open:
        bench.settle()


async def main(stop: asyncio.Event) -> None:
    import contextlib
    from concurrent.futures import ThreadPoolExecutor

    import msgspec

    from kbrl_async.errors import InfraError, ProblemError
    from kbrl_async.kernels.backends.building import ArtifactStore, check_processor
    from kbrl_async.kernels.funnel import SpotChecks
    from kbrl_async.kernels.funnel.compared import Compared, ticking
    from kbrl_async.kernels.sandbox import Limits
    from kbrl_async.kernels.timing import Recipe, resolution, roofline
    from kbrl_async.kernels.timing.cpu.host import hardware_of
    from kbrl_async.kernels.timing.cuda import clocks
    from kbrl_async.kernels.verify import Bench, BenchOptions
    from kbrl_async.kernels.verify.bench import zygote_for
    from kbrl_async.runs.telemetry.logs import bound
    from protocols.messages import HARDWARE, SHARES, Stage, Task
    from protocols.prefetch import Prefetch
    from protocols.records import BenchReport
    from protocols.rollout import Record
    from services.runtime.capabilities import bench_caps, bench_device, said
    from services.runtime.quiet import shared_resources
    from services.runtime.service import Service
    from services.runtime.worker import Outcome, Worker

    service = Service.start("timing_bench")
    settings = service.config.timing_bench
    core = service.layout.bench[service.instance % len(service.layout.bench)]
    cache = resolution.cache_folder(service.config.cache_path)
    device = bench_device(settings.device, service.config.backend, service.instance)
    shares = {SHARES: shared_resources(device)[0]} if "timing_bench" in settings.shares_with else {}
    hardware = hardware_of(device)
    options = BenchOptions(
        device=device,
        memory_share=1 / service.config.processes.timing_bench if shares else 1.0,
        cores=(core,),
        limits=Limits(cores=(core,)),
        deadline_s=settings.deadline_s,
        recipe=Recipe(
            min_pairs=settings.min_pairs,
            max_pairs=settings.max_pairs,
            cap_s=settings.cap_s,
            flush_bytes=settings.flush_bytes,
            resolved=resolution.for_run(cache, service.run_dir, hardware),
        ),
    )
    store = ArtifactStore(service.artifacts, service.config.compile_farm.store_max_bytes)
    loop = asyncio.get_running_loop()

    def tick() -> None:
        """Other benches of this device may be timing."""
        if shares:
            stand_aside(worker.gate, bench)
        worker.breathe()

    def evaluate(frames: list[bytes]) -> BenchReport:
        record = Record.decode(frames)
        request, candidate, build = record.request, record.candidate, record.build
        assert candidate is not None
        assert build is not None
        check_processor(build.cpu)
        paths = {key: store.path(address) for key, address in build.artifacts.items()}
        found = {key: path for key, path in paths.items() if path is not None}
        if len(found) < len(paths):
            raise InfraError("an artifact is no longer in the store", "Raise compile_farm.store_max_bytes")
        try:
            report = bench.evaluate(request.problem, candidate, found, timing=settings.timed, tick=tick)
            with ticking(worker.progress):  # a sanitizer on a GPU takes minutes
                report = spot_checks.check(request.problem, candidate, found, report, device)
            return compared.add(request.problem, report, worker.progress)
        except ProblemError as error:
            raise InfraError(str(error)) from error

    async def fetch(_: Task, frames: list[bytes]) -> None:
        """The farms are on other hosts: their artifacts come by hash from the broker."""
        build = Record.decode(frames).build
        assert build is not None
        for address in set(build.artifacts.values()):
            if store.path(address) is None:
                store.put(await worker.transfers.fetch(address))

    async def judge(task: Task, frames: list[bytes]) -> Outcome:
        report = await loop.run_in_executor(pool, evaluate, frames)
        report = msgspec.structs.replace(report, worker_id=service.worker_id)
        with bound(task_id=task.task_id, group_id=task.group_id):
            speedup = None if report.timing is None else round(report.timing.speedup, 3)
            service.log.debug("judged", fault=report.verdict.fault, speedup=speedup)
        return Outcome(Stage.SCORE, [msgspec.msgpack.encode(report)])

    with (
        clocks.held(settings.clocks, device, service.run_dir / "locks"),
        zygote_for(device) as zygote,
        contextlib.closing(Bench(zygote, options)) as bench,
        contextlib.closing(SpotChecks(store, settings.sanitize_share)) as spot_checks,
        contextlib.closing(Compared(bench, settings.baselines)) as compared,
    ):
        pool = ThreadPoolExecutor(1)
        worker = Worker(
            service.addresses.work,
            service.worker_id,
            [Stage.BENCH],
            2,
            judge,
            concurrency=1,
            wedge_s=60.0,
            caps={**bench_caps(device), HARDWARE: hardware, **shares},
            keys=service.keys,
            prefetch=Prefetch(1),
            before=fetch if service.is_apart else None,
            differs=service.differs if service.is_apart else None,
        )
        service.watch(worker.meter)
        if settings.shares_with:
            windows = worker.quiet_windows(shared_resources(device)[0])
            bench.quiet = lambda: windows.insist(2 * settings.cap_s + 1.0)
        bench.probe = lambda: roofline.peaks_of(device, cache, hardware, again=True)
        service.log.info("ready", core=core, device=device, **said(zygote.isolation))
        await worker.run(stop)


if __name__ == "__main__":
    run_service("timing_bench", main, choose_run)
