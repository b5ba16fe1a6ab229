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
    from kbrl_async.problems import load_problems, usable
    from kbrl_async.rewards.curriculum import CurriculumOptions
    from kbrl_async.rewards.groups import BookOptions
    from protocols.messages import Stage
    from services.reward_aggregator.actor import Aggregator
    from services.reward_aggregator.board import Board
    from services.reward_aggregator.campaign import Campaign, Plan
    from services.reward_aggregator.examples import open_prompts
    from services.reward_aggregator.journal import Journal
    from services.runtime.producer import Producer
    from services.runtime.service import Service
    from services.runtime.worker import Worker

    service = Service.start("reward_aggregator")
    config = service.config
    shapes = "gpu" if config.backend in ("cuda", "cuda-nvrtc", "triton") else "cpu"
    problems = load_problems(config.problems or "", levels=config.levels, shapes=shapes)
    learnable = usable(problems) if config.exclude_audited else problems
    plan = Plan(
        training=[problem for problem in learnable if problem.split != "heldout"],
        heldout=[problem for problem in problems if problem.split == "heldout"],
        eval_samples=config.eval_samples,
        group_size=config.group_size,
        seed=config.seed,
        book=BookOptions(
            config.batch_size,
            config.max_steps,
            config.max_staleness,
            baseline=config.advantage,
            scale_by_std=config.learner.scale_advantages,
        ),
        curriculum=CurriculumOptions(
            config.curriculum.kind,
            config.curriculum.window,
            config.curriculum.compile_above,
            config.curriculum.correct_above,
        ),
    )
    campaign = Campaign(plan)
    service.pin(service.layout.shared)
    with Journal(service.run_dir / "aggregator.sqlite") as journal:
        for entry in journal.entries():
            campaign.apply(entry)
        board = Board(service, campaign)
        async with Producer(service.addresses.submit) as producer:
            prompts = await open_prompts(service, stop)
            aggregator = Aggregator(service, campaign, journal, producer, board, prompts=prompts)
            worker = Worker(
                service.addresses.work, service.worker_id, [Stage.SCORE, Stage.TRAINED], SLOTS, aggregator.handle
            )
            service.log.info(
                "ready", training=len(plan.training), heldout=len(plan.heldout), resumed=campaign.clock > 0
            )
            leaving = asyncio.Event()
            working = asyncio.create_task(worker.run(leaving))
            pumping = asyncio.create_task(aggregator.pump())
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({working, pumping, stopping}, return_when=asyncio.FIRST_COMPLETED)
            leaving.set()
            stopping.cancel()
            if not pumping.done():
                pumping.cancel()
            await working
            if pumping.done() and not pumping.cancelled():
                pumping.result()
                board.finish(aggregator.now)
                service.log.info("finished", summary=str(service.run_dir / "summary.json"))
                return
    if stop.is_set():
        service.log.info("stopped; the same command goes on from here")


if __name__ == "__main__":
    run_service("reward_aggregator", main, choose_run)
