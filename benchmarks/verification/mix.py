"""Right, wrong, hostile and crashing candidates through a real broker, farm and benches.

::

    this process ─Submit▶ broker ─▶ compile_farm ─▶ timing_bench × 2 ─▶ broker ─▶ this process (stage score)
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated

import psutil

from benchmarks.harness import ONE_THREAD, Result, packed, say, services
from benchmarks.verification.hostile_mix import PROBLEM, Made, candidates_of
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.c import launch
from kbrl_async.lab.chaos.processes import ProcessRole, census
from kbrl_async.runs.config import load
from kbrl_async.runs.folder import prepare
from protocols.messages import Stage, Status, Task
from protocols.records import (
    BuildReport,
    Candidate,
    Fault,
    Generation,
    Problem,
    RolloutRequest,
    SamplingParams,
)
from protocols.rollout import Record
from services.runtime import HandlerOutcome, Producer, Worker, addresses
from tests.brokers import working

IN_FLIGHT = 64
PROBLEM_ROW = Problem("L1/01_mix", 1, "mix", PROBLEM)
PR_SET_CHILD_SUBREAPER = 36
GROWTH = {"rss_mb": 48.0, "family_pss_mb": 96.0, "fds": 8.0}
"""What a service may have grown from a tenth of the run to its end."""
Sizes = dict[str, dict[str, float]]


async def mix(
    candidates: int = 10_000,
    benches: int = 2,
    variants: Annotated[int, "distinct compilations of each template"] = 4,
    limit_s: float = 1800.0,
) -> Result:
    """Right, wrong, hostile and crashing candidates through a real broker, farm and benches.

    Every candidate must get exactly one verdict, the right one; afterwards no process, file or shared memory may be
    left, and the services' memory and descriptors must not have grown.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the services become our children
    with tempfile.TemporaryDirectory(prefix="kbrl-mixed-") as name:
        folder, scratch = Path(name), Path(name) / "scratch"
        scratch.mkdir()
        words = [f"log_path={folder / 'runs'}", f"cache_path={folder / 'cache'}", "timing_bench.cap_s=0.02"]
        words += [f"processes.timing_bench={benches}", "timing_bench.deadline_s=1.0", "timing_bench.min_pairs=4"]
        run = prepare(load(overrides=words))
        shm_before, made = shared_memory(), list(candidates_of(candidates, variants))
        names = ["broker.1", "compile_farm.1", *(f"timing_bench.{number + 1}" for number in range(benches))]
        found = addresses(run.path, run.config)
        with services(run.path, *names, TMPDIR=str(scratch), **ONE_THREAD) as processes:
            mixed = MixRun(made, ArtifactStore(run.path / "artifacts"), run.path)
            async with working(Worker(found.work, "collector", [Stage.SCORE], IN_FLIGHT, mixed.collect)):
                try:
                    async with asyncio.timeout(limit_s), Producer(found.submit) as producer:
                        await mixed.submit(producer)
                        await mixed.finished.wait()
                except TimeoutError:
                    say("the time is up")
                wall_s = time.monotonic() - mixed.begun
                await asyncio.sleep(1.0)
                mixed.sizes["end"] = sizes(run.path)
        faults, failures = mixed.judge()
        left, growth = left_behind(run.path, scratch, shm_before), grown(mixed.sizes)
    return {
        "ok": not growth and not any(failures.values()) and not any(left.values()),
        "candidates": len(made),
        "templates": len({m.template for m in made}),
        "verdicts": len(mixed.records),
        "faults": dict(faults.most_common()),
        **failures,
        "left_behind": left,
        "grown": growth,
        "sizes": mixed.sizes,
        "exit_codes": {name: process.returncode for name, process in processes.items()},
        "wall_s": wall_s,
        "per_s": len(mixed.records) / wall_s,
    }


def sizes(run_dir: Path) -> Sizes:
    """Of each service's working process, and all its sandboxes."""
    out: Sizes = collections.defaultdict(lambda: dict.fromkeys((*GROWTH, "processes"), 0.0))
    for one in census(run_dir):
        with contextlib.suppress(psutil.Error):  # a candidate that has just ended
            process, row = psutil.Process(one.pid), out[one.instance]
            row["family_pss_mb"] += process.memory_full_info().pss / 2**20
            row["processes"] += 1
            if one.role is ProcessRole.CHILD:
                row["rss_mb"], row["fds"] = process.memory_info().rss / 2**20, _lowest_fds(process)
    return dict(out)


def _lowest_fds(worker: psutil.Process) -> int:
    """What stays open whatever is in flight: a candidate that is being judged holds up to a dozen more."""
    seen = []
    for _ in range(8):
        seen.append(worker.num_fds())
        time.sleep(0.02)
    return min(seen)


class MixRun:
    """Submits everything, a bounded number at a time, and collects one record for each."""

    def __init__(self, made: list[Made], store: ArtifactStore, run_dir: Path) -> None:
        self.made, self.store, self._run_dir = {m.task_id: m for m in made}, store, run_dir
        self.records: dict[str, list[tuple[str, list[bytes]]]] = collections.defaultdict(list)
        self.room = asyncio.Semaphore(IN_FLIGHT)
        self.finished = asyncio.Event()
        self.sizes: dict[str, Sizes] = {}
        self.begun = time.monotonic()
        self._raw: dict[str, str] = {}

    async def submit(self, producer: Producer) -> None:
        for m in self.made.values():
            await self.room.acquire()
            frames = [
                packed(RolloutRequest(m.task_id, "", PROBLEM_ROW, "", "c", SamplingParams(1))),
                packed(Generation(0, [], [], [], "", "stop", Candidate(m.source, "c"))),
            ]
            if m.is_raw:
                artifacts = {launch.source_key(m.c_source): self._compile(m.c_source)}
                frames.append(packed(BuildReport(Fault.OK, artifacts)))
            await producer.submit(m.task_id, Stage.BENCH if m.is_raw else Stage.COMPILE, frames, needs="c")

    def _compile(self, source: str) -> str:
        """As the farm would, but for its checks."""
        if source not in self._raw:
            with self.store.workspace() as folder:
                target = ["-o", str(folder / "k.so")]
                command = ["gcc", *launch.C_FLAGS, "-w", "-x", "c", "-", *target, *launch.C_LIBRARIES]
                subprocess.run(command, input=source.encode(), check=True)
                self._raw[source] = self.store.put((folder / "k.so").read_bytes())
        return self._raw[source]

    async def collect(self, task: Task, frames: list[bytes]) -> HandlerOutcome:
        self.records[task.task_id].append((task.status, frames))
        self.room.release()
        done, total = len(self.records), len(self.made)
        for mark, name in ((max(total // 10, min(200, total // 3)), "start"), (total // 2, "middle")):
            if done == max(1, mark):
                self.sizes[name] = await asyncio.to_thread(sizes, self._run_dir)
        if done % max(1, total // 10) == 0:
            say(f"{done:6} of {total}")
        if done == total:
            self.finished.set()
        return HandlerOutcome()

    def judge(self) -> tuple[collections.Counter[str], dict[str, object]]:
        """Faults by name, and what is not as it must be."""
        faults: collections.Counter[str] = collections.Counter()
        wrong, several = [], []
        for task_id, m in self.made.items():
            got = self.records.get(task_id, [])
            if len(got) != 1:
                several.append((task_id, m.template, len(got)))
                continue
            status, frames = got[0]
            record = Record.decode(frames) if status == Status.OK else None
            fault = str(record.fault) if record else status
            faults[fault] += 1
            if fault != m.expected:
                said = record.verdict.message[:300] if record else ""
                wrong.append([task_id, m.template, str(m.expected), fault, said])
        return faults, {"wrong_verdicts": wrong[:20], "not_exactly_one": several}


def grown(sizes: dict[str, Sizes]) -> list[str]:
    """Services that are larger at the end than near the start."""
    if "start" not in sizes:
        return ["never got to a tenth"]
    return [
        f"{name}: {key} {sizes['start'][name][key]} → {end[key]}"
        for name, end in sizes["end"].items()
        for key, limit in GROWTH.items()
        if name in sizes["start"] and end[key] > sizes["start"][name][key] + limit
    ]


def shared_memory() -> set[str]:
    segments = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return {*os.listdir("/dev/shm"), *(line.split()[1] for line in segments)}


def left_behind(run_dir: Path, scratch: Path, shm_before: set[str]) -> dict[str, list[str]]:
    """What must be empty after the end."""
    while True:  # orphans came to us as children: reap the dead, report the living
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                break
        except ChildProcessError:
            break
    living = psutil.Process().children(recursive=True)
    return {
        "processes": [" ".join(process.cmdline()) for process in living],
        "files": [str(path) for path in (*scratch.rglob("*"), *(run_dir / "artifacts" / "work").rglob("*"))]
        + [str(path) for path in Path("/tmp").glob("kbrl-mark*")],
        "shared_memory": sorted(name for name in shared_memory() - shm_before if "mark" in name or name == "4242"),
    }
