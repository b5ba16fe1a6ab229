"""Evaluator: asks for n answers a problem, and ends the run when all have their verdict. `python -m services.evaluator`

::

    [Course] ─▶ generate ─▶ … the same services as in training … ─▶ score ─▶ [Course] ─▶ evaluation.json
"""

from __future__ import annotations

import asyncio

from services.runtime.nanny import run_service
from services.runtime.service import choose_run

SLOTS = 128


async def main(stop: asyncio.Event) -> None:
    from kbrl_async.evaluation.policy_file import read_policy
    from kbrl_async.evaluation.selecting import select
    from protocols.messages import Stage
    from services.evaluator.actor import Evaluator
    from services.evaluator.course import Course, Entry
    from services.evaluator.outputs import write_all
    from services.rollouts.archiving import TurnArchive
    from services.rollouts.examples import open_prompts
    from services.rollouts.journal import EntryJournal
    from services.runtime.producer import Producer
    from services.runtime.pumping import run_beside
    from services.runtime.service import Service
    from services.runtime.worker import Worker

    service = Service.start("evaluator")
    config, settings = service.config, service.config.evaluation
    chosen = select(config)
    course = Course(chosen.problems, settings.samples, settings.in_flight, settings.deadline_s)
    policy = read_policy(service.run_dir)
    service.pin(service.layout.shared)
    journal_path = service.run_dir / "evaluator.sqlite"
    with EntryJournal[Entry](journal_path, Entry) as journal, TurnArchive(config, service.run_dir) as archive:
        for entry in journal.entries():
            course.apply(entry)
        async with Producer(service.addresses.submit, keys=service.keys) as producer:
            prompts = await open_prompts(service, stop)
            evaluator = Evaluator(service, course, journal, producer, archive, prompts)
            worker = Worker(
                service.addresses.work, service.worker_id, [Stage.SCORE], SLOTS, evaluator.handle, keys=service.keys
            )
            evaluator.welcomes = lambda: worker.welcomes
            service.watch(worker.meter)
            service.log.info("ready", problems=len(course.problems), samples=course.total, done=course.done)
            if await run_beside(worker, evaluator.pump(), stop):
                write_all(service.run_dir, config, course, policy, chosen.skipped)
                service.log.info("finished", file=str(service.run_dir / "evaluation.json"))
                return
    if stop.is_set():
        service.log.info("stopped; the same command goes on from here")


if __name__ == "__main__":
    run_service("evaluator", main, choose_run)
