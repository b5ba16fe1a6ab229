"""Workers of an older build and of today's in one run, replaced one by one while it goes on, forth and back.

    python -m benchmarks.rolling_upgrade [--old COMMIT] [--candidates 24]

The older build is unpacked by `git archive` (the repository is only read). Broker, producer and scorer are today's, on
loopback; farm and bench are real `kbrl worker` processes, which end on SIGTERM and are followed by one of the other
build. Every candidate must be scored once, none for a fault of ours. The last line is JSON; exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec

from benchmarks.remote_link import Site, Stream, material
from protocols import messages as msg
from protocols.auth import Role
from protocols.records import BenchReport, BuildReport
from protocols.sockets import ClientKeys
from services.runtime import Outcome, Producer, Worker

REPOSITORY = Path(__file__).parent.parent
STAGES = ("compile", "bench")


def unpack(commit: str, folder: Path) -> Path:
    """The tree of `commit`, without touching the repository."""
    command = ["git", "-C", str(REPOSITORY), "archive", commit]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tree:
        tree.extractall(folder, filter="data")
    return folder


class Upgraded(Stream):
    """A stream that also counts whose work each candidate was."""

    def __init__(self, count: int) -> None:
        super().__init__(material(count))
        self.by: Counter[str] = Counter()

    async def score(self, task: msg.Task, frames: list[bytes]) -> Outcome:
        for stage, frame, kind in zip(STAGES, frames[2:], (BuildReport, BenchReport), strict=False):
            worker: str = msgspec.msgpack.decode(frame, type=kind).worker_id
            self.by[f"{stage} {'new' if worker.endswith('.2') else 'old'}"] += 1
        return await super().score(task, frames)


class Fleet:
    """One farm and one bench, each of one build at a time; the ids of new ones end in 2."""

    def __init__(self, scratch: Path, old: Path, site: Site, address: str) -> None:
        self._trees = {"old": old, "new": REPOSITORY}
        self._scratch, self._site, self._address = scratch, site, address
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.exits: Counter[int] = Counter()

    def replace(self, stage: str, build: str) -> float:
        """How long the one before took to leave."""
        began = time.monotonic()
        if (before := self._running.pop(stage, None)) is not None:
            before.terminate()
            self.exits[before.wait(30)] += 1
        left_s = time.monotonic() - began
        home = self._scratch / f"{stage}-{build}"
        home.mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("KBRL_", "HONCHO_"))}
        command = [
            sys.executable, "-m", "kbrl_async", "worker", stage, "--connect", self._address,
            "--keys", str(self._site.issued[Role(stage)]), "--number", "2" if build == "new" else "1",
            "--folder", str(home / "worker"), f"cache_path={home}",
        ]  # fmt: skip
        with (home / "output").open("ab") as output:
            self._running[stage] = subprocess.Popen(
                command, cwd=self._trees[build], stdout=output, stderr=subprocess.STDOUT,
                env={**environment, "PYTHONPATH": str(self._trees[build]), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        return left_s

    def close(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait()


async def upgrade(
    fleet: Fleet, stream: Upgraded, submit: str, keys: ClientKeys, args: argparse.Namespace
) -> list[float]:
    """From the old build to the new one and back, while candidates come; how long each worker took to leave."""
    left: list[float] = []
    steps = [(stage, build) for build in ("old", "new", "old") for stage in STAGES]
    async with Producer(submit, keys=keys) as producer:
        submitting = asyncio.create_task(stream.submit(producer))
        for step, (stage, build) in enumerate(steps):
            left.append(await asyncio.to_thread(fleet.replace, stage, build))
            if step:
                name = f"{stage} {build}"
                goal = stream.by[name] + args.candidates
                while stream.by[name] < goal:
                    await asyncio.sleep(0.1)
                print(f"{stage} of the {build} build at work; {len(stream.scored)} scored", flush=True)
        await stream.close(submitting)
    return left


async def play(scratch: Path, args: argparse.Namespace) -> dict[str, object]:
    old = unpack(args.old, scratch / "old")
    site, stream = Site(scratch / "site"), Upgraded(args.candidates)
    submit, work = await site.open()
    keys = site.ring.local(Role.AGGREGATOR)
    scorer = Worker(work, "local.agg", ["score"], 64, stream.score, keys=keys)
    scoring = asyncio.create_task(scorer.run())
    fleet = Fleet(scratch, old, site, f"tcp://127.0.0.1:{work.rpartition(':')[2]}")
    try:
        left = await upgrade(fleet, stream, submit, keys, args)
    finally:
        fleet.close()
    counters = site.broker.ledger.counters
    scorer.stop()
    await scoring
    await site.close()
    names = {f"g{number}.r0" for number in range(stream.submitted)}
    wrong = len(names ^ stream.seen.keys()) + sum(count > 1 for count in stream.seen.values())
    return {
        "old": args.old, "submitted": stream.submitted, "finished": counters["finished"], "by": dict(stream.by),
        "lost": counters["lost"], "poisoned": counters["poisoned"], "malformed": site.broker.malformed,
        "lost_or_twice": wrong, "drain_s_max": round(max(left), 2),
        "exits": dict(fleet.exits), "ends": dict(stream.ends),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--old", default="HEAD", help="commit of the older build")
    parser.add_argument("--candidates", type=int, default=24, help="that each worker does before the next replacement")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "site").mkdir()
        result = asyncio.run(play(Path(scratch), args))
    print(
        json.dumps({"benchmark": "rolling_upgrade", "machine": platform.machine(), "cores": os.cpu_count(), **result})
    )
    return 1 if result["lost_or_twice"] or result["poisoned"] or result["submitted"] != result["finished"] else 0


if __name__ == "__main__":
    sys.exit(main())
