"""Frames that no honest process sends, against a live keyed broker."""

from __future__ import annotations

import asyncio
import json
import multiprocessing as mp
import random
import secrets
import socket as sockets
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import zmq

from benchmarks.harness import Result, broker_process, percentiles
from kbrl_async.keyring import Keyring, client_keys
from protocols import framing
from protocols import messages as msg
from protocols.auth import PeerLimits, Role
from protocols.sockets import MAX_REMOTE_BYTES, ClientKeys, Socket, connect_dealer
from services.broker.options import BrokerOptions
from services.runtime import HandlerOutcome, Producer, Worker
from services.runtime.channel import drain
from tests.ports import free_port

HOST = "0.0.0.0"
CALM_S = 4.0
BATCH = 500
LIMITS = PeerLimits(messages_per_s=20_000.0, messages_burst=20_000.0)
"""Ten times the default: the rate limit alone would spare the checks behind it nine frames of ten."""
Attack = Callable[[random.Random, msg.Task], Iterator[list[bytes]]]


# ── hostile frames of a stolen bench key ──────────────────────────────────────────────────────────────────────────


def honest_samples() -> list[msg.Message]:
    lease = "1.1:bench:t1"
    return [
        msg.Hello("host7.9", "a1", ["bench"], 1), msg.Beat(1, [lease]), msg.Result("t1", lease, "score"),
        msg.Nack(lease, "no"), msg.Bye(), msg.Submit("t1", "generate", "g1"), msg.Retire("g1"),
        msg.QuietRequest("q", "gpu", 1.0), msg.Paused("q"), msg.StatusRequest("x"),
    ]  # fmt: skip


def malformed(rng: random.Random, _: msg.Task) -> Iterator[list[bytes]]:
    samples = [framing.encode(message) for message in honest_samples()]
    while True:
        prefix, header = rng.choice(samples)
        kind = rng.randrange(5)
        if kind == 0:
            yield [rng.randbytes(2), header]
        elif kind == 1:
            yield [prefix, rng.randbytes(rng.randrange(1, 60))]
        elif kind == 2:
            spot = rng.randrange(len(header))
            # 0xc1 is never valid msgpack, so no mutation is a message by chance
            yield [prefix, header[:spot] + b"\xc1" + header[spot + 1 :]]
        elif kind == 3:
            yield [prefix, b"\x91" * 2000 + b"\x00"]
        else:
            yield [b"\x01\xff", header]


def truncated(rng: random.Random, _: msg.Task) -> Iterator[list[bytes]]:
    samples = [framing.encode(message) for message in honest_samples()]
    while True:
        prefix, header = rng.choice(samples)
        yield rng.choice(([], [b""], [prefix], [prefix[:1], header], [prefix, header[: rng.randrange(len(header))]]))


def replayed(rng: random.Random, caught: msg.Task) -> Iterator[list[bytes]]:
    """What was true once, or is of somebody else: another's lease and route, ended tasks, old greetings."""
    ended = msg.Result(caught.task_id, caught.lease_id, "score")
    while True:
        yield framing.encode(ended, [b"forged"])
        yield framing.encode(msg.Nack(caught.lease_id, "not mine"))
        yield framing.encode(msg.Result(f"honest-{rng.randrange(10_000)}", "1.1.00:bench:t", "score"), [b"forged"])
        yield framing.encode(msg.Hello("honest.1", "a1", ["bench"], 1))
        yield framing.encode(msg.Submit(f"forged-{rng.randrange(100)}", "train", "g"), [b"batch"])
        yield framing.encode(msg.Retire("g"))


def oversized(rng: random.Random, caught: msg.Task) -> Iterator[list[bytes]]:
    big = msg.Result(caught.task_id, caught.lease_id, "score")
    while True:
        yield framing.encode(big, [b"x"] * (framing.MAX_PAYLOAD_FRAMES + 1 + rng.randrange(8)))
        for _ in range(60):
            yield [framing.encode(big)[0], b"\xc6" + struct.pack(">I", 1 << 31) + b"x" * rng.randrange(200)]
            yield framing.encode(msg.Hello("host7.9", "a" * 600, ["bench"], 1))
            yield framing.encode(msg.Beat(2**60, ["1.1:bench:t"] * 100))
            yield framing.encode(big, [b"a", b"b"])


ATTACKS: dict[str, Attack] = {
    "malformed": malformed, "truncated": truncated, "replayed": replayed, "oversized": oversized,
}  # fmt: skip


class Attacker:
    """A stolen bench key that greets properly and then sends nothing that may be admitted."""

    def __init__(self, context: zmq.Context[Socket], address: str, keys: ClientKeys) -> None:
        self.dealer = connect_dealer(context, address, secrets.token_hex(8).encode(), keys)
        self.dealer.setsockopt(zmq.SNDTIMEO, 20_000)

    def send(self, frames: list[bytes]) -> None:
        self.dealer.send_multipart(frames or [b""])

    def drain(self) -> int:
        return sum(len(batch) for batch in iter(lambda: drain(self.dealer), []))


def wrongly_keyed(port: int, count: int, rng: random.Random) -> Counter[str]:
    """Raw TCP: garbage, half a greeting, a NULL handshake, and CURVE with a key that nobody allowed."""
    done: Counter[str] = Counter()
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" * 32
    curve = greeting.replace(b"NULL".ljust(20, b"\0"), b"CURVE".ljust(20, b"\0"))
    for _ in range(count):
        kind = rng.randrange(4)
        payload = (
            rng.randbytes(rng.randrange(1, 400)),
            greeting[: rng.randrange(1, 64)],
            greeting + b"\x04\x19\x05READY" + rng.randbytes(18),
            curve + b"\x04\xc8\x05HELLO" + rng.randbytes(194),
        )[kind]
        try:
            with sockets.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(payload)
            done[("garbage", "half_greeting", "null", "curve_garbage")[kind]] += 1
        except OSError:
            done["refused_by_the_system"] += 1
    return done


# ── honest work ───────────────────────────────────────────────────────────────────────────────────────────────────


class Honest:
    """A producer and a bench with keys of their own; counts what is submitted and finished."""

    def __init__(self, ring: Keyring, submit: str, work: str) -> None:
        self._aggregator = ring.local(Role.AGGREGATOR)
        self._submit, self._work = submit, work
        self._keys = client_keys(ring.folder / "issued" / "bench" / "honest")
        self.finished = 0
        self.forged = 0
        self.submitted = 0
        self.waits: list[float] = []
        self.caught: msg.Task | None = None

    async def run(self, stop: asyncio.Event, done: asyncio.Event) -> None:
        """Produce until `stop`, work until `done`."""

        async def bench(task: msg.Task, frames: list[bytes]) -> HandlerOutcome:
            self.caught = self.caught or task
            return HandlerOutcome("score", [b"report"])

        async def score(task: msg.Task, frames: list[bytes]) -> HandlerOutcome:
            self.finished += 1
            self.forged += frames[1:] != [b"report"] or not task.task_id.startswith("honest-")
            return HandlerOutcome()

        workers = [
            Worker(self._work, "honest.1", ["bench"], 4, bench, keys=self._keys),
            Worker(self._work, "local.agg", ["score"], 8, score, keys=self._aggregator),
        ]
        running = [asyncio.create_task(worker.run(done)) for worker in workers]
        async with Producer(self._submit, keys=self._aggregator) as producer:
            await asyncio.gather(*(self._produce(producer, lane, stop) for lane in range(4)))
        await asyncio.gather(*running)

    async def _produce(self, producer: Producer, lane: int, stop: asyncio.Event) -> None:
        number = 0
        while not stop.is_set():
            began, number = time.perf_counter(), number + 1
            await producer.submit(f"honest-{lane}-{number}", "bench", [b"request"])
            self.submitted += 1
            self.waits.append(time.perf_counter() - began)
            await asyncio.sleep(0.005)


def attack(work: str, port: int, folder: str, total: int, seed: int, caught: msg.Task, out: mp.Queue[object]) -> None:
    """In a process of its own; reports what was sent."""
    rng, sent, answers, strangers = random.Random(seed), Counter[str](), 0, max(1, total // 200)
    with zmq.Context() as context:
        keys = client_keys(Path(folder) / "issued" / "bench" / "host7")
        attackers = {name: Attacker(context, work, keys) for name in ATTACKS}
        streams = {name: make(rng, caught) for name, make in ATTACKS.items()}
        for name, attacker in attackers.items():
            attacker.send(framing.encode(msg.Hello(f"host7.{name}", secrets.token_hex(4), ["bench"], 0)))
        raw = wrongly_keyed(port, strangers // 2, rng)
        stranger = ClientKeys(*zmq.curve_keypair(), keys.server)
        for _ in range(min(50, strangers)):
            uninvited = Attacker(context, work, stranger)
            for message in honest_samples():
                uninvited.send(framing.encode(message))
                sent["uninvited_key"] += 1
        while sum(sent.values()) < total:
            name = rng.choice(list(ATTACKS))
            for frames in (next(streams[name]) for _ in range(BATCH)):
                attackers[name].send(frames)
                sent[name] += 1
            answers += attackers[name].drain()
        attackers["oversized"].dealer.send(b"x" * (MAX_REMOTE_BYTES + 1))
        raw += wrongly_keyed(port, strangers // 2, rng)
        answers += _wait_until_quiet(list(attackers.values()))
        context.destroy(linger=0)
    out.put((sent, raw, answers))


def _wait_until_quiet(attackers: list[Attacker]) -> int:
    """Read on until what was sent has likely arrived. Closing with a backlog would trip libzmq's heartbeat."""
    answers, began = 0, time.perf_counter()
    quiet_since = began
    while time.perf_counter() - quiet_since < 2.0 and time.perf_counter() - began < 30.0:
        came = sum(attacker.drain() for attacker in attackers)
        answers += came
        quiet_since = time.perf_counter() if came > len(attackers) else quiet_since
        time.sleep(0.05)
    return answers


async def hostile(frames: int = 1_000_000, seed: int = 0) -> Result:
    """Malformed, truncated, replayed, oversized and wrongly keyed frames, beside honest work.

    An honest producer and bench keep a stream of tasks going all the time; the attackers hold a stolen bench key, speak
    the protocol without one, or write raw bytes to the port. At the end the ledger's counters must be those of the
    honest work alone. The anchor is the honest rate before the attack.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ring = Keyring(folder / "keys")
        for role in Role:
            ring.new(role, "local")
        for holder in ("honest", "host7"):
            ring.new(Role.BENCH, holder)
        submit, work = (f"tcp://{HOST}:{port}" for port in (free_port(), free_port()))
        with broker_process(BrokerOptions(name, submit, work, keys=str(ring.folder), limits=LIMITS)) as broker:
            honest, stop, done = Honest(ring, submit, work), asyncio.Event(), asyncio.Event()
            working = asyncio.create_task(honest.run(stop, done))
            while honest.finished < 20:
                await asyncio.sleep(0.05)
            found = await _under_attack(honest, broker, work, ring.folder, frames, seed)
            stop.set()
            while honest.finished < honest.submitted:
                await asyncio.sleep(0.05)
            done.set()
            await working
            await asyncio.sleep(1.5)  # the broker writes its figures once a second
            alive = broker.is_running() and broker.status() != psutil.STATUS_ZOMBIE
            line = json.loads((folder / "metrics" / "system.jsonl").read_bytes().splitlines()[-1])
    counters, gate = line["counters"], line["gate"]
    # Every result of a bench and every score of the aggregator is one honest result; a forged one would be more.
    admitted = counters["submitted"] - honest.submitted + counters["results"] - 2 * honest.finished
    is_right = alive and honest.forged == 0 and admitted == 0 and counters["nacked"] == 0
    return {
        "ok": is_right and found["honest_per_s"]["during"] > 0, **found, "seed": seed, "broker_alive": alive,
        "frames_refused": counters["malformed"] + sum(gate["refused"].values()),
        "forged_results": honest.forged, "admitted": admitted,
        "honest_submitted": honest.submitted, "honest_finished": honest.finished,
        "ledger": {key: counters[key] for key in ("submitted", "finished", "results", "nacked", "malformed")},
        "gate": gate,
    }  # fmt: skip


async def _under_attack(
    honest: Honest, broker: psutil.Process, work: str, keys: Path, frames: int, seed: int
) -> Result:
    """What was sent, and the honest rate and the broker's size before, during and after."""
    calm, calm_waits = await _rate(honest, CALM_S)
    rss, fds = broker.memory_info().rss, broker.num_fds()
    assert honest.caught is not None
    spawn = mp.get_context("spawn")
    out: mp.Queue[tuple[Counter[str], Counter[str], int]] = spawn.Queue()
    port = int(work.rpartition(":")[2])
    attacker = spawn.Process(target=attack, args=(work, port, str(keys), frames, seed, honest.caught, out))
    began, before, first = time.perf_counter(), honest.finished, len(honest.waits)
    attacker.start()
    while attacker.is_alive() and out.empty():
        await asyncio.sleep(0.1)
    lasted = time.perf_counter() - began
    if out.empty():
        raise SystemExit(f"the attacker died with code {attacker.exitcode}")
    sent, raw, answers = out.get()
    attacker.join()
    under, waits = (honest.finished - before) / lasted, honest.waits[first:]
    after, _ = await _rate(honest, CALM_S)
    return {
        "frames": sum(sent.values()), "by_kind": sent, "raw_connections": raw, "answers_to_attackers": answers,
        "seconds": lasted, "frames_per_s": sum(sent.values()) / lasted,
        "honest_per_s": {"before": calm, "during": under, "after": after},
        "submit_p99_ms": {"before": _p99_ms(calm_waits), "during": _p99_ms(waits)},
        "broker_rss_mb": {"before": rss >> 20, "after": broker.memory_info().rss >> 20},
        "broker_fds": {"before": fds, "after": broker.num_fds()},
    }  # fmt: skip


async def _rate(honest: Honest, seconds: float) -> tuple[float, list[float]]:
    began, before, first = time.perf_counter(), honest.finished, len(honest.waits)
    await asyncio.sleep(seconds)
    return (honest.finished - before) / (time.perf_counter() - began), honest.waits[first:]


def _p99_ms(waits: list[float]) -> float:
    return 1000 * percentiles(waits, 99)[0]
