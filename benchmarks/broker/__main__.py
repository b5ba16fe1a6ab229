"""What one broker can do: tasks, connections, lines, other builds, enemies. `python -m benchmarks.broker COMMAND`"""

from __future__ import annotations

import os
import random
import select
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import zmq

from benchmarks.broker import hostile, remote
from benchmarks.harness import Commands, Result, broker_options, broker_process, cpu_s, say
from protocols import framing
from protocols import messages as msg
from protocols.session import Effect, Emit, Start, WorkerSession
from protocols.sockets import Socket, connect_dealer
from services.broker.descriptors import raise_descriptor_limit
from services.broker.options import BrokerOptions
from services.runtime.channel import drain

commands = Commands("broker", __doc__)
START_S = 60.0


# ── connections ───────────────────────────────────────────────────────────────────────────────────────────────────


@commands
def connections(workers: tuple[int, ...] = (100, 1000, 4000), seconds: float = 5.0) -> Result:
    """One live broker with many worker connections: idle cost, tasks a second, memory, descriptors.

    The broker has its journal on disk. One client process plays a producer and all workers: each has a DEALER and the
    real `WorkerSession`, and is done with a task at once. First the fleet only beats (*idle*), then it works as fast as
    it gets tasks. Broker CPU per task does not depend on who else uses the machine. The smallest fleet is the anchor.
    """
    rows, limit = [], raise_descriptor_limit()
    for count in workers:
        with tempfile.TemporaryDirectory() as folder:
            options = broker_options(Path(folder))
            with broker_process(options) as broker:
                fleet = _Fleet(options, count)
                try:
                    rows.append({"workers": count, **_with_fleet(fleet, broker, seconds)})
                finally:
                    fleet.close()
        say(rows[-1])
    return {"descriptors": limit, "rows": rows}


class _SocketWorker:
    """A worker that is done with a task at once. A connection takes two descriptors here and one of the broker."""

    def __init__(self, context: zmq.Context[Socket], address: str, number: int) -> None:
        self.socket = connect_dealer(context, address, f"w{number}-{os.getpid()}".encode())
        self.session = WorkerSession(f"farm.{number}", "1", [msg.Stage.COMPILE], 1, random.Random(number))
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


class _Fleet:
    """All workers and the producer, in one thread."""

    def __init__(self, options: BrokerOptions, count: int) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, count + 64)
        self.workers = [_SocketWorker(self._context, options.work_address, n) for n in range(count)]
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

    def run(self, until: Callable[[], bool], ahead: int = 0) -> None:
        """`ahead`: submissions that are kept waiting in the broker."""
        while not until():
            while self._submitted < self.done + ahead:
                self._submitted += 1
                submit = msg.Submit(f"t{self._submitted}", msg.Stage.COMPILE, f"g{self._submitted // 8}")
                self._producer.send_multipart(framing.encode(submit, [bytes(1024)]))
            self._turn()

    def _turn(self) -> None:
        """What has come, and every half second what is due."""
        for fd, _ in self._epoll.poll(0.02, 512):
            self._by_fd[fd].read(time.monotonic())
        drain(self._producer)
        if (now := time.monotonic()) >= self._due:
            self._due = now + 0.5
            for worker in self.workers:
                worker.tick(now)
                worker.read(now)

    def close(self) -> None:
        self._epoll.close()
        self._context.destroy(linger=0)


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def _with_fleet(fleet: _Fleet, broker: psutil.Process, seconds: float) -> Result:
    began, late = time.monotonic(), _after(START_S)
    fleet.run(lambda: fleet.welcomed == len(fleet.workers) or late())
    found = {"joined": fleet.welcomed, "joined_s": time.monotonic() - began}
    fleet.run(_after(1.0))
    idle, _ = _cpu(fleet, broker, seconds, ahead=0)
    done, own = fleet.done, time.process_time()
    busy, wall_s = _cpu(fleet, broker, seconds, ahead=2 * len(fleet.workers))
    tasks, served = fleet.done - done, [worker.done for worker in fleet.workers]
    return {
        **found,
        "idle_cores": idle / seconds,
        "tasks_per_s": tasks / wall_s,
        "broker_us_per_task": 1e6 * busy / max(1, tasks),
        "broker_cores": busy / wall_s,
        "client_cores": (time.process_time() - own) / wall_s,
        "rss_mb": broker.memory_info().rss / 1e6,
        "descriptors": broker.num_fds(),
        "least": min(served),
        "most": max(served),
    }


def _cpu(fleet: _Fleet, broker: psutil.Process, seconds: float, ahead: int) -> tuple[float, float]:
    """CPU seconds of the broker while the fleet runs so long, and the wall time."""
    before, began = cpu_s(broker), time.monotonic()
    fleet.run(_after(seconds), ahead)
    return cpu_s(broker) - before, time.monotonic() - began


commands(hostile.hostile)
commands(remote.remote)
commands(remote.upgrade)
commands.inner(remote.pretend)

if __name__ == "__main__":
    commands.main()
