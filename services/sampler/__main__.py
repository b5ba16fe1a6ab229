"""Sampler: prompts in, tokens with behaviour log-probs out. `python -m services.sampler`

::

    generate ─▶ [Engine, continuous batching] ─▶ extract the candidate ─▶ compile | score
                   ▲ the newest policy version, loaded between sequences

Invariants
* A rollout is written by one version, at least as new as the one the broker knew of when it dispatched the task.
* A version is served only after its canary agrees with the manifest (I8).
"""

from __future__ import annotations

import asyncio

from services.runtime.nanny import run_service
from services.runtime.service import choose_run

WATCH_S = 0.1
"""How often the sampler looks for a new policy version."""


async def main(stop: asyncio.Event) -> None:
    from services.runtime.service import Service
    from services.runtime.worker import Worker
    from services.sampler.actor import Sampling

    service = Service.start("sampler")
    service.pin(service.layout.sampler)
    sampling = await Sampling.open(service, stop)
    if sampling is None:
        return
    from protocols.messages import Stage

    worker = Worker(
        service.addresses.work,
        service.worker_id,
        [Stage.GENERATE],
        service.config.sampler.slots,
        sampling.generate,
        caps={} if sampling.is_remote else service.quiet_caps(),
        wedge_s=60.0,
        keys=service.keys,
    )
    # `breathe` waits for its gate and so is for a thread of work; an endpoint's only work is on this loop
    sampling.progress = worker.progress if sampling.is_remote else worker.breathe
    service.watch(worker.meter)
    watcher = asyncio.create_task(sampling.watch(WATCH_S))
    try:
        work = asyncio.create_task(worker.run(stop))
        await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if watcher.done():
            watcher.result()
        await work
    finally:
        watcher.cancel()
        await sampling.close()


if __name__ == "__main__":
    run_service("sampler", main, choose_run)
