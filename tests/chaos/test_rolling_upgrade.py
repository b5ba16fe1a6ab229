"""A run goes on while its workers are replaced, one by one, by those of a build whose messages have a field more."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builds import ADDED, REPOSITORY, environment, next_protocols

PATIENCE_S = 120.0
SITE = """
import asyncio, collections, json, sys, zmq
from protocols import messages as msg
from protocols.limits import LedgerOptions
from services.broker.options import BrokerOptions
from services.broker.server import BrokerServer
from services.runtime import HandlerOutcome, Producer, Worker

ANY = "tcp://127.0.0.1:*"
seen, builds = collections.Counter(), collections.Counter()

async def score(task, frames):
    seen[task.task_id] += 1
    builds.update(frame.decode() for frame in frames[1:])
    return HandlerOutcome()

async def main():
    broker = BrokerServer(BrokerOptions(sys.argv[1], ANY, ANY, ledger=LedgerOptions(heartbeat_s=0.2)))
    serving = asyncio.create_task(broker.run())
    while not hasattr(broker, "ledger"):
        await asyncio.sleep(0.01)
    submit, work = (r.socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\\0").decode() for r in broker.bound)
    scoring = asyncio.create_task(Worker(work, "scorer", ["score"], 8, score).run())
    has_more = FIELD in msg.Hello.__struct_fields__
    print(json.dumps({"work": work, "build": "next" if has_more else "today"}), flush=True)
    done = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    async with Producer(submit) as producer:
        count = 0
        while not done.done():
            await producer.submit(f"t{count}", "compile", [b"request"])
            count += 1
            print(json.dumps({"there": [*broker.ledger.pool.by_id], "builds": builds}), flush=True)
            await asyncio.sleep(0.01)
        while len(seen) < count:
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)  # for a result that would come twice
    counters = {**broker.ledger.counters, "malformed": broker.malformed}
    print(json.dumps({"count": count, "seen": seen, "builds": builds, "counters": counters}), flush=True)
    serving.cancel()

asyncio.run(main())
""".replace("FIELD", repr(ADDED))
WORKER = """
import asyncio, signal, sys
from protocols import messages as msg, sockets
from services.runtime import HandlerOutcome, Worker
sockets.LINGER_MS = 30_000  # what is said at the end is to arrive on a slow machine too
address, stage, next_stage = sys.argv[1:]
build = "next" if FIELD in msg.Hello.__struct_fields__ else "today"
async def work(task, frames):
    await asyncio.sleep(0.02)
    return HandlerOutcome(next_stage, [f"{stage} {build}".encode()])
async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await Worker(address, f"{stage}.1", [stage], 3, work).run(stop)
asyncio.run(main())
""".replace("FIELD", repr(ADDED))


class Site:
    """Broker, producer and scorer of one build, with workers of any."""

    def __init__(self, folder: Path, build: Path | None) -> None:
        self.process = self._start(SITE, build, str(folder), pipe=True)
        self.workers: dict[str, subprocess.Popen[str]] = {}
        self.said: dict[str, Any] = {}

    def _start(self, script: str, build: Path | None, *words: str, pipe: bool = False) -> subprocess.Popen[str]:
        end = subprocess.PIPE if pipe else None
        command = [sys.executable, "-c", script, *words]
        return subprocess.Popen(
            command, env=environment(build), cwd=REPOSITORY / "tests", text=True, stdin=end, stdout=end
        )

    def read(self) -> Any:
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline()).startswith("{"):  # the broker's log
            assert line, "the site has ended"
        return json.loads(line)

    def replace(self, stage: str, build: Path | None) -> None:
        """Drain the worker of this stage, if there is one, and start one of another build under the same name."""
        if (old := self.workers.pop(stage, None)) is not None:
            old.send_signal(signal.SIGTERM)
            assert old.wait(PATIENCE_S) == 0
            while f"{stage}.1" in self.read()["there"]:
                pass  # what it gives back may be read after the next one's first word, which takes all from it
        following = {"compile": "bench", "bench": "score"}[stage]
        self.workers[stage] = self._start(WORKER, build, self.said["work"], stage, following)

    def until(self, worked: str, count: int = 5) -> None:
        """Until so many candidates that this stage of this build has worked on were scored."""
        deadline = time.monotonic() + PATIENCE_S
        while self.read()["builds"].get(worked, 0) < count:
            assert time.monotonic() < deadline, f"{worked} has done nothing"

    def end(self) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        while "count" not in (said := self.read()):
            pass
        return said

    def close(self) -> None:
        for process in (*self.workers.values(), self.process):
            process.kill()
            process.communicate()


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    return next_protocols(tmp_path / "next")


@pytest.fixture(params=["today", "next"])
def site(request: pytest.FixtureRequest, tmp_path: Path, newer: Path) -> Iterator[Site]:
    site = Site(tmp_path, newer if request.param == "next" else None)
    try:
        site.said = site.read()
        assert site.said["build"] == request.param
        yield site
    finally:
        site.close()


def test_workers_are_upgraded_one_by_one_and_back_while_the_run_goes_on(site: Site, newer: Path) -> None:
    site.replace("compile", None)
    site.replace("bench", None)
    site.until("bench today")
    site.replace("compile", newer)
    site.until("compile next")
    site.replace("bench", newer)
    site.until("bench next")
    already = site.read()["builds"]["compile today"]
    site.replace("compile", None)
    site.until("compile today", already + 5)
    end = site.end()
    assert end["seen"] == {f"t{number}": 1 for number in range(end["count"])}, "nothing is lost, nothing comes twice"
    assert all(end["builds"][f"{stage} {build}"] for stage in ("compile", "bench") for build in ("today", "next"))
    assert end["counters"]["finished"] == end["count"]
    assert end["counters"]["lost"] == end["counters"]["malformed"] == 0, "a drained worker gives back what it holds"
