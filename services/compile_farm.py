"""Compile farm: untrusted source in, content-addressed artifact out. `python -m services.compile_farm`.

::

    compile ─▶ [Builder in threads, compilers sandboxed at low priority] ─▶ verify | bench | score
"""

from __future__ import annotations

import asyncio

from services.runtime.nanny import run_service
from services.runtime.service import choose_run


async def main(stop: asyncio.Event) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import msgspec

    from kbrl_async.errors import UserError
    from kbrl_async.kernels.backends.building import ArtifactStore
    from kbrl_async.kernels.funnel import Builder, artifact_paths
    from kbrl_async.runs.config.layout import compile_slots
    from kbrl_async.runs.telemetry.logs import bound
    from kbrl_async.runs.value import chances_of
    from protocols.messages import Stage, Task
    from protocols.prefetch import Prefetch
    from protocols.records import BuildReport, Fault
    from protocols.rollout import Record
    from services.runtime.capabilities import farm_caps, log_fields
    from services.runtime.service import Service
    from services.runtime.worker import HandlerOutcome, Worker

    service = Service.start("compile_farm")
    farm = service.config.compile_farm
    slots = compile_slots(service.config, service.layout)
    cores = service.layout.compile
    judging = Stage.VERIFY if service.config.processes.verifier else Stage.BENCH
    loop = asyncio.get_running_loop()
    try:
        chances = chances_of(service.config.timing_bench.likely_first)
    except UserError as error:  # on another host those runs are not
        service.log.warning("what is likely to be right is not predicted here", reason=str(error))
        chances = None

    with (
        Builder(ArtifactStore(service.artifacts, farm.store_max_bytes), farm, tuple(cores)) as builder,
        ThreadPoolExecutor(slots) as pool,
    ):

        async def build(task: Task, frames: list[bytes]) -> HandlerOutcome:
            record = Record.decode(frames)
            assert record.candidate is not None, "the sampler sends only answers with a candidate here"
            report = await loop.run_in_executor(pool, builder.build, record.candidate, record.request.problem)
            report = msgspec.structs.replace(report, worker_id=service.worker_id)
            if service.config.turns.profile and report.fault is Fault.OK:
                remarks = await loop.run_in_executor(pool, builder.remarks, record.candidate)
                report = msgspec.structs.replace(report, remarks=remarks)
            with bound(task_id=task.task_id, group_id=task.group_id):
                service.log.debug("built", fault=report.fault, cached=report.cached)
            frames = [msgspec.msgpack.encode(report)]
            if report.fault is not Fault.OK:
                return HandlerOutcome(Stage.SCORE, frames)
            if chances is None:
                return HandlerOutcome(judging, frames)
            module, kernel = record.request.problem.source, record.candidate.source
            return HandlerOutcome(
                judging, frames, chance=await loop.run_in_executor(pool, chances.chance, module, kernel)
            )

        async def hand_over(outcome: HandlerOutcome) -> None:
            """The benches are on other hosts: they get artifacts by hash from the broker."""
            report = msgspec.msgpack.decode(outcome.frames[0], type=BuildReport)
            for path in set(artifact_paths(builder.store, report).values()):
                await worker.transfers.send(await loop.run_in_executor(None, path.read_bytes))

        caps, lacking = farm_caps(service.config.backend)
        for name, reason in lacking.items():
            if name == service.config.backend:
                service.log.warning("this host can't build the run's backend", backend=name, reason=reason)
        service.log.info("ready", slots=slots, cores=cores, backends=caps["backends"], **log_fields(builder.isolation))
        worker = Worker(
            service.addresses.work,
            service.worker_id,
            [Stage.COMPILE],
            slots + 1,
            build,
            concurrency=slots,
            caps=caps,
            keys=service.keys,
            prefetch=Prefetch(slots),
            after=hand_over if service.is_apart else None,
            differs=service.differs if service.is_apart else None,
        )
        service.watch(worker.meter)
        await worker.run(stop)


if __name__ == "__main__":
    run_service("compile_farm", main, choose_run)
