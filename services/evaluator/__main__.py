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
    from kbrl_async.evaluation.course import Command, Course
    from kbrl_async.runs.archive.journal import EntryJournal
    from kbrl_async.runs.archive.recorder import RolloutRecorder
    from kbrl_async.runs.planning import evaluated_problems
    from kbrl_async.runs.prompting import needs_policy, prompts_of
    from kbrl_async.runs.publishing import read_policy
    from protocols.messages import Stage
    from services.evaluator.actor import Evaluator
    from services.evaluator.outputs import write_all
    from services.runtime.producer import Producer
    from services.runtime.pumping import run_beside, until_policy
    from services.runtime.rollout_actor import Outside
    from services.runtime.service import Service
    from services.runtime.worker import Worker

    service = Service.start("evaluator")
    config, settings, run_dir = service.config, service.config.evaluation, service.run_dir
    course = Course(evaluated_problems(config), settings.samples, settings.in_flight, settings.deadline_s)
    policy = read_policy(run_dir)
    service.pin(service.layout.shared)
    journal_path = run_dir / "evaluator.sqlite"
    with EntryJournal[Command](journal_path, Command) as journal, RolloutRecorder(config.archive, run_dir) as recorder:
        for command in journal.entries():
            course.do(command)
        if needs_policy(config) and not await until_policy(service.policies, stop):
            return
        async with Producer(service.addresses.submit, keys=service.keys) as producer:
            outside = Outside(service, journal, producer, recorder)
            evaluator = Evaluator(outside, course, prompts_of(config, run_dir, service.log))
            handle = evaluator.handle
            worker = Worker(service.addresses.work, service.worker_id, [Stage.SCORE], SLOTS, handle, keys=service.keys)
            service.watch(worker.meter)
            service.log.info("ready", problems=len(course.problems), samples=course.total, done=course.done)
            if await run_beside(worker, evaluator.pump(lambda: worker.welcomes), stop):
                write_all(run_dir, config, course, policy)
                service.log.info("finished", file=str(run_dir / "evaluation.json"))
                return
    if stop.is_set():
        service.log.info("stopped; the same command goes on from here")


if __name__ == "__main__":
    run_service("evaluator", main, choose_run)
