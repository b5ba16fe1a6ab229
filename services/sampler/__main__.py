"""Sampler: prompts in, tokens with behaviour log-probs out. `python -m services.sampler`

::

    generate ─▶ [Engine, continuous batching] ─▶ extract the candidate ─▶ compile | score
                   ▲ the newest policy version, loaded between sequences

Invariants
* A rollout begins with a version at least as new as the one the broker knew of when it dispatched the task, and is
  written by it; only where weights change in flight by later ones too, and then its spans say which tokens.
* A version is served only after its canary agrees with the manifest (I8).
"""

from __future__ import annotations

import asyncio

from services.runtime.nanny import run_service
from services.runtime.service import choose_run, leave_out_traces

WATCH_S = 0.1
"""How often the sampler looks for a new policy version."""


async def main(stop: asyncio.Event) -> None:
    from protocols.messages import Stage, Task
    from services.runtime.pumping import watched
    from services.runtime.service import Service, Stopped
    from services.runtime.worker import HandlerOutcome, Worker, WorkerOptions
    from services.sampler.actor import Sampling, start_engine
    from services.sampler.mirror import Mirror, has_own
    from services.sampler.steering import steer

    async def generate(task: Task, frames: list[bytes]) -> HandlerOutcome:
        return await sampling.generate(task, frames)

    service = Service.start("sampler")
    service.pin(service.layout.sampler)
    worker = Worker(
        service.addresses.work,
        service.worker_id,
        [Stage.GENERATE],
        service.config.sampler.slots,
        generate,
        WorkerOptions(caps=service.quiet_caps(), wedge_s=60.0),
        keys=service.keys,
    )
    fetching = [asyncio.create_task(Mirror(service).run())] if service.is_apart and has_own(service.policies) else []
    engine = await start_engine(service, worker, stop)
    if engine is None:
        return
    sampling = Sampling(service, engine, worker.gate, worker.progress)
    try:
        await sampling.begin(stop)
    except Stopped:
        await sampling.close()
        return
    service.watch(worker.meter)
    helpers = [
        *fetching,
        asyncio.create_task(sampling.watch(WATCH_S)),
        asyncio.create_task(sampling.stand_still()),
        asyncio.create_task(steer(service, worker, sampling.stats)),
    ]
    try:
        await watched(asyncio.create_task(worker.run(stop)), helpers)
    finally:
        await sampling.close()


if __name__ == "__main__":
    leave_out_traces()
    run_service("sampler", main, choose_run)
