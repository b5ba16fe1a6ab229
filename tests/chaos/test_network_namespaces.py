"""Farm and bench on hosts of their own: real addresses, a line with delay and loss, a partition that heals.

Needs the right to make namespaces (root) and `/dev/net/tun`, see `tests.links`; where they are missing it is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kbrl_async.keyring import Keyring
from protocols import messages as msg
from protocols.auth import Role
from protocols.limits import LedgerOptions, StageOptions
from services.broker.options import BrokerOptions
from services.broker.server import BrokerServer
from services.runtime import HandlerOutcome, Producer, Worker
from tests.brokers import endpoints, until
from tests.links import Host, LinkError

PATIENCE_S = 200.0
HEARTBEAT_S = 0.2
PARTITION_S = 3.0
"""Much longer than it takes to be suspected, and than a lease lasts without beats."""
LEDGER = LedgerOptions(
    heartbeat_s=HEARTBEAT_S, compile=StageOptions(ttl_s=1.5, max_losses=None), bench=StageOptions(1.5, max_losses=None)
)
PATIENT = LedgerOptions(heartbeat_s=HEARTBEAT_S)
"""Where no lease is to run out: a worker's process may stand still for a while."""
WORKER = """
import asyncio, signal, sys
from kbrl_async.keyring import client_keys
from protocols import sockets
from services.runtime import HandlerOutcome, Worker
sockets.LINGER_MS = 30_000  # what is said at the end is to arrive on a slow machine too
address, name, stage, next_stage, keys = sys.argv[1:]
async def work(task, frames):
    await asyncio.sleep(0.02)
    return HandlerOutcome(next_stage, [stage.encode()])
async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await Worker(address, name, [stage], 4, work, keys=client_keys(keys)).run(stop)
asyncio.run(main())
"""


def start(host: Host, *words: str) -> subprocess.Popen[bytes]:
    return host.start(sys.executable, "-c", WORKER, *words, environment={**os.environ, "PYTHONPATH": os.getcwd()})


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    made = (Host(1), Host(2, seed=5))  # seeds that lose one of the first thirty packets: some hundred go each way
    try:
        try:
            for host in made:
                host.open()
        except LinkError as error:
            pytest.skip(f"no hosts of our own: {error}")
        yield made
    finally:
        for host in made:
            host.close()


class Site:
    """A broker for all addresses, a producer and a scorer beside it."""

    def __init__(self, folder: Path, ledger: LedgerOptions) -> None:
        self.ring = Keyring(folder / "keys")
        self.issued = {role: self.ring.new(role, "away") for role in (Role.COMPILE, Role.BENCH)}
        self.ring.new(Role.AGGREGATOR, "local")
        self.broker = BrokerServer(
            BrokerOptions(str(folder), "tcp://127.0.0.1:*", "tcp://0.0.0.0:*", keys=str(folder / "keys"), ledger=ledger)
        )
        self.seen: list[tuple[str, list[bytes]]] = []

    async def __aenter__(self) -> Site:
        self._serving = asyncio.create_task(self.broker.run())
        await until(lambda: hasattr(self.broker, "ledger"))
        self.submit, work = endpoints(self.broker)
        self.port = work.rpartition(":")[2]
        self.keys = self.ring.local(Role.AGGREGATOR)
        self._scorer = Worker(work, "local.agg", ["score"], 8, self._score, keys=self.keys)
        self._scoring = asyncio.create_task(self._scorer.run())
        return self

    async def _score(self, task: msg.Task, frames: list[bytes]) -> HandlerOutcome:
        self.seen.append((task.task_id, frames))
        return HandlerOutcome()

    async def __aexit__(self, *_: object) -> None:
        self._scorer.stop()
        await asyncio.gather(self._scoring, return_exceptions=True)
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)

    def place(self, farm: Host, bench: Host) -> None:
        for host, stage, following in ((farm, "compile", "bench"), (bench, "bench", "score")):
            address = f"tcp://{host.link.here}:{self.port}"
            start(host, address, f"away.{stage}", stage, following, str(self.issued[Role(stage)]))

    async def until(self, count: int) -> None:
        while len(self.seen) < count:
            await asyncio.sleep(0.02)

    async def joined(self, count: int) -> None:
        while len(self.broker.ledger.pool.by_id) < count:
            await asyncio.sleep(0.02)

    def assert_all_done_once(self, count: int) -> None:
        assert sorted(name for name, _ in self.seen) == sorted(f"t{number}" for number in range(count))
        assert {tuple(frames) for _, frames in self.seen} == {(b"request", b"compile", b"bench")}
        counters = self.broker.ledger.counters
        assert (counters["submitted"], counters["poisoned"]) == (count, 0)


@contextlib.asynccontextmanager
async def opened(folder: Path, ledger: LedgerOptions = LEDGER) -> AsyncIterator[tuple[Site, Producer]]:
    async with (
        Site(folder, ledger) as site,
        asyncio.timeout(PATIENCE_S),
        Producer(site.submit, keys=site.keys) as producer,
    ):
        yield site, producer


def test_a_partition_heals_and_nothing_is_lost_or_done_twice(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    async def play() -> None:
        farm, bench = hosts
        async with opened(tmp_path) as (site, producer):
            site.place(farm, bench)
            await site.joined(3)
            await asyncio.gather(*(producer.submit(f"t{n}", "compile", [b"request"]) for n in range(60)))
            await site.until(10)
            bench.link.partition()
            await asyncio.gather(*(producer.submit(f"t{n}", "compile", [b"request"]) for n in range(60, 120)))
            await asyncio.sleep(PARTITION_S)
            cut_off = {f"t{n}" for n in range(60, 120)}
            assert not cut_off & {name for name, _ in site.seen}, "nothing came through the cut cable"
            bench.link.heal()
            await site.until(120)
            site.assert_all_done_once(120)

    asyncio.run(play())


def test_delay_and_loss_cost_time_and_nothing_else(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    async def play() -> None:
        farm, bench = hosts
        for host in hosts:
            host.link.change(delay_s=0.05, loss=0.01)
        async with opened(tmp_path) as (site, producer):
            site.place(farm, bench)
            await asyncio.gather(*(producer.submit(f"t{n}", "compile", [b"request"]) for n in range(80)))
            await site.until(80)
            site.assert_all_done_once(80)
            for host in hosts:
                assert sum(host.link.counts()["lost"]) > 0, "the line has lost packets"

    asyncio.run(play())


def test_a_host_may_join_late_and_leave_early(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    async def play() -> None:
        farm, bench = hosts
        async with opened(tmp_path, PATIENT) as (site, producer):
            await asyncio.gather(*(producer.submit(f"t{n}", "compile", [b"request"]) for n in range(60)))
            site.place(farm, bench)
            await site.until(10)
            (leaving,) = farm.processes
            leaving.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(leaving.wait, PATIENCE_S) == 0
            address = f"tcp://{bench.link.here}:{site.port}"
            start(bench, address, "away.compile2", "compile", "bench", str(site.issued[Role.COMPILE]))
            await site.until(60)
            site.assert_all_done_once(60)
            assert site.broker.ledger.counters["lost"] == 0, "it gave back what it had not begun"

    asyncio.run(play())
