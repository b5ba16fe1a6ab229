"""Timing bench: correctness first, then timing, one candidate at a time on a core of its own.

`python -m services.timing_bench`

::

    bench ─▶ [Bench in one thread: reference and candidate in sandboxed children] ─▶ score

Where a run has verifiers (`services.verifier`), they do all but the timing: `verify ─▶ Bench ─▶ bench | score`, and a
bench times what comes from there.
"""

from __future__ import annotations

import asyncio

from services.runtime.nanny import run_service
from services.runtime.service import choose_run


async def main(stop: asyncio.Event, name: str = "timing_bench") -> None:
    from protocols.messages import HARDWARE, Stage, Task
    from protocols.prefetch import Prefetch
    from services.runtime.capabilities import bench_caps, log_fields
    from services.runtime.service import Service
    from services.runtime.worker import HandlerOutcome, Worker, WorkerOptions
    from services.timing_bench.actor import Benching
    from services.timing_bench.place import Place

    async def bench(task: Task, frames: list[bytes]) -> HandlerOutcome:
        return await benching.bench(task, frames)

    async def fetch(_: Task, frames: list[bytes]) -> None:
        await benching.fetch(frames)

    service = Service.start(name)
    place = Place.of(service)
    worker = Worker(
        service.addresses.work,
        service.worker_id,
        [Stage.VERIFY if place.is_verifier else Stage.BENCH],
        2,
        bench,
        WorkerOptions(
            caps={**bench_caps(place.device, service.config.backend), HARDWARE: place.hardware},
            concurrency=1,
            prefetch=Prefetch(1),
            before=fetch if service.is_apart else None,
            wedge_s=60.0,
            differs=service.differs if service.is_apart else None,
        ),
        keys=service.keys,
    )
    with Benching(service, place, worker) as benching:
        service.watch(worker.meter)
        service.log.info("ready", cores=place.cores, device=place.device, **log_fields(benching.isolation))
        await worker.run(stop)


if __name__ == "__main__":
    run_service("timing_bench", main, choose_run)
