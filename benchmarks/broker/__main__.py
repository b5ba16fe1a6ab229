"""What one broker can do: tasks, connections, lines, other builds, enemies. `python -m benchmarks.broker COMMAND`"""

from __future__ import annotations

import os
import random
import secrets
import select
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import psutil
import zmq

from benchmarks.broker import hostile, remote
from benchmarks.harness import CORES, Commands, Result, broker_options, broker_process, cpu_s, percentiles, say
from protocols import framing
from protocols import messages as msg
from protocols.session import Effect, Emit, Start, WorkerSession
from protocols.sockets import Socket, connect_dealer
from services.broker.descriptors import raise_descriptor_limit
from services.broker.options import IN_MEMORY, BrokerOptions
from services.runtime.channel import drain

commands = Commands("broker", __doc__)
AHEAD = 512
"""Submissions kept queued, so that the worker never waits for the producer."""
START_S = 60.0


# ── rates ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@commands
def rates(seconds: float = 3.0, payload: Annotated[int, "bytes of a task"] = 1024) -> Result:
    """Leases a second and dispatch latency of a broker on one core, with its journal on disk and in memory.

    A client on another core plays one producer and one worker with plain DEALERs, so that what is measured is the
    broker. Latency is from the send of a result to the arrival of the task that it sets free, at credit 1.
    """
    os.sched_setaffinity(0, {CORES[-1]})
    rows = []
    for journal in ("", IN_MEMORY):
        for credit in (1, 8, 64):
            with tempfile.TemporaryDirectory() as folder:
                options = broker_options(Path(folder), journal=journal)
                with broker_process(options, CORES[0]) as broker:
                    waits, rate = _drive(options, credit, os.urandom(payload), seconds)
                    used = cpu_s(broker)
            row = {"journal": not journal, "credit": credit, "leases_per_s": rate}
            row["cpu_us_per_lease"] = 1e6 * used / len(waits)
            if credit == 1:  # with more in flight it measures the queue, not the broker
                p50, p99 = percentiles(waits[len(waits) // 10 :], 50, 99)
                row |= {"p50_ms": 1e3 * p50, "p99_ms": 1e3 * p99}
            rows.append(row)
            say(row)
    return {"payload": payload, "rows": rows}


def _drive(options: BrokerOptions, credit: int, payload: bytes, seconds: float) -> tuple[list[float], float]:
    """How long each lease was waited for after the result before it, and leases a second from the first one on."""
    context: zmq.Context[Socket] = zmq.Context()
    producer = connect_dealer(context, options.submit_address, b"producer")
    work = connect_dealer(context, options.work_address, secrets.token_hex(8).encode())
    work.send_multipart(framing.encode(msg.Hello("bench", secrets.token_hex(4), ["compile"], credit)))
    submitted, waits = 0, list[float]()
    began = answered = beat = time.perf_counter()
    while (now := time.perf_counter()) < began + seconds:
        if not waits:  # the broker still starts
            began = answered = now
        for number in range(submitted, len(waits) + AHEAD):
            submit = msg.Submit(f"g{number:07d}.r0.t0", "compile", f"g{number // 8}")
            producer.send_multipart(framing.encode(submit, [payload]))
        submitted = len(waits) + AHEAD
        drain(producer)
        work.poll(100)
        for frames in drain(work):
            task, _ = framing.decode(frames)
            if isinstance(task, msg.Task):
                waits.append(time.perf_counter() - answered)
                work.send_multipart(framing.encode(msg.Result(task.task_id, task.lease_id), [b"report"]))
                answered = time.perf_counter()
        if now > beat + 1.0:
            beat = now
            work.send_multipart(framing.encode(msg.Beat(credit)))
    rate = len(waits) / (time.perf_counter() - began)
    context.destroy(linger=0)
    return waits, rate


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
