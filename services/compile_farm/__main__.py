"""Compile farm: untrusted source in, content-addressed artifact out. `python -m services.compile_farm`.

::

    compile ─▶ [Builder in threads, compilers sandboxed at low priority] ─▶ verify | bench | score
"""

from __future__ import annotations

import asyncio

from services.runtime.nanny import run_service
from services.runtime.service import choose_run


async def main(stop: asyncio.Event) -> None:
    from kbrl_async.runs.config.layout import compile_slots
    from protocols.messages import Stage
    from protocols.prefetch import Prefetch
    from services.compile_farm.actor import Building
    from services.runtime.capabilities import farm_caps, log_fields
    from services.runtime.service import Service
    from services.runtime.worker import HandlerOutcome, Worker, WorkerOptions

    async def hand_over(outcome: HandlerOutcome) -> None:
        await building.hand_over(outcome, worker.transfers)

    service = Service.start("compile_farm")
    backend, cores = service.config.backend, service.layout.compile
    slots = compile_slots(service.config, service.layout)
    with Building(service, cores, slots) as building:
        caps, lacking = farm_caps(backend)
        if backend in lacking:
            service.log.warning("this host can't build the run's backend", backend=backend, reason=lacking[backend])
        service.log.info("ready", slots=slots, cores=cores, backends=caps["backends"], **log_fields(building.isolation))
        worker = Worker(
            service.addresses.work,
            service.worker_id,
            [Stage.COMPILE],
            slots + 1,
            building.build,
            WorkerOptions(
                caps=caps,
                concurrency=slots,
                prefetch=Prefetch(slots),
                after=hand_over if service.is_apart else None,
                differs=service.differs if service.is_apart else None,
            ),
            keys=service.keys,
        )
        service.watch(worker.meter)
        await worker.run(stop)


if __name__ == "__main__":
    run_service("compile_farm", main, choose_run)
