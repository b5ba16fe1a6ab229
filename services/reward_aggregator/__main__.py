"""Reward aggregator: opens groups, scores rollouts, assembles batches, ends the run.

`python -m services.reward_aggregator`

::

    score ─▶ reward, advantage ─▶ train          trained ─▶ slots are free ─▶ generate

When everything is trained and evaluated it writes `summary.json` and ends, which ends the run.
"""

from __future__ import annotations

import asyncio

from services.runtime.nanny import run_service
from services.runtime.service import choose_run

SLOTS = 128


async def main(stop: asyncio.Event) -> None:
    from protocols.messages import Stage
    from services.reward_aggregator.actor import Aggregator
    from services.reward_aggregator.archiving import Archiving
    from services.reward_aggregator.journal import Journal
    from services.reward_aggregator.metrics_writer import MetricsWriter
    from services.reward_aggregator.planning import plan_of
    from services.reward_aggregator.run_state import RunState
    from services.reward_aggregator.sft_dataset import open_lessons
    from services.rollouts.examples import open_prompts
    from services.runtime.producer import Producer
    from services.runtime.pumping import run_beside
    from services.runtime.service import Service
    from services.runtime.worker import Worker

    service = Service.start("reward_aggregator")
    config = service.config
    plan = plan_of(config)
    campaign = RunState(plan)
    service.pin(service.layout.shared)
    with Journal(service.run_dir / "aggregator.sqlite") as journal, Archiving(config, service.run_dir) as archive:
        await archive.ended(journal.load(campaign), campaign.clock)
        board = MetricsWriter(service, campaign)
        async with Producer(service.addresses.submit, keys=service.keys) as producer:
            prompts = await open_prompts(service, stop)
            lessons = await open_lessons(service, stop)
            aggregator = Aggregator(
                service, campaign, journal, producer, board, archive, prompts=prompts, lessons=lessons
            )
            worker = Worker(
                service.addresses.work,
                service.worker_id,
                [Stage.SCORE, Stage.TRAINED],
                SLOTS,
                aggregator.handle,
                keys=service.keys,
            )
            aggregator.welcomes = lambda: worker.welcomes
            service.watch(worker.meter)
            service.log.info(
                "ready", training=len(plan.training), heldout=len(plan.heldout), resumed=campaign.clock > 0
            )
            if await run_beside(worker, aggregator.pump(), stop):
                board.finish(aggregator.now, journal.answers())
                service.log.info("finished", summary=str(service.run_dir / "summary.json"))
                return
    if stop.is_set():
        service.log.info("stopped; the same command goes on from here")


if __name__ == "__main__":
    run_service("reward_aggregator", main, choose_run)
