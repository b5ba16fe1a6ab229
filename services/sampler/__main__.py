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
from services.runtime.service import choose_run

WATCH_S = 0.1
"""How often the sampler looks for a new policy version."""


async def main(stop: asyncio.Event) -> None:
    from services.runtime.service import Service
    from services.runtime.worker import Worker
    from services.sampler.actor import Sampling
    from services.sampler.steering import steer

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
    # `breathe` waits for its gate and so is for a thread of work; others work on this loop or in another process
    sampling.progress = worker.breathe if sampling.has_thread else worker.progress
    sampling.share(worker.gate)
    service.watch(worker.meter)
    helpers = [
        asyncio.create_task(sampling.watch(WATCH_S)),
        asyncio.create_task(sampling.stand_still(worker.gate)),
        asyncio.create_task(steer(service, worker, sampling.stats)),
    ]
    try:
        await watched(asyncio.create_task(worker.run(stop)), helpers)
    finally:
        await sampling.close()


async def watched(work: asyncio.Task[None], helpers: list[asyncio.Task[None]]) -> None:
    """Until `work` ends; what a helper raises ends it early. All of them are over then.

    So the worker has left before its engine closes: it says Bye for what it holds, and no rollout loses an attempt.
    """
    waiting = {work, *helpers}
    try:
        while not work.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in (work, *helpers):
            task.cancel()
        await asyncio.gather(work, *helpers, return_exceptions=True)


if __name__ == "__main__":
    run_service("sampler", main, choose_run)
