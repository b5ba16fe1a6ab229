"""Leases a second and dispatch latency of one broker on one core, with its journal on disk and in memory.

    python benchmarks/broker.py [--seconds 3] [--payload 1024]

The broker runs in a process of its own, pinned to one core; a client process on another core plays one producer and
one worker with plain DEALERs, so that what is measured is the broker. A task is submitted, leased, answered and ended.
Latency is from the send of a result or submission to the arrival of the task that it sets free, at credit 1.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import zmq

from protocols import framing
from protocols import messages as msg
from protocols.ledger import LedgerOptions, StageOptions
from protocols.sockets import Socket, connect_dealer
from services.broker.options import IN_MEMORY, BrokerOptions
from services.runtime.addresses import addresses

CREDITS = (1, 8, 64)
AHEAD = 512
"""Submissions kept queued, so that the worker never waits for the producer."""


def serve(options: BrokerOptions, core: int) -> None:
    import uvloop

    from services.broker.server import Broker

    os.sched_setaffinity(0, {core})
    uvloop.run(Broker(options).run())


class Client:
    """A producer and a worker in one thread."""

    def __init__(self, options: BrokerOptions, credit: int, payload: int) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._submit = connect_dealer(self._context, options.submit_address, b"producer")
        self._work = connect_dealer(self._context, options.work_address, os.urandom(8).hex().encode())
        self._payload = [os.urandom(payload)]
        self._credit = credit
        self._submitted = 0
        self.leases = 0
        self.waits: list[float] = []

    def run(self, seconds: float) -> float:
        hello = msg.Hello("bench", os.urandom(4).hex(), ["compile"], self._credit)
        self._work.send_multipart(framing.encode(hello))
        self._top_up(AHEAD)
        poller = zmq.Poller()
        poller.register(self._submit, zmq.POLLIN)
        poller.register(self._work, zmq.POLLIN)
        started = time.perf_counter()
        self._answered_at = started
        beat_at = started
        while (now := time.perf_counter()) < started + seconds:
            poller.poll(100)
            self._answer()
            self._top_up(self._drain_acks())
            if now > beat_at:
                beat_at = now + 1.0
                self._work.send_multipart(framing.encode(msg.Beat(self._credit)))
        elapsed = time.perf_counter() - started
        self._context.destroy(linger=0)
        return self.leases / elapsed

    def _top_up(self, count: int) -> None:
        for _ in range(count):
            self._submitted += 1
            submit = msg.Submit(f"g{self._submitted:07d}.r0.t0", "compile", f"g{self._submitted // 8}")
            self._submit.send_multipart(framing.encode(submit, self._payload))

    def _drain_acks(self) -> int:
        """One more submission for each task that has ended: the queue's depth stays what it is."""
        try:
            while True:
                self._submit.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            ended, self._ended = self._ended, 0
            return ended

    _ended = 0

    def _answer(self) -> None:
        try:
            while True:
                message, _ = framing.decode(self._work.recv_multipart(zmq.NOBLOCK))
                if isinstance(message, msg.Task):
                    self._finish(message)
        except zmq.Again:
            return

    def _finish(self, task: msg.Task) -> None:
        now = time.perf_counter()
        self.waits.append(now - self._answered_at)
        self.leases += 1
        self._ended += 1
        self._work.send_multipart(framing.encode(msg.Result(task.task_id, task.lease_id), [b"report"]))
        self._answered_at = time.perf_counter()


def measure(credit: int, journal_on: bool, seconds: float, payload: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        found = addresses(Path(folder))
        ledger = LedgerOptions(compile=StageOptions(ttl_s=60.0, queue_limit=100_000), finished_limit=100_000)
        options = BrokerOptions(
            folder, found.submit, found.work, journal="" if journal_on else IN_MEMORY, ledger=ledger
        )
        broker = mp.get_context("spawn").Process(target=serve, args=(options, 0))
        broker.start()
        try:
            client = Client(options, credit, payload)
            rate = client.run(seconds)
            used = psutil.Process(broker.pid).cpu_times()
        finally:
            broker.terminate()
            broker.join()
    waits = sorted(client.waits[len(client.waits) // 10 :])
    return {"leases_per_s": round(rate), "p50_ms": _quantile(waits, 50), "p99_ms": _quantile(waits, 99)} | {
        "cpu_us_per_lease": round(1e6 * (used.user + used.system) / client.leases, 1)
    }


def _quantile(values: list[float], percent: int) -> float:
    return round(1000 * statistics.quantiles(values, n=100)[percent - 1], 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--payload", type=int, default=1024)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, zmq {zmq.__version__}"
    print(machine)
    rows: list[dict[str, object]] = []
    for journal_on in (True, False):
        for credit in CREDITS:
            row = measure(credit, journal_on, arguments.seconds, arguments.payload)
            if credit != 1:
                del row["p50_ms"], row["p99_ms"]  # with more in flight it measures the queue, not the broker
            rows.append({"journal": journal_on, "credit": credit, **row})
            print(rows[-1])
    print(json.dumps({"benchmark": "broker", "machine": machine, "payload": arguments.payload, "rows": rows}))


if __name__ == "__main__":
    main()
