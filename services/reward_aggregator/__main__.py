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
    from kbrl_async.runs.archive.recorder import RolloutRecorder
    from kbrl_async.runs.demonstrations.dataset import SFT, open_dataset
    from kbrl_async.runs.planning import plan_of
    from kbrl_async.runs.prompting import needs_policy, prompts_of
    from kbrl_async.runs.run_journal import FILE, RunJournal
    from kbrl_async.runs.run_state import RunState
    from protocols.messages import Stage
    from services.reward_aggregator.actor import Aggregator
    from services.reward_aggregator.metrics_writer import MetricsWriter
    from services.runtime.producer import Producer
    from services.runtime.pumping import run_beside, until_policy
    from services.runtime.rollout_actor import Outside
    from services.runtime.service import Service
    from services.runtime.worker import Worker

    service = Service.start("reward_aggregator")
    config, run_dir = service.config, service.run_dir
    service.pin(service.layout.shared)
    state = RunState(plan_of(config))
    with RunJournal(run_dir / FILE) as journal, RolloutRecorder(config.archive, run_dir) as recorder:
        await recorder.ended(journal.load(state), state.clock)
        metrics = MetricsWriter(service, state, journal.history())
        learns = config.method == SFT
        if (needs_policy(config) or learns) and not await until_policy(service.policies, stop):
            return
        demonstrations = await asyncio.to_thread(open_dataset, config, run_dir, service.log) if learns else None
        async with Producer(service.addresses.submit, keys=service.keys) as producer:
            outside = Outside(service, journal, producer, recorder)
            prompts = prompts_of(config, run_dir, service.log)
            aggregator = Aggregator(outside, state, journal, metrics, prompts, demonstrations)
            stages: list[str] = [Stage.SCORE, Stage.TRAINED]
            handle = aggregator.handle
            worker = Worker(service.addresses.work, service.worker_id, stages, SLOTS, handle, keys=service.keys)
            service.watch(worker.meter)
            plan = state.plan
            service.log.info("ready", training=len(plan.training), heldout=len(plan.heldout), resumed=state.clock > 0)
            if await run_beside(worker, aggregator.run(lambda: worker.welcomes), stop):
                metrics.finish(aggregator.now, journal.answers())
                service.log.info("finished", summary=str(run_dir / "summary.json"))
                return
    if stop.is_set():
        service.log.info("stopped; the same command goes on from here")


if __name__ == "__main__":
    run_service("reward_aggregator", main, choose_run)
