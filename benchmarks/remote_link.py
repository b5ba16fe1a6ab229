"""What a long line costs: a verifier host behind 50 ms and 1 % loss, each way, against the same host beside us.

    python -m benchmarks.remote_link [--candidates 60] [--rounds 3] [--partition 60] [--pretend [--fixed]]

::

    this process: producer ─▶ broker ─▶ scorer        router: delay, loss, cut          a network namespace
                    └──────────── CURVE over TCP ─────────────▶ ◀──────── kbrl worker compile, kbrl worker bench

A stream of the small policy's kind of answers, right and wrong, is built, verified and timed for real; artifacts travel
by hash. Every window of the stream holds the same candidates; the line is near and far in turn, and the ratio of the
times is the result, so that others on the machine hit both alike. Then the line is cut in the middle of a window and
heals. At the end every candidate must have been scored exactly once, none for a fault of ours. Needs root and
`/dev/net/tun`. The last line is JSON; exit code 1 where something was lost or came twice.

`--pretend`: workers that sleep instead of computing (a farm with two places of 60 ms, a bench of 30 or 250 ms, 20 KB an
artifact), so that the line is all that is measured, also on a machine that others use. `--fixed`: as they were before
they looked at the line, with one task waiting and artifacts fetched by whoever needs them.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import platform
import random
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec
import zmq

from kbrl_async.kernels.problems.loading import load_suite
from kbrl_async.keyring import Keyring, client_keys
from kbrl_async.lab.small_policy.author import Author, Habits
from kbrl_async.lab.small_policy.families.source import render_answer
from kbrl_async.lab.small_policy.specs import SPECS
from kbrl_async.rollouts.prompts import extract
from kbrl_async.runs.config import Config, agreed
from protocols import messages as msg
from protocols.auth import Role
from protocols.limits import LedgerOptions
from protocols.prefetch import Prefetch
from protocols.records import BenchReport, Candidate, Generation, Problem, RolloutRequest, SamplingParams
from services.broker.options import BrokerOptions
from services.broker.server import Broker
from services.runtime import Outcome, Producer, Worker
from tests.links import Host

IN_FLIGHT = 48
encode = msgspec.msgpack.encode
SLOPPY = Habits(*(0.06,) * 8, fast=0.5)  # type: ignore[misc]
"""About four answers in ten carry a slip, as those of a policy in training."""


def material(count: int) -> list[tuple[Problem, str]]:
    """The same problems and answers for everybody who asks."""
    rng = random.Random(7)
    found: list[tuple[Problem, str]] = []
    problems = [problem for problem in load_suite(levels=(1, 2)) if problem.problem_id in SPECS]
    while len(found) < count:
        problem = rng.choice(problems)
        spec, author = SPECS[problem.problem_id], Author(rng, SLOPPY)
        module = spec.module()
        source = extract(render_answer(module, spec.answer(author), author)).source
        if source:
            found.append((problem, source))
    return found


class Stream:
    """Submits without end, `IN_FLIGHT` at a time, and keeps when each candidate was scored."""

    def __init__(self, window: list[tuple[Problem, str]]) -> None:
        self.window = window
        self.scored: list[float] = []
        self.seen: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.submitted = 0
        self.closing = False
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._news = asyncio.Event()

    async def submit(self, producer: Producer) -> None:
        while True:
            await self._room.acquire()
            if self.closing:
                return
            name = f"g{self.submitted}.r0"
            await producer.submit(name, "compile", self._record(self.submitted, name), name, needs="c")
            self.submitted += 1

    async def close(self, submitting: asyncio.Task[None]) -> None:
        """Submit no more, and wait for what was submitted."""
        self.closing = True
        self._room.release()
        await submitting
        await self.until(self.submitted)

    def _record(self, number: int, name: str) -> list[bytes]:
        problem, source = self.window[number % len(self.window)]
        fresh = source.replace("#include <math.h>", f"#include <math.h>\n/* {number} */", 1)  # no cache knows it
        request = RolloutRequest(name, name, problem, "", "c", SamplingParams(64))
        return [encode(request), encode(Generation(0, [1], [2], [-0.5], "", "stop", Candidate(fresh, "c")))]

    async def score(self, task: msg.Task, frames: list[bytes]) -> Outcome:
        self.seen[task.task_id] += 1
        is_judged = len(frames) == 4 and frames[3]
        fault = msgspec.msgpack.decode(frames[3], type=BenchReport).verdict.fault if is_judged else "-"
        self.ends[str(task.status) if task.status != msg.Status.OK else str(fault)] += 1
        self.scored.append(time.monotonic())
        self._room.release()
        self._news.set()
        return Outcome()

    async def until(self, count: int) -> float:
        while len(self.scored) < count:
            self._news.clear()
            await self._news.wait()
        return self.scored[count - 1]


class Site:
    """The run's side: broker for all addresses, producer and scorer."""

    def __init__(self, folder: Path) -> None:
        self.ring = Keyring(folder / "keys")
        self.issued = {role: self.ring.new(role, f"away-{role}") for role in (Role.COMPILE, Role.BENCH)}
        self.ring.new(Role.AGGREGATOR, "local")
        any_port, ledger = "tcp://0.0.0.0:*", LedgerOptions(settings=agreed.said(Config()))
        self.broker = Broker(
            BrokerOptions(str(folder), "tcp://127.0.0.1:*", any_port, keys=str(self.ring.folder), ledger=ledger)
        )

    async def open(self) -> tuple[str, str]:
        self._serving = asyncio.create_task(self.broker.run())
        while not hasattr(self.broker, "ledger"):
            await asyncio.sleep(0.01)
        ends = [router.socket.getsockopt(zmq.LAST_ENDPOINT) for router in self.broker._bound]
        submit, work = (end.rstrip(b"\0").decode() for end in ends if isinstance(end, bytes))
        return submit, work

    async def close(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)


async def pretend(kind: str, address: str, keys: str, *, fixed: bool) -> None:
    """A farm or a bench that sleeps, with artifacts that travel."""
    stop, times = asyncio.Event(), itertools.cycle((0.03, 0.25, 0.25, 0.03, 0.03, 0.25))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    made: dict[str, bytes] = {}

    async def hand_over(outcome: Outcome) -> None:
        await worker.transfers.send(made.pop(outcome.frames[0].decode()))

    async def fetch(_: msg.Task, frames: list[bytes]) -> None:
        await worker.transfers.fetch(frames[2].decode())

    async def build(_: msg.Task, __: list[bytes]) -> Outcome:
        await asyncio.sleep(0.06)
        content = secrets.token_bytes(20_000)
        name = hashlib.sha256(content).hexdigest()
        made[name] = content
        outcome = Outcome("bench", [name.encode()])
        if fixed:
            await hand_over(outcome)
        return outcome

    async def judge(task: msg.Task, frames: list[bytes]) -> Outcome:
        if fixed:
            await fetch(task, frames)
        await asyncio.sleep(next(times))
        return Outcome("score", [b""])

    is_farm = kind == "compile"
    places = 2 if is_farm else 1
    worker = Worker(
        address, f"away-{kind}.1", [kind], places + 1, build if is_farm else judge, concurrency=places,
        keys=client_keys(keys), prefetch=None if fixed else Prefetch(places),
        before=None if fixed or is_farm else fetch, after=hand_over if is_farm and not fixed else None,
    )  # fmt: skip
    await worker.run(stop)


def start_worker(host: Host, kind: str, folder: Path, address: str, keys: Path, args: argparse.Namespace) -> None:
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KBRL_")}
    real = ("kbrl_async", "worker", kind, "--connect", address, "--keys", str(keys), f"cache_path={folder / 'cache'}")
    fixed = ("--fixed",) if args.fixed else ()
    pretended = ("benchmarks.remote_link", *fixed, "--be", kind, address, str(keys))
    command = (sys.executable, "-m", *(pretended if args.pretend else real))
    host.start(*command, environment={**environment, "OMP_NUM_THREADS": "1"}, output=folder / "output")


async def measure(stream: Stream, host: Host, args: argparse.Namespace) -> list[tuple[float, float]]:
    """Rates near and far, one pair a round, after a window to warm up. The order within a round changes."""
    size = len(stream.window)
    began = await stream.until(size)
    rates: list[tuple[float, float]] = []
    done = size
    for number in range(args.rounds):
        pair = {}
        for is_far in (False, True) if number % 2 == 0 else (True, False):
            host.link.change(delay_s=args.delay / 1e3 if is_far else 0.0, loss=args.loss / 100 if is_far else 0.0)
            done += size
            ended = await stream.until(done)
            pair[is_far] = size / (ended - began)
            began = ended
        rates.append((pair[False], pair[True]))
        print(f"round {number + 1}: near {pair[False]:.2f}/s, far {pair[True]:.2f}/s", flush=True)
    return rates


async def cut(stream: Stream, host: Host, seconds: float, rate: float) -> dict[str, float]:
    """Partition in full flow; how long after it has healed results come again, and as fast as before."""
    await stream.until(len(stream.scored) + 5)
    host.link.partition()
    began = len(stream.scored)
    await asyncio.sleep(seconds)
    through = len(stream.scored) - began
    healed = time.monotonic()
    host.link.heal()
    at = len(stream.scored)
    first = await stream.until(at + 1)
    count = max(5, int(10 * rate))
    await stream.until(at + count)
    steady = (count - 1) / (stream.scored[at + count - 1] - first)
    print(f"cut for {seconds:.0f} s: first result {first - healed:.1f} s after it healed", flush=True)
    return {"cut_s": seconds, "scored_while_cut": through, "flows_after_s": first - healed, "rate_after": steady}


async def play(folder: Path, host: Host, args: argparse.Namespace) -> dict[str, object]:
    site, stream = Site(folder), Stream(material(args.candidates))
    submit, work = await site.open()
    keys = site.ring.local(Role.AGGREGATOR)
    scorer = Worker(work, "local.agg", ["score"], 64, stream.score, keys=keys)
    scoring = asyncio.create_task(scorer.run())
    address = f"tcp://{host.link.here}:{work.rpartition(':')[2]}"
    for role, issued in site.issued.items():
        start_worker(host, str(role), folder / str(role), address, issued, args)
    result: dict[str, object] = {}
    async with Producer(submit, keys=keys) as producer:
        submitting = asyncio.create_task(stream.submit(producer))
        rates = await measure(stream, host, args)
        near, far = (statistics.mean(column) for column in zip(*rates, strict=True))
        result |= {"near_per_s": near, "far_per_s": far, "ratio": far / near}
        result |= {"ratios": [round(f / n, 3) for n, f in rates]}
        if args.partition:
            host.link.change(delay_s=args.delay / 1e3, loss=args.loss / 100)
            result |= await cut(stream, host, args.partition, far)
        await stream.close(submitting)
    await asyncio.sleep(1.0)
    counters = site.broker.ledger.counters
    scorer.stop()
    await scoring
    await site.close()
    names = {f"g{number}.r0" for number in range(stream.submitted)}
    result |= {"submitted": stream.submitted, "finished": counters["finished"], "ends": dict(stream.ends)}
    result |= {name: counters[name] for name in ("lost", "expired", "duplicates", "nacked", "poisoned", "revoked")}
    result["lost_or_twice"] = len(names ^ stream.seen.keys()) + sum(count > 1 for count in stream.seen.values())
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--candidates", type=int, default=60, help="in each window")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of a near and a far window")
    parser.add_argument("--delay", type=float, default=50.0, help="milliseconds, each way")
    parser.add_argument("--loss", type=float, default=1.0, help="percent, each way")
    parser.add_argument("--partition", type=float, default=60.0, help="seconds; 0: none")
    parser.add_argument("--pretend", action="store_true", help="workers sleep instead of computing")
    parser.add_argument("--fixed", action="store_true", help="with --pretend: workers that do not look at the line")
    parser.add_argument("--be", nargs=3, metavar=("KIND", "ADDRESS", "KEYS"), help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, help="folder for everything, which stays")
    args = parser.parse_args()
    if args.be:
        asyncio.run(pretend(*args.be, fixed=args.fixed))
        return 0
    host = Host(1, seed=11)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            host.open()
            result = asyncio.run(play(args.keep or Path(scratch), host, args))
            result["packets"] = host.link.counts()
        finally:
            host.close()
    machine = {"machine": platform.machine(), "cores": os.cpu_count()}
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in result.items()}
    print(
        json.dumps(
            {
                "benchmark": "remote_link",
                "workers": "pretended" if args.pretend else "real",
                "delay_ms": args.delay,
                "loss": args.loss,
                **machine,
                **rounded,
            }
        )
    )
    wrong = result["lost_or_twice"] or result["poisoned"] or result["submitted"] != result["finished"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
