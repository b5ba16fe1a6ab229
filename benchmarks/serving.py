"""What the HTTP service adds to a verification, with clients that misbehave. `python -m benchmarks.serving clients`

::

    this process: honest and bad clients over TCP ──▶ a service process whose executor only sleeps
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import secrets
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import psutil

from benchmarks.harness import Commands, Result, command, cpu_s, percentiles
from services.verification.lag import Lag

commands = Commands("serving", __doc__)
BAD = ("malformed", "ten_megabytes", "hanging_problem", "vanishing", "unknown_key")
FULL_S = 1.0
SOURCE = "import torch\n\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x  # {}\n"
RESULT_S = 0.05
BAD_PAUSE_S = 1.0
"""A bad client asks twice as often as an honest one."""


@commands
async def clients(
    honest: Annotated[int, "clients that ask, wait, and ask again"] = 180,
    bad: Annotated[int, "clients that misbehave, each in one of five ways"] = 20,
    seconds: Annotated[float, "of asking"] = 20.0,
    pause_s: Annotated[float, "between an honest client's answer and its next question, in the mean"] = 2.0,
) -> Result:
    """The service's own share of an answer's time: all of the time that it has a question, less the work.

    In the middle the journal's disk is full for a second: honest clients are told so and ask again, and what was found
    meanwhile is told once there is room (`held_while_full`, no share of ours). `alone` is the same without bad clients.
    Beside the own share stand what is in it and what is not: how late the event loop came to what was due, and how much
    of that it computed itself (`own_p99`); what clients saw, with what their own process was late by; and which share
    of a second service and clients could run and had no core.
    """
    alone = await _measured(honest, 0, seconds / 2, pause_s)
    beside = await _measured(honest, bad, seconds, pause_s)
    return {
        "ok": not beside.unclear and beside.right == beside.asked and beside.figures()["own_p99_ms"] <= 20.0,
        "answers": len(beside.own_ms),
        **beside.figures(),
        "alone": alone.figures(),
        "answers_per_s": len(beside.own_ms) / seconds,
        "asked_again_while_full": beside.full,
        "held_while_full": beside.held,
        "honest_asked": beside.asked,
        "honest_answered": beside.right,
        "bad_answers": dict(sorted(beside.bad.items())),
        "unclear": beside.unclear,
    }


class Answered(NamedTuple):
    code: int
    body: dict[str, Any]
    own_ms: float
    """That the service says it had the question for, beyond the work."""


class ServingFigures:
    def __init__(self) -> None:
        self.own_ms: list[float] = []
        self.seen_ms: list[float] = []
        self.bad: dict[str, int] = Counter()
        self.asked = self.right = self.full = self.held = 0
        self.full_at = float("inf")
        self.unclear: list[str] = []
        self.cpu_s = self.seconds = 0.0
        self.waited_s: dict[str, float] = {}
        self.lag_ms: dict[str, float] = {}
        self.clients_lag_ms: dict[str, float] = {}

    def figures(self) -> Result:
        own, seen = percentiles(self.own_ms, 50, 99), percentiles(self.seen_ms, 50, 99)
        return {
            "own_p50_ms": own[0],
            "own_p99_ms": own[1],
            "loop_lag_ms": self.lag_ms,
            "seen_p50_ms": seen[0],
            "seen_p99_ms": seen[1],
            "clients_lag_ms": self.clients_lag_ms,
            "processor_ms_an_answer": 1000 * self.cpu_s / max(1, len(self.own_ms)),
            "waits_for_a_core": {who: waited_s / self.seconds for who, waited_s in self.waited_s.items()},
        }


def _waited_s(pid: int) -> float:
    """That the threads of a process could have run, and had no core."""
    return sum(int(path.read_text().split()[1]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def _measured(honest: int, bad: int, seconds: float, pause_s: float) -> ServingFigures:
    found = ServingFigures()
    async with _service() as (port, key, server):
        words = command("serving", "misbehave", port, key, bad, seconds)
        others = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        assert others.stdout is not None
        await others.stdout.readline()
        process = psutil.Process(server.pid)
        began_at, began_cpu = time.monotonic(), cpu_s(process)
        until, pids = began_at + seconds, {"service": server.pid, "clients": os.getpid()}
        waited = {who: _waited_s(pid) for who, pid in pids.items()}
        lag = Lag()
        watching = asyncio.create_task(lag.watch())
        group = [_honest(found, port, key, until, pause_s, number) for number in range(honest)]

        def fill() -> None:
            found.full_at = time.perf_counter()
            server.send_signal(signal.SIGUSR1)

        full = asyncio.get_running_loop().call_later(seconds / 2, fill)
        await asyncio.gather(*group)
        full.cancel()
        found.cpu_s, found.seconds = cpu_s(process) - began_cpu, time.monotonic() - began_at
        found.waited_s = {who: _waited_s(pid) - waited[who] for who, pid in pids.items()}
        found.lag_ms, found.clients_lag_ms = await _lag(port), lag.percentiles()
        watching.cancel()
        met = json.loads((await others.communicate())[0])
        found.bad, found.unclear = met["answers"], [*found.unclear, *met["unclear"]]
    return found


@commands.inner
async def misbehave(port: int, key: str, count: int, seconds: float, /) -> None:
    """The clients that do, in a process of their own: what they do to themselves is nobody's share."""
    found = ServingFigures()
    print(flush=True)
    until = time.monotonic() + seconds
    await asyncio.gather(*(_bad(found, port, key, until, BAD[number % len(BAD)]) for number in range(count)))
    print(json.dumps({"answers": found.bad, "unclear": found.unclear}))


@contextlib.asynccontextmanager
async def _service() -> AsyncIterator[tuple[int, str, asyncio.subprocess.Process]]:
    key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys")
        keys.touch(0o600)
        keys.write_text(f"honest {key}\n")
        words = command("serving", "service", folder)
        server = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        assert server.stdout is not None
        try:
            yield int(await server.stdout.readline()), key, server
        finally:
            server.kill()
            await server.wait()


@commands.inner
def service(folder: Path, /) -> None:
    """A service in `folder` whose executor sleeps; SIGUSR1 fills its disk for a while."""
    import uvloop

    uvloop.run(_service_in(folder))


async def _service_in(folder: Path) -> None:
    from kbrl_async.errors import DiskFull
    from kbrl_async.kernels.funnel.result import Result as Verified
    from kbrl_async.serving.documents import Job, Outcome
    from kbrl_async.serving.journal import FILE, JobJournal
    from kbrl_async.serving.settings import Serve
    from protocols.records import Fault, StageReport, Timing, Verdict
    from services.verification.desk import Desk
    from services.verification.server import listen, serve

    steps = tuple(StageReport(name, Fault.OK, 0.1) for name in ("format", "static", "compile", "full_inputs"))
    right = Verified("p", "c", "cpu", Verdict(Fault.OK, 10, 10), steps, Timing(9, 2.1, 2.0, 2.2, 1.0, 2.1))

    class Sleeps:
        capacity = 64

        async def verify(self, job: Job) -> Outcome:
            await asyncio.sleep(60.0 if "hang" in job.ask.candidate else RESULT_S)
            return Outcome(right)

    class FillsUp(JobJournal):
        full_until = 0.0

        def put(self, job: Job) -> None:
            if time.monotonic() < self.full_until:
                raise DiskFull("no space left for the journal", "Free some")
            super().put(job)

    settings = Serve(port=0, keys=str(Path(folder) / "keys"))
    journal = FillsUp(Path(folder) / FILE, settings.keep)

    def fill() -> None:
        journal.full_until = time.monotonic() + FULL_S

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, fill)
    with listen(settings) as socket, contextlib.closing(journal):
        print(socket.getsockname()[1], flush=True)
        await serve(Desk(Sleeps(), journal, settings), settings, socket, asyncio.Event())


# ── clients ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _honest(found: ServingFigures, port: int, key: str, until: float, pause_s: float, number: int) -> None:
    rng = random.Random(number)
    await asyncio.sleep(rng.uniform(0, pause_s))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asked = 0
    while time.monotonic() < until:
        body = json.dumps({"candidate": SOURCE.format(f"{number} {asked}"), "problem": "L1/13"}).encode()
        asked += 1
        found.asked += 1
        while True:
            began = time.perf_counter()
            answered = await _post(reader, writer, body, key)
            took_ms = 1000 * (time.perf_counter() - began)
            if answered.code == 507:
                found.full += 1
                await asyncio.sleep(rng.uniform(0.1, 0.4))  # as trainers do: all at once they would only meet again
                continue
            break
        if answered.code == 200 and answered.body["ok"]:
            found.right += 1
            if began < found.full_at + FULL_S and time.perf_counter() > found.full_at:
                found.held += 1
            else:
                found.seen_ms.append(took_ms - 1000 * answered.body["seconds"])
                found.own_ms.append(answered.own_ms)
        else:
            found.unclear.append(f"{answered.code} {answered.body}"[:200])
        await asyncio.sleep(rng.expovariate(1 / pause_s))
    writer.close()


async def _bad(found: ServingFigures, port: int, key: str, until: float, how: str) -> None:
    while time.monotonic() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(5.0):
                code, answer, _ = await _misbehave(reader, writer, key, how)
                found.bad[f"{how} {code}"] += 1
                if code and "error" not in answer and code not in (200, 202):
                    found.unclear.append(f"{how} {code} {answer}"[:200])
        writer.close()
        await asyncio.sleep(BAD_PAUSE_S)


async def _misbehave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str, how: str) -> Answered:
    text = f"hang {secrets.token_hex(4)}" if how == "hanging_problem" else SOURCE.format(secrets.token_hex(4))
    body = json.dumps({"candidate": text, "problem": "L1/13", "wait_s": 3.0}).encode()
    if how == "malformed":
        body = b'{"candidate": [[['
    elif how == "ten_megabytes":
        body = b'{"candidate": "' + b"x" * 10_000_000 + b'"}'
    elif how == "unknown_key":
        key = "nobody" * 4
    elif how == "vanishing":
        writer.write(_head(len(body), key) + body[: random.randrange(len(body) + 1)])
        await writer.drain()
        return Answered(0, {}, 0.0)
    return await _post(reader, writer, body, key)


def _head(length: int, key: str) -> bytes:
    return (
        f"POST /v1/verify HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


async def _lag(port: int) -> dict[str, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    lag: dict[str, float] = (await _answer(reader)).body["lag_ms"]
    writer.close()
    return lag


async def _post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes, key: str) -> Answered:
    writer.write(_head(len(body), key))
    for place in range(0, len(body), 1 << 16):
        writer.write(body[place : place + (1 << 16)])
        if len(body) > 1 << 16:
            with contextlib.suppress(ConnectionError):  # it may have refused already, and closed
                await asyncio.wait_for(writer.drain(), 0.5)
    return await _answer(reader)


async def _answer(reader: asyncio.StreamReader) -> Answered:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
    own = re.match(r"own;dur=([\d.]+)", fields.get("server-timing", ""))
    body = json.loads(await reader.readexactly(int(fields["content-length"])))
    return Answered(int(head.split()[1]), body, float(own[1]) if own else 0.0)


if __name__ == "__main__":
    commands.main()
