"""One live broker with many worker connections: idle cost, tasks a second, memory, descriptors.

    python -m benchmarks.connections [--workers 100,1000,4000] [--seconds 5]

The broker is a process of its own with its journal on disk. A client process plays one producer and all workers: each
has a DEALER and the real `WorkerSession`, and answers a task of one stage at once, so that the broker is never waited
for by work. First the fleet only beats (*idle*), then it works as fast as it gets tasks. Broker CPU per task does not
depend on who else uses the machine; tasks a second do, and on the client, which uses a core of its own. The anchor is
the smallest fleet. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import platform
import random
import select
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import zmq

from protocols import framing
from protocols import messages as msg
from protocols.ledger import LedgerOptions, StageOptions
from protocols.session import Effect, Emit, Start, WorkerSession
from protocols.sockets import Socket, connect_dealer
from services.broker.descriptors import raise_descriptor_limit
from services.broker.options import BrokerOptions
from services.runtime.addresses import addresses
from services.runtime.channel import drain

PAYLOAD = [bytes(1024)]
START_S = 60.0


def serve(options: BrokerOptions) -> None:
    import uvloop

    from services.broker.server import Broker

    raise_descriptor_limit()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(Broker(options).run())


class SocketWorker:
    """A worker that is done with a task at once. A connection takes two descriptors here and one of the broker."""

    def __init__(self, context: zmq.Context[Socket], address: str, number: int) -> None:
        self.socket = connect_dealer(context, address, f"w{number}-{os.getpid()}".encode())
        rng = random.Random(number)
        self.session = WorkerSession(f"farm.{number}", "1", [msg.Stage.COMPILE], 1, rng)
        self.beats_at = rng.random()
        self.done = 0

    def tick(self, now: float) -> None:
        self._do(self.session.tick(now), now)

    def read(self, now: float) -> None:
        """Until it is empty: its descriptor tells of news once only, and sending may swallow that."""
        while batch := drain(self.socket):
            for frames in batch:
                self._do(self.session.handle(*framing.decode(frames), now), now)

    def _do(self, effects: Sequence[Effect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, Emit):
                self.socket.send_multipart(framing.encode(effect.message, effect.payload))
            elif isinstance(effect, Start):
                self.done += 1
                result = msg.Result(effect.task.task_id, effect.task.lease_id)
                self._do(self.session.finish(result, [b"report"], now), now)


class Fleet:
    """All workers and the producer, in one thread."""

    def __init__(self, options: BrokerOptions, count: int) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, count + 64)
        self.workers = [SocketWorker(self._context, options.work_address, n) for n in range(count)]
        self._producer = connect_dealer(self._context, options.submit_address, b"producer")
        self._epoll = select.epoll()
        self._by_fd = {worker.socket.fileno(): worker for worker in self.workers}
        for fd in self._by_fd:
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)
        self._submitted = 0
        self._due = 0.0

    @property
    def done(self) -> int:
        return sum(worker.done for worker in self.workers)

    @property
    def welcomed(self) -> int:
        return sum(worker.session.epoch > 0 for worker in self.workers)

    def turn(self) -> None:
        """What has come, and every half second what is due."""
        for fd, _ in self._epoll.poll(0.02, 512):
            self._by_fd[fd].read(time.monotonic())
        drain(self._producer)
        if (now := time.monotonic()) >= self._due:
            self._due = now + 0.5
            for worker in self.workers:
                worker.tick(now)
                worker.read(now)

    def run(self, until: Callable[[], bool], ahead: int = 0) -> None:
        """`ahead`: submissions that are kept waiting in the broker."""
        while not until():
            while self._submitted < self.done + ahead:
                self._submitted += 1
                submit = msg.Submit(f"t{self._submitted}", msg.Stage.COMPILE, f"g{self._submitted // 8}")
                self._producer.send_multipart(framing.encode(submit, PAYLOAD))
            self.turn()

    def close(self) -> None:
        self._epoll.close()
        self._context.destroy(linger=0)


def after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def measure(count: int, seconds: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        found = addresses(Path(folder))
        ledger = LedgerOptions(compile=StageOptions(ttl_s=60.0, queue_limit=100_000))
        options = BrokerOptions(folder, found.submit, found.work, ledger=ledger)
        process = mp.get_context("spawn").Process(target=serve, args=(options,))
        process.start()
        fleet = Fleet(options, count)
        try:
            return {"workers": count, **_measure(fleet, psutil.Process(process.pid), seconds)}
        finally:
            fleet.close()
            process.terminate()
            process.join()


def _measure(fleet: Fleet, broker: psutil.Process, seconds: float) -> dict[str, object]:
    began, late = time.monotonic(), after(START_S)
    fleet.run(lambda: fleet.welcomed == len(fleet.workers) or late())
    joined_s = time.monotonic() - began
    joined = fleet.welcomed
    fleet.run(after(1.0))
    idle, _ = _cpu(fleet, broker, seconds, ahead=0)
    done = fleet.done
    own = time.process_time()
    busy, wall_s = _cpu(fleet, broker, seconds, ahead=2 * len(fleet.workers))
    tasks = fleet.done - done
    return {
        "joined": joined,
        "joined_s": round(joined_s, 2),
        "idle_cores": round(idle / seconds, 3),
        "tasks_per_s": round(tasks / wall_s),
        "broker_us_per_task": round(1e6 * busy / max(1, tasks)),
        "broker_cores": round(busy / wall_s, 2),
        "client_cores": round((time.process_time() - own) / wall_s, 2),
        "rss_mb": round(broker.memory_info().rss / 1e6, 1),
        "descriptors": broker.num_fds(),
        "least": min(worker.done for worker in fleet.workers),
        "most": max(worker.done for worker in fleet.workers),
    }


def _cpu(fleet: Fleet, broker: psutil.Process, seconds: float, ahead: int) -> tuple[float, float]:
    """CPU seconds of the broker while the fleet runs so long, and the wall time."""
    before, began = broker.cpu_times(), time.monotonic()
    fleet.run(after(seconds), ahead)
    now = broker.cpu_times()
    return now.user + now.system - before.user - before.system, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workers", default="100,1000,4000")
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    limit = raise_descriptor_limit()
    rows = []
    for count in map(int, arguments.workers.split(",")):
        rows.append(measure(count, arguments.seconds))
        print(rows[-1], flush=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {limit} descriptors"
    load = round(os.getloadavg()[0], 1)
    print(json.dumps({"benchmark": "connections", "machine": machine, "load_average": load, "rows": rows}))


if __name__ == "__main__":
    main()
