"""A run directory with a broker that can be stopped, killed and started again, for tests over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path
from typing import Any

from protocols.ledger import LedgerOptions, StageOptions
from services.broker.server import BrokerServer
from services.runtime import Worker, WorkerOptions
from tests.brokers import beside, scenario_of, working

TTL_S = 1.5
QUICK = StageOptions(ttl_s=TTL_S)
LEDGER = LedgerOptions(heartbeat_s=0.05, generate=QUICK, compile=QUICK, bench=QUICK, score=QUICK, train=QUICK)
PATIENT = LedgerOptions(heartbeat_s=0.05)
"""For workers in a process of their own, which may stand still while the broker does not."""


class Run:
    def __init__(self, folder: Path, ledger: LedgerOptions = LEDGER) -> None:
        self.options = beside(folder, ledger=ledger, metrics_s=0.05)
        self.submit, self.work = self.options.submit_address, self.options.work_address
        self.clock = time.monotonic
        self.broker = BrokerServer(self.options)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.broker = BrokerServer(self.options, self.clock)
        self._task = asyncio.create_task(self.broker.run())
        await asyncio.sleep(0)

    async def crash(self) -> None:
        """As `kill -9`, but for the lock: nothing is said to anybody."""
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    stop = crash

    def worker(self, name: str, stage: str, handler: Any, slots: int = 1, **more: Any) -> Worker:
        return Worker(self.work, name, [stage], slots, handler, WorkerOptions(**more), rng=random.Random(0))

    def running(self, *workers: Worker) -> contextlib.AbstractAsyncContextManager[None]:
        return working(*workers, may_fail=True)

    def count(self, name: str) -> int:
        return self.broker.ledger.counters[name]


scenario = scenario_of(Run)
patient_scenario = scenario_of(lambda folder: Run(folder, PATIENT))
