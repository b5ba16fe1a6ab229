"""Verifiers elsewhere: behind a long line, or of another build. A stream of candidates must be scored, each once.

::

    this process: producer ─▶ broker ─▶ scorer        router: delay, loss, cut          a network namespace
                    └──────────── CURVE over TCP ─────────────▶ ◀──────── kbrl worker compile, kbrl worker bench
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import itertools
import random
import secrets
import signal
import subprocess
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import msgspec

from benchmarks.harness import ONE_THREAD, ROOT, Result, command, environment, in_turn, kbrl_command, packed, say
from kbrl_async.kernels.problems.loading import load_suite
from kbrl_async.keyring import Keyring, client_keys
from kbrl_async.lab.small_policy.author import Author, Habits
from kbrl_async.lab.small_policy.languages import respond
from kbrl_async.lab.small_policy.specs import SPECS
from kbrl_async.rollouts.prompts import extract
from kbrl_async.runs.config import Config, agreed
from protocols import messages as msg
from protocols.auth import Role
from protocols.limits import LedgerOptions
from protocols.prefetch import Prefetch
from protocols.records import BenchReport, BuildReport, Candidate, Generation, Problem, RolloutRequest, SamplingParams
from services.broker.options import BrokerOptions
from services.broker.server import BrokerServer
from services.runtime import HandlerOutcome, Producer, Worker, WorkerOptions
from tests.brokers import endpoints, serving, working
from tests.links import Host

IN_FLIGHT = 48
STAGES = ("compile", "bench")
SLOPPY = Habits(*(0.06,) * 8, fast=0.5)
"""About four answers in ten carry a slip, as those of a policy in training."""


def material(count: int) -> list[tuple[Problem, str]]:
    """The same problems and answers for everybody who asks."""
    rng = random.Random(7)
    problems = [problem for problem in load_suite(levels=(1, 2)) if problem.problem_id in SPECS]
    drawn = (rng.choice(problems) for _ in itertools.count())
    written = ((p, extract(respond(SPECS[p.problem_id], Author(rng, SLOPPY), "c")).source) for p in drawn)
    return list(itertools.islice((one for one in written if one[1]), count))


class Stream:
    """Submits without end, `IN_FLIGHT` at a time, and keeps when each candidate was scored and whose work it was."""

    def __init__(self, count: int) -> None:
        self.window = material(count)
        self.scored: list[float] = []
        self.seen: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.by: Counter[str] = Counter()
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
        return [packed(request), packed(Generation(0, [1], [2], [-0.5], "", "stop", Candidate(fresh, "c")))]

    async def score(self, task: msg.Task, frames: list[bytes]) -> HandlerOutcome:
        self.seen[task.task_id] += 1
        end = str(task.status) if task.status != msg.Status.OK else "-"
        for stage, frame, kind in zip(STAGES, frames[2:], (BuildReport, BenchReport), strict=False):
            if frame:  # pretended workers have nothing to report
                with contextlib.suppress(msgspec.DecodeError):
                    report = msgspec.msgpack.decode(frame, type=kind)
                    self.by[f"{stage} {'new' if report.worker_id.endswith('.2') else 'old'}"] += 1
                    if isinstance(report, BenchReport) and end == "-":
                        end = str(report.verdict.fault)
        self.ends[end] += 1
        self.scored.append(time.monotonic())
        self._room.release()
        self._news.set()
        return HandlerOutcome()

    async def until(self, count: int) -> float:
        while len(self.scored) < count:
            self._news.clear()
            await self._news.wait()
        return self.scored[count - 1]

    def judged(self, broker: BrokerServer) -> Result:
        """Every candidate must have been scored exactly once, none for a fault of ours."""
        counters = broker.ledger.counters
        names = {f"g{number}.r0" for number in range(self.submitted)}
        wrong = len(names ^ self.seen.keys()) + sum(count > 1 for count in self.seen.values())
        return {
            "ok": not wrong and not counters["poisoned"] and self.submitted == counters["finished"],
            "submitted": self.submitted,
            "finished": counters["finished"],
            "lost_or_twice": wrong,
            "malformed": broker.malformed,
            **{name: counters[name] for name in ("lost", "expired", "duplicates", "nacked", "poisoned", "revoked")},
            "ends": self.ends,
        }


class Site:
    """The run's side: a broker for all addresses, with keys for a farm and a bench."""

    def __init__(self, folder: Path) -> None:
        self.ring = Keyring(folder / "keys")
        self.issued = {role: self.ring.new(role, f"away-{role}") for role in (Role.COMPILE, Role.BENCH)}
        self.ring.new(Role.AGGREGATOR, "local")
        ledger = LedgerOptions(settings=agreed.encode(Config()))
        everywhere = ("tcp://127.0.0.1:*", "tcp://0.0.0.0:*")
        self.broker = BrokerServer(BrokerOptions(str(folder), *everywhere, keys=str(self.ring.folder), ledger=ledger))

    @contextlib.asynccontextmanager
    async def streaming(self, stream: Stream) -> AsyncIterator[int]:
        """The stream flows within the block; yields the port for workers. Ends when everything is scored."""
        keys = self.ring.local(Role.AGGREGATOR)
        async with serving(self.broker):
            submit, work = endpoints(self.broker)[:2]
            scorer = Worker(work, "local.agg", ["score"], 64, stream.score, keys=keys)
            async with working(scorer), Producer(submit, keys=keys) as producer:
                submitting = asyncio.create_task(stream.submit(producer))
                yield int(work.rpartition(":")[2])
                await stream.close(submitting)
                await asyncio.sleep(1.0)


def worker_command(kind: str, address: str, keys: Path, home: Path, *more: object) -> list[str]:
    return kbrl_command("worker", kind, "--connect", address, "--keys", keys, *more, f"cache_path={home / 'cache'}")


# ── a long line ───────────────────────────────────────────────────────────────────────────────────────────────────


class NetworkLine(msgspec.Struct, frozen=True):
    """A host behind it, and how bad it is when it is far."""

    host: Host
    delay_s: float
    loss: float

    def far(self, is_far: bool) -> None:
        self.host.link.change(delay_s=self.delay_s if is_far else 0.0, loss=self.loss if is_far else 0.0)


async def remote(
    candidates: Annotated[int, "in each window"] = 60,
    rounds: Annotated[int, "pairs of a near and a far window"] = 3,
    delay: Annotated[float, "milliseconds, each way"] = 50.0,
    loss: Annotated[float, "percent, each way"] = 1.0,
    partition: Annotated[float, "seconds of a cut at the end; 0: none"] = 60.0,
    pretend: Annotated[bool, "workers sleep instead of computing: the line alone is measured"] = False,
) -> Result:
    """What a long line costs: a verifier host behind it, against the same host beside us. Needs root and /dev/net/tun.

    A stream of the small policy's kind of answers, right and wrong, is built, verified and timed for real; artifacts
    travel by hash. Every window holds the same candidates; the line is near and far in turn, and the ratio of the times
    is the result, so that others on the machine hit both alike. Then the line is cut in the middle of a window.
    """
    host = Host(1, seed=11)
    with tempfile.TemporaryDirectory() as scratch:
        folder, line = Path(scratch), NetworkLine(host, delay / 1e3, loss / 100)
        site, stream = Site(folder), Stream(candidates)
        try:
            host.open()
            async with site.streaming(stream) as port:
                for role, keys in site.issued.items():
                    home = folder / str(role)
                    home.mkdir()
                    address = f"tcp://{host.link.here}:{port}"
                    pretended = command("broker", "pretend", role, address, keys)
                    words = pretended if pretend else worker_command(str(role), address, keys, home)
                    host.start(*words, environment=environment(**ONE_THREAD), output=home / "output")
                rates = await _near_and_far(stream, line, rounds)
                near, far = map(fmean, zip(*rates, strict=True))
                healed = {}
                if partition:
                    line.far(True)
                    healed = await _cut(stream, host, partition, far)
            packets = host.link.counts()
        finally:
            host.close()
    return {
        "workers": "pretended" if pretend else "real", "delay_ms": delay, "loss": loss, "near_per_s": near,
        "far_per_s": far, "ratio": far / near, "ratios": [f / n for n, f in rates], "packets": packets,
        **healed, **stream.judged(site.broker),
    }  # fmt: skip


async def _near_and_far(stream: Stream, line: NetworkLine, rounds: int) -> list[tuple[float, float]]:
    """Rates, one pair a round, after a window to warm up."""
    done = size = len(stream.window)
    began = await stream.until(size)
    rates: dict[tuple[int, bool], float] = {}
    for number, is_far in in_turn((False, True), rounds):
        line.far(is_far)
        done += size
        ended = await stream.until(done)
        rates[number, is_far] = size / (ended - began)
        began = ended
        say(f"round {number + 1}, {'far' if is_far else 'near'}: {rates[number, is_far]:.2f}/s")
    return [(rates[number, False], rates[number, True]) for number in range(rounds)]


async def _cut(stream: Stream, host: Host, seconds: float, rate: float) -> dict[str, float]:
    """Partition in full flow; how long after it has healed results come again, and as fast as before."""
    await stream.until(len(stream.scored) + 5)
    host.link.partition()
    began = len(stream.scored)
    await asyncio.sleep(seconds)
    through = len(stream.scored) - began
    healed, at = time.monotonic(), len(stream.scored)
    host.link.heal()
    first = await stream.until(at + 1)
    count = max(5, int(10 * rate))
    last = await stream.until(at + count)
    say(f"cut for {seconds:.0f} s: first result {first - healed:.1f} s after it healed")
    flow = {"flows_after_s": first - healed, "rate_after": (count - 1) / (last - first)}
    return {"cut_s": seconds, "scored_while_cut": through, **flow}


async def pretend(kind: str, address: str, keys: str, /) -> None:
    """A farm with two places of 60 ms or a bench of 30 or 250 ms that sleep, with artifacts of 20 KB that travel."""
    stop, times = asyncio.Event(), itertools.cycle((0.03, 0.25, 0.25, 0.03, 0.03, 0.25))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    made: dict[str, bytes] = {}

    async def hand_over(outcome: HandlerOutcome) -> None:
        await worker.transfers.send(made.pop(outcome.frames[0].decode()))

    async def fetch(_: msg.Task, frames: list[bytes]) -> None:
        await worker.transfers.fetch(frames[2].decode())

    async def build(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
        await asyncio.sleep(0.06)
        content = secrets.token_bytes(20_000)
        name = hashlib.sha256(content).hexdigest()
        made[name] = content
        return HandlerOutcome("bench", [name.encode()])

    async def judge(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
        await asyncio.sleep(next(times))
        return HandlerOutcome("score", [b""])

    is_farm = kind == "compile"
    places = 2 if is_farm else 1
    worker = Worker(
        address, f"away-{kind}.1", [kind], places + 1, build if is_farm else judge,
        WorkerOptions(
            concurrency=places, prefetch=Prefetch(places),
            before=None if is_farm else fetch, after=hand_over if is_farm else None,
        ), keys=client_keys(keys),
    )  # fmt: skip
    await worker.run(stop)


# ── another build ─────────────────────────────────────────────────────────────────────────────────────────────────


async def upgrade(
    old: Annotated[str, "commit of the older build"] = "HEAD",
    candidates: Annotated[int, "that each worker does before the next replacement"] = 24,
) -> Result:
    """Workers of an older build and of today's in one run, replaced one by one while it goes on, forth and back.

    The older build is unpacked by `git archive` (the repository is only read). Broker, producer and scorer are today's,
    on loopback; farm and bench are real `kbrl worker` processes, which end on SIGTERM and are followed by one of the
    other build.
    """
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", old], check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tree:
            tree.extractall(scratch / "old", filter="data")
        (scratch / "site").mkdir()
        site, stream = Site(scratch / "site"), Stream(candidates)
        fleet = _Builds(scratch, site)
        steps = [(stage, build) for build in ("old", "new", "old") for stage in STAGES]
        try:
            async with site.streaming(stream) as port:
                left_s = [await _next(fleet, stream, *step, port, candidates) for step in steps]
        finally:
            fleet.close()
    return {"old": old, "by": stream.by, "drain_s_max": max(left_s), "exits": fleet.exits, **stream.judged(site.broker)}


async def _next(fleet: _Builds, stream: Stream, stage: str, build: str, port: int, candidates: int) -> float:
    """Replaces one worker, and waits until its successor has done its share; how long the one before took to leave."""
    left_s = await asyncio.to_thread(fleet.replace, stage, build, f"tcp://127.0.0.1:{port}")
    goal = stream.by[f"{stage} {build}"] + candidates
    while len(fleet.running) == len(STAGES) and stream.by[f"{stage} {build}"] < goal:
        await asyncio.sleep(0.1)
    say(f"{stage} of the {build} build at work; {len(stream.scored)} scored")
    return left_s


class _Builds:
    """One farm and one bench, each of one build at a time; the ids of new ones end in 2."""

    def __init__(self, scratch: Path, site: Site) -> None:
        self._scratch, self._site = scratch, site
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.exits: Counter[int] = Counter()

    def replace(self, stage: str, build: str, address: str) -> float:
        began = time.monotonic()
        if (before := self.running.pop(stage, None)) is not None:
            before.terminate()
            self.exits[before.wait(30)] += 1
        left_s = time.monotonic() - began
        home, tree = self._scratch / f"{stage}-{build}", ROOT if build == "new" else self._scratch / "old"
        home.mkdir(exist_ok=True)
        variables = environment(PYTHONPATH=str(tree), **ONE_THREAD)
        number = ("--number", "2" if build == "new" else "1", "--folder", home / "worker")
        words = worker_command(stage, address, self._site.issued[Role(stage)], home, *number)
        with (home / "output").open("ab") as output:
            given: dict[str, Any] = {"cwd": tree, "stdout": output, "stderr": subprocess.STDOUT, "env": variables}
            self.running[stage] = subprocess.Popen(words, **given)
        return left_s

    def close(self) -> None:
        for process in self.running.values():
            process.terminate()
            process.wait()
