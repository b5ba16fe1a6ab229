"""Farm and bench on hosts of their own: network namespaces with real addresses, delay and loss, a partition that heals.

Needs the right to make namespaces (root, CAP_NET_ADMIN); delay and loss need the kernel's netem as well. What is
missing is skipped, with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kbrl_async.keyring import Keyring
from protocols import messages as msg
from protocols.auth import Role
from protocols.limits import LedgerOptions, StageOptions
from services.broker.options import BrokerOptions
from services.broker.server import Broker
from services.runtime import Outcome, Producer, Worker

PATIENCE_S = 90.0
HEARTBEAT_S = 0.2
PARTITION_S = 3.0
"""Much longer than it takes to be suspected, and than a lease lasts without beats."""
LEDGER = LedgerOptions(
    heartbeat_s=HEARTBEAT_S, compile=StageOptions(ttl_s=1.5, max_losses=None), bench=StageOptions(1.5, max_losses=None)
)
WORKER = """
import asyncio, signal, sys
from kbrl_async.keyring import client_keys
from services.runtime import Outcome, Worker
address, name, stage, next_stage, keys = sys.argv[1:]
async def work(task, frames):
    await asyncio.sleep(0.02)
    return Outcome(next_stage, [stage.encode()])
async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await Worker(address, name, [stage], 4, work, keys=client_keys(keys)).run(stop)
asyncio.run(main())
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


class Host:
    """A namespace with one cable to us. `number` makes its names and addresses."""

    def __init__(self, number: int) -> None:
        self.name = f"kbrl-{os.getpid()}-{number}"
        self.cable = f"kb{os.getpid() % 100_000}h{number}"
        self.net = f"10.{200 + os.getpid() % 50}.{100 + number}"
        self.processes: list[subprocess.Popen[bytes]] = []

    def open(self) -> None:
        ip("netns", "add", self.name)
        ip("link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("addr", "add", f"{self.net}.1/24", "dev", self.cable)
        ip("link", "set", self.cable, "up")
        ip("-n", self.name, "addr", "add", f"{self.net}.2/24", "dev", "eth0")
        ip("-n", self.name, "link", "set", "eth0", "up")

    def start(self, *words: str) -> None:
        command = ["ip", "netns", "exec", self.name, sys.executable, "-c", WORKER, *words]
        self.processes.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.getcwd()}))

    def cut(self, cut: bool) -> None:
        ip("link", "set", self.cable, "down" if cut else "up")

    def disturb(self, delay: str, loss: str) -> None:
        """Raises `CalledProcessError` where this kernel has no netem."""
        command = ["tc", "qdisc", "add", "dev", self.cable, "root", "netem", "delay", delay, "loss", loss]
        subprocess.run(command, check=True, capture_output=True, timeout=20)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for words in (("link", "del", self.cable), ("netns", "del", self.name)):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(*words)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if shutil.which("ip") is None:
        pytest.skip("the tool 'ip' is not installed")
    made = (Host(1), Host(2))
    try:
        try:
            for host in made:
                host.open()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this user can't make network namespaces: {error.stderr.decode().strip()}")
        yield made
    finally:
        for host in made:
            host.close()


class Site:
    """A broker for all addresses, a producer and a scorer beside it."""

    def __init__(self, folder: Path) -> None:
        self.ring = Keyring(folder / "keys")
        self.issued = {role: self.ring.new(role, "away") for role in (Role.COMPILE, Role.BENCH)}
        self.ring.new(Role.AGGREGATOR, "local")
        self.broker = Broker(
            BrokerOptions(str(folder), "tcp://127.0.0.1:*", "tcp://0.0.0.0:*", keys=str(folder / "keys"), ledger=LEDGER)
        )
        self.seen: list[tuple[str, list[bytes]]] = []

    async def __aenter__(self) -> Site:
        self._serving = asyncio.create_task(self.broker.run())
        while not hasattr(self.broker, "ledger"):
            await asyncio.sleep(0.01)
        self.submit, work = (_endpoint(router.socket) for router in self.broker._bound)
        self.port = work.rpartition(":")[2]
        self.keys = self.ring.local(Role.AGGREGATOR)
        self._scorer = Worker(work, "local.agg", ["score"], 8, self._score, keys=self.keys)
        self._scoring = asyncio.create_task(self._scorer.run())
        return self

    async def _score(self, task: msg.Task, frames: list[bytes]) -> Outcome:
        self.seen.append((task.task_id, frames))
        return Outcome()

    async def __aexit__(self, *_: object) -> None:
        self._scorer.stop()
        await asyncio.gather(self._scoring, return_exceptions=True)
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)

    def place(self, farm: Host, bench: Host) -> None:
        for host, stage, following in ((farm, "compile", "bench"), (bench, "bench", "score")):
            address = f"tcp://{host.net}.1:{self.port}"
            host.start(address, f"away.{stage}", stage, following, str(self.issued[Role(stage)]))

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


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()


@pytest.mark.timeout(150)
def test_a_partition_heals_and_nothing_is_lost_or_done_twice(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    async def play() -> None:
        farm, bench = hosts
        async with (
            Site(tmp_path) as site,
            asyncio.timeout(PATIENCE_S),
            Producer(site.submit, keys=site.keys) as producer,
        ):
            site.place(farm, bench)
            await site.joined(3)
            await asyncio.gather(*(producer.submit(f"t{n}", "compile", [b"request"]) for n in range(60)))
            await site.until(10)
            bench.cut(True)
            await asyncio.gather(*(producer.submit(f"t{n}", "compile", [b"request"]) for n in range(60, 120)))
            await asyncio.sleep(PARTITION_S)
            cut_off = {f"t{n}" for n in range(60, 120)}
            assert not cut_off & {name for name, _ in site.seen}, "nothing came through the cut cable"
            bench.cut(False)
            await site.until(120)
            site.assert_all_done_once(120)

    asyncio.run(play())


@pytest.mark.timeout(150)
def test_delay_and_loss_cost_time_and_nothing_else(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    farm, bench = hosts
    try:
        for host in hosts:
            host.disturb("50ms", "1%")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this kernel has no netem: {error.stderr.decode().strip()}")

    async def play() -> None:
        async with (
            Site(tmp_path) as site,
            asyncio.timeout(PATIENCE_S),
            Producer(site.submit, keys=site.keys) as producer,
        ):
            site.place(farm, bench)
            await asyncio.gather(*(producer.submit(f"t{n}", "compile", [b"request"]) for n in range(80)))
            await site.until(80)
            site.assert_all_done_once(80)

    asyncio.run(play())


@pytest.mark.timeout(150)
def test_a_host_may_join_late_and_leave_early(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    async def play() -> None:
        farm, bench = hosts
        async with (
            Site(tmp_path) as site,
            asyncio.timeout(PATIENCE_S),
            Producer(site.submit, keys=site.keys) as producer,
        ):
            await asyncio.gather(*(producer.submit(f"t{n}", "compile", [b"request"]) for n in range(60)))
            site.place(farm, bench)
            await site.until(10)
            (leaving,) = farm.processes
            leaving.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(leaving.wait, 30) == 0
            address = f"tcp://{bench.net}.1:{site.port}"
            bench.start(address, "away.compile2", "compile", "bench", str(site.issued[Role.COMPILE]))
            await site.until(60)
            site.assert_all_done_once(60)
            assert site.broker.ledger.counters["lost"] == 0, "it gave back what it had not begun"

    asyncio.run(play())
