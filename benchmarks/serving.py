"""What the HTTP service adds to a verification, with clients that misbehave. `python -m benchmarks.serving clients`

::

    this process: honest and bad clients over TCP ──▶ a service process whose executor only sleeps
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import psutil

from benchmarks.harness import Commands, Result, percentiles

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
    """The service's own share of an answer's time: from the question's first byte to the answer's last, less the work.

    In the middle the journal's disk is full for a second: honest clients are told so and ask again. `alone` is the same
    without bad clients.
    """
    alone = await _measured(honest, 0, seconds / 2, pause_s)
    beside = await _measured(honest, bad, seconds, pause_s)
    own = percentiles(beside.own_ms, 50, 99)
    before = percentiles(alone.own_ms, 50, 99)
    return {
        "ok": not beside.unclear and beside.right == beside.asked and own[1] <= 20.0,
        "answers": len(beside.own_ms),
        "own_p50_ms": own[0],
        "own_p99_ms": own[1],
        "alone_p50_ms": before[0],
        "alone_p99_ms": before[1],
        "answers_per_s": len(beside.own_ms) / seconds,
        "processor_ms_an_answer": 1000 * beside.cpu_s / max(1, len(beside.own_ms)),
        "alone_processor_ms_an_answer": 1000 * alone.cpu_s / max(1, len(alone.own_ms)),
        "asked_again_while_full": beside.full,
        "honest_asked": beside.asked,
        "honest_answered": beside.right,
        "bad_answers": dict(sorted(beside.bad.items())),
        "unclear": beside.unclear,
    }


class Found:
    def __init__(self) -> None:
        self.own_ms: list[float] = []
        self.bad: dict[str, int] = Counter()
        self.asked = self.right = self.full = 0
        self.unclear: list[str] = []
        self.cpu_s = 0.0


async def _measured(honest: int, bad: int, seconds: float, pause_s: float) -> Found:
    found = Found()
    async with _service() as (port, key, server):
        words = [sys.executable, "-m", "benchmarks.serving", "misbehave", str(port), key, str(bad), str(seconds)]
        others = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        assert others.stdout is not None
        await others.stdout.readline()
        process = psutil.Process(server.pid)
        until, began = time.monotonic() + seconds, process.cpu_times()
        group = [_honest(found, port, key, until, pause_s, number) for number in range(honest)]
        full = asyncio.get_running_loop().call_later(seconds / 2, server.send_signal, signal.SIGUSR1)
        await asyncio.gather(*group)
        full.cancel()
        ended = process.cpu_times()
        found.cpu_s = ended.user + ended.system - began.user - began.system
        met = json.loads((await others.communicate())[0])
        found.bad, found.unclear = met["answers"], [*found.unclear, *met["unclear"]]
    return found


@commands.inner
async def misbehave(port: int, key: str, count: int, seconds: float, /) -> None:
    """The clients that do, in a process of their own: what they do to themselves is nobody's share."""
    found = Found()
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
        words = [sys.executable, "-m", "benchmarks.serving", "service", folder]
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
    from kbrl_async.serving.journal import FILE, Journal
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

    class FillsUp(Journal):
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


async def _honest(found: Found, port: int, key: str, until: float, pause_s: float, number: int) -> None:
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
            code, answer = await _post(reader, writer, body, key)
            took_ms = 1000 * (time.perf_counter() - began)
            if code == 507:
                found.full += 1
                await asyncio.sleep(0.2)
                continue
            break
        if code == 200 and answer["ok"]:
            found.right += 1
            found.own_ms.append(took_ms - 1000 * answer["seconds"])
        else:
            found.unclear.append(f"{code} {answer}"[:200])
        await asyncio.sleep(rng.expovariate(1 / pause_s))
    writer.close()


async def _bad(found: Found, port: int, key: str, until: float, how: str) -> None:
    while time.monotonic() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(5.0):
                code, answer = await _misbehave(reader, writer, key, how)
                found.bad[f"{how} {code}"] += 1
                if code and "error" not in answer and code not in (200, 202):
                    found.unclear.append(f"{how} {code} {answer}"[:200])
        writer.close()
        await asyncio.sleep(BAD_PAUSE_S)


async def _misbehave(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str, how: str
) -> tuple[int, dict[str, Any]]:
    if how == "malformed":
        return await _post(reader, writer, b'{"candidate": [[[', key)
    if how == "ten_megabytes":
        return await _post(reader, writer, b'{"candidate": "' + b"x" * 10_000_000 + b'"}', key)
    if how == "unknown_key":
        return await _post(reader, writer, json.dumps({"candidate": "x", "problem": "L1/13"}).encode(), "nobody" * 4)
    text = f"hang {secrets.token_hex(4)}" if how == "hanging_problem" else SOURCE.format(secrets.token_hex(4))
    body = json.dumps({"candidate": text, "problem": "L1/13", "wait_s": 3.0}).encode()
    if how == "vanishing":
        writer.write(_head(len(body), key) + body[: random.randrange(len(body) + 1)])
        await writer.drain()
        return 0, {}
    return await _post(reader, writer, body, key)


def _head(length: int, key: str) -> bytes:
    return (
        f"POST /v1/verify HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


async def _post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes, key: str
) -> tuple[int, dict[str, Any]]:
    writer.write(_head(len(body), key))
    for place in range(0, len(body), 1 << 16):
        writer.write(body[place : place + (1 << 16)])
        if len(body) > 1 << 16:
            with contextlib.suppress(ConnectionError):  # it may have refused already, and closed
                await asyncio.wait_for(writer.drain(), 0.5)
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    code = int(head.split()[1])
    length = next(int(line.split(":")[1]) for line in head.lower().split("\r\n") if line.startswith("content-length"))
    return code, json.loads(await reader.readexactly(length))


if __name__ == "__main__":
    commands.main()
