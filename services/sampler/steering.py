"""Steers how many rollouts the sampler holds: once a second, by its engine and by how long the queues behind it are.

The broker is asked as a viewer asks it; where it can't be (another host, no answer) only the engine's memory counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kbrl_async.errors import KbrlError
from kbrl_async.runs.status_client import StatusClient, of_run
from kbrl_async.sampling.concurrency import Controller, Signals
from kbrl_async.sampling.engine import EngineStats
from protocols.messages import Stage, StatusReport
from services.runtime.service import Service
from services.runtime.worker import Worker

PERIOD_S = 1.0
ASK_S = 0.5
BEHIND = (Stage.COMPILE, Stage.VERIFY, Stage.BENCH)


async def steer(service: Service, worker: Worker, stats: Callable[[], EngineStats]) -> None:
    """Runs until it is cancelled."""
    controller = Controller(service.config.sampler.slots)
    client = None if service.is_apart else _client(service)
    clock, said = asyncio.get_running_loop().time, ""
    asking: asyncio.Future[StatusReport | None] | None = None
    try:
        while True:
            await asyncio.sleep(PERIOD_S)
            report = None
            if client is not None:
                asking = asyncio.ensure_future(asyncio.to_thread(client.ask, ASK_S))
                report = await asyncio.shield(asking)
            if service.config.sampler.engine == "vllm":
                tell(service, stats())
            seen = signals(clock(), len(worker.session.running), worker.meter.done, stats(), report)
            worker.session.credit = controller.observe(seen)
            if controller.reason != said:
                said = controller.reason
                service.log.debug("concurrency", limit=controller.limit, bounded_by=said or "nothing")
    finally:
        if asking is not None:
            await asyncio.wait({asking})  # a cancelled wait leaves its thread at the socket
        if client is not None:
            client.__exit__(None, None, None)


def tell(service: Service, engine: EngineStats) -> None:
    """Let Prometheus and TensorBoard see how the engine's memory fares."""
    facts = {"kv_usage": engine.kv_usage, "preemptions": float(engine.preemptions)}
    service.tell(facts, {f"sampler/{name}": value for name, value in facts.items()})


def _client(service: Service) -> StatusClient | None:
    try:
        return StatusClient(*of_run(service.run_dir))
    except KbrlError:
        return None


def signals(now: float, active: int, finished: int, engine: EngineStats, report: StatusReport | None) -> Signals:
    """What the controller sees; of the later stages the one with the longest queue."""
    seen = Signals(now, active, finished, engine.kv_usage, engine.preemptions)
    if report is None:
        return seen
    queued = max((standing.queued for standing in report.stages if standing.stage in BEHIND), default=None)
    samplers = sum(Stage.GENERATE in standing.stages for standing in report.workers)
    rate = report.rates.get("rollouts_per_s")
    return Signals(now, active, finished, engine.kv_usage, engine.preemptions, queued, rate, max(1, samplers))
