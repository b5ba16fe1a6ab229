"""Timing bench: correctness first, then timing, one candidate at a time on a core of its own.

`python -m services.timing_bench`

::

    bench ─▶ [Bench in one thread: reference and candidate in sandboxed children] ─▶ score

Where a run has verifiers (`services.verifier`), they do all but the timing: `verify ─▶ Bench ─▶ bench | score`, and a
bench times what comes from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from services.runtime.nanny import run_service
from services.runtime.service import choose_run


async def main(stop: asyncio.Event, name: str = "timing_bench") -> None:
    import contextlib
    from concurrent.futures import ThreadPoolExecutor

    import msgspec

    from kbrl_async.errors import InfraError, ProblemError
    from kbrl_async.kernels.backends.building import ArtifactStore
    from kbrl_async.kernels.funnel import Judge
    from kbrl_async.kernels.timing import Recipe, resolution, roofline
    from kbrl_async.kernels.timing.cpu.host import hardware_of
    from kbrl_async.kernels.timing.cuda import clocks
    from kbrl_async.kernels.timing.turns import DeviceTurns
    from kbrl_async.kernels.verify import bench_options
    from kbrl_async.kernels.verify.options import ALONE_SHARE
    from kbrl_async.runs.telemetry.logs import bound
    from protocols.messages import HARDWARE, Stage, Task
    from protocols.prefetch import Prefetch
    from protocols.records import BenchReport, Fault, Purpose, RolloutRequest
    from protocols.rollout import Record
    from services.runtime.capabilities import bench_caps, bench_device, log_fields, memory_share
    from services.runtime.quiet import shared_resources
    from services.runtime.service import Service
    from services.runtime.worker import HandlerOutcome, Worker

    service = Service.start(name)
    settings, counts = service.config.timing_bench, service.config.processes
    is_verifier = name == "verifier"
    cores = service.layout.compile if is_verifier else service.layout.bench
    core = cores[service.instance % len(cores)]
    cache = resolution.cache_folder(service.config.cache_path)
    is_behind = counts.verifier > 0 and not is_verifier
    device = bench_device(settings.device, service.config.backend, service.instance, from_last=is_behind)
    resource, others = shared_resources(device)[0], set(settings.shares_with) - {"timing_bench"}
    turns = None
    if "timing_bench" in settings.shares_with or (counts.verifier and device != "cpu"):
        turns = DeviceTurns(service.run_dir / "locks" / resource.replace("/", "-"))
    hardware = hardware_of(device)
    options = bench_options(
        settings,
        device,
        (core,),
        recipe=Recipe.of(settings, resolved=resolution.for_run(cache, service.run_dir, hardware)),
        memory_share=1.0 if turns is None else memory_share(service.config, name),
        alone_share=ALONE_SHARE,
        is_light=is_behind,
    )
    store = ArtifactStore(service.artifacts, service.config.compile_farm.store_max_bytes)
    loop = asyncio.get_running_loop()

    def tick() -> None:
        """Other benches of this device may be timing."""
        if turns is not None:
            turns.breathe()
        worker.breathe()

    @contextlib.contextmanager
    def quiet() -> Iterator[None]:
        with contextlib.ExitStack() as alone:
            if turns is not None:
                alone.enter_context(turns.alone())
            if windows is not None:
                alone.enter_context(windows.insist(2 * settings.cap_s + 1.0))
            yield

    def evaluate(frames: list[bytes]) -> BenchReport:
        record = Record.decode(frames)
        request, candidate, build, verified = record.request, record.candidate, record.build, record.bench
        assert candidate is not None
        assert build is not None
        try:
            with contextlib.nullcontext() if turns is None else turns.working():
                report = judge.judge(
                    request.problem,
                    candidate,
                    build,
                    timing=is_timed(request) and not is_verifier,
                    strictness=request.strictness,
                    tick=tick,
                    alive=worker.progress,
                    profile=service.config.turns.profile and not is_verifier,
                    verified=verified,
                    group=request.group_id if request.purpose is Purpose.TRAIN else "",
                )
        except ProblemError as error:
            raise InfraError(str(error)) from error
        known = () if verified is None else tuple(stage.name for stage in verified.stages)
        return msgspec.structs.replace(report, stages=tuple(s for s in report.stages if s.name not in known))

    def is_timed(request: RolloutRequest) -> bool:
        return settings.timed and request.timed

    async def fetch(_: Task, frames: list[bytes]) -> None:
        """The farms are on other hosts: their artifacts come by hash from the broker."""
        build = Record.decode(frames).build
        assert build is not None
        for address in set(build.artifacts.values()):
            if store.path(address) is None:
                store.put(await worker.transfers.fetch(address))

    async def bench(task: Task, frames: list[bytes]) -> HandlerOutcome:
        report = await loop.run_in_executor(pool, evaluate, frames)
        report = msgspec.structs.replace(report, worker_id=service.worker_id)
        with bound(task_id=task.task_id, group_id=task.group_id):
            speedup = None if report.timing is None else round(report.timing.speedup, 3)
            service.log.debug("judged", fault=report.verdict.fault, speedup=speedup)
        is_next = is_verifier and report.verdict.fault is Fault.OK and is_timed(Record.decode(frames).request)
        return HandlerOutcome(Stage.BENCH if is_next else Stage.SCORE, [msgspec.msgpack.encode(report)])

    with (
        contextlib.nullcontext() if is_verifier else clocks.held(settings.clocks, device, service.run_dir / "locks"),
        Judge(
            store,
            options,
            backend=service.config.backend,
            sanitize_share=0.0 if is_verifier and settings.timed else settings.sanitize_share,
            baselines=[] if is_verifier else settings.baselines,
            quiet=quiet,
            probe=lambda: roofline.peaks_of(device, cache, hardware, again=True),
        ) as judge,
    ):
        pool = ThreadPoolExecutor(1)
        worker = Worker(
            service.addresses.work,
            service.worker_id,
            [Stage.VERIFY if is_verifier else Stage.BENCH],
            2,
            bench,
            concurrency=1,
            wedge_s=60.0,
            caps={**bench_caps(device, service.config.backend), HARDWARE: hardware},
            keys=service.keys,
            prefetch=Prefetch(1),
            before=fetch if service.is_apart else None,
            differs=service.differs if service.is_apart else None,
        )
        service.watch(worker.meter)
        windows = worker.quiet_windows(resource) if others and not is_verifier else None
        service.log.info("ready", core=core, device=device, **log_fields(judge.zygote.isolation))
        await worker.run(stop)


if __name__ == "__main__":
    run_service("timing_bench", main, choose_run)
