"""Right, wrong, hostile and crashing candidates through a real broker, farm and benches. One JSON line last.

Usage: `python benchmarks/mixed.py [--candidates 10000] [--benches 2] [--variants 4]`

::

    this process ─Submit▶ broker ─▶ compile_farm ─▶ timing_bench × 2 ─▶ broker ─▶ this process (stage score)

Every candidate must get exactly one verdict, the right one; afterwards no process, file or shared memory may be left,
and the services' memory and descriptors must not have grown. Exit code 1 where any of that fails.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil
from hostile_mix import PROBLEM, Made, candidates

from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.c import launch
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
from services.runtime import Outcome, Producer, Worker, addresses

IN_FLIGHT = 64
PROBLEM_ROW = Problem("L1/01_mix", 1, "mix", PROBLEM)
PR_SET_CHILD_SUBREAPER = 36
GROWTH_MB, GROWTH_FDS = 48, 8
"""What a service may have grown from a tenth of the run to its end."""
SERVICES = ("broker", "compile_farm", "timing_bench")
encode = msgspec.msgpack.encode


class Fleet:
    """The services as processes of their own, as `kbrl train` starts them; orphans of theirs become our children."""

    def __init__(self, run_dir: Path, scratch: Path, benches: int) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        names = ["broker.1", "compile_farm.1", *(f"timing_bench.{number + 1}" for number in range(benches))]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KBRL_", "HONCHO_"))}
        base = {**kept, "KBRL_RUN_DIR": str(run_dir), "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
        self.processes = {
            name: subprocess.Popen(
                [sys.executable, "-m", f"services.{name.split('.')[0]}"], env={**base, "HONCHO_PROCESS_NAME": name}
            )
            for name in names
        }

    def workers(self) -> dict[str, psutil.Process]:
        """The working child of each service's nanny."""
        found = {name: psutil.Process(process.pid).children() for name, process in self.processes.items()}
        return {name: children[0] for name, children in found.items() if children}

    def sizes(self) -> dict[str, dict[str, float]]:
        """Per service: memory of itself and all its sandboxes, descriptors, processes."""
        out = {}
        for name, worker in self.workers().items():
            family = [worker, *worker.children(recursive=True)]
            memory = 0.0
            for member in family:
                try:
                    memory += member.memory_full_info().pss
                except psutil.Error:
                    continue  # a candidate that has just ended
            rss = worker.memory_info().rss / 2**20
            out[name] = {
                "rss_mb": round(rss, 1),
                "family_pss_mb": round(memory / 2**20, 1),
                "fds": _lowest_fds(worker),
                "processes": len(family),
            }
        return out

    def stop(self) -> dict[str, int]:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        return {name: process.wait(20) for name, process in self.processes.items()}


def _lowest_fds(worker: psutil.Process) -> int:
    """What stays open whatever is in flight: a candidate that is being judged holds up to a dozen more."""
    seen = []
    for _ in range(8):
        seen.append(worker.num_fds())
        time.sleep(0.02)
    return min(seen)


class Run:
    """Submits everything, a bounded number at a time, and collects one record for each."""

    def __init__(self, made: list[Made], store: ArtifactStore, fleet: Fleet) -> None:
        self.made, self.store, self.fleet = {m.task_id: m for m in made}, store, fleet
        self.records: dict[str, list[tuple[str, list[bytes]]]] = collections.defaultdict(list)
        self.room = asyncio.Semaphore(IN_FLIGHT)
        self.finished = asyncio.Event()
        self.sizes: dict[str, dict[str, dict[str, float]]] = {}
        self.begun = time.monotonic()
        self._raw: dict[str, str] = {}

    async def submit(self, producer: Producer) -> None:
        for m in self.made.values():
            await self.room.acquire()
            frames = [
                encode(RolloutRequest(m.task_id, "", PROBLEM_ROW, "", "c", SamplingParams(1))),
                encode(Generation(0, [], [], [], "", "stop", Candidate(m.source, "c"))),
            ]
            if m.is_raw:
                artifacts = {launch.source_key(m.c_source): self._compile(m.c_source)}
                frames.append(encode(BuildReport(Fault.OK, artifacts)))
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

    async def collect(self, task: Task, frames: list[bytes]) -> Outcome:
        self.records[task.task_id].append((task.status, frames))
        self.room.release()
        done, total = len(self.records), len(self.made)
        for mark, name in ((max(total // 10, min(200, total // 3)), "start"), (total // 2, "middle")):
            if done == max(1, mark):
                self.sizes[name] = await asyncio.to_thread(self.fleet.sizes)
        if done % max(1, total // 10) == 0:
            print(f"{done:6} of {total}  {time.monotonic() - self.begun:7.1f} s", flush=True)
        if done == total:
            self.finished.set()
        return Outcome()

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
            fault, text = verdict_of(status, frames)
            faults[fault] += 1
            if fault != m.expected:
                wrong.append([task_id, m.template, str(m.expected), fault, text[:300]])
        return faults, {"wrong_verdicts": wrong[:20], "not_exactly_one": several}


def verdict_of(status: str, frames: list[bytes]) -> tuple[str, str]:
    if status != Status.OK:
        return status, ""
    record = Record.decode(frames)
    return str(record.fault), f"{record.verdict.rule}: {record.verdict.message}"


def grown(sizes: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Services that are larger at the end than near the start."""
    out = []
    for name, end in sizes["end"].items():
        start = sizes["start"].get(name, end)
        for key, limit in (("rss_mb", GROWTH_MB), ("family_pss_mb", 2 * GROWTH_MB), ("fds", GROWTH_FDS)):
            if end[key] > start[key] + limit:
                out.append(f"{name}: {key} {start[key]} → {end[key]}")
    return out


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


async def play(asked: argparse.Namespace, folder: Path) -> dict[str, object]:
    scratch = folder / "scratch"
    scratch.mkdir()
    options = (f"log_path={folder / 'runs'}", f"cache_path={folder / 'cache'}", "timing_bench.cap_s=0.02")
    options += (f"processes.timing_bench={asked.benches}",)
    run = prepare(load(overrides=[*options, "timing_bench.deadline_s=1.0", "timing_bench.min_pairs=4"]))
    shm_before = shared_memory()
    made = list(candidates(asked.candidates, asked.variants))
    fleet = Fleet(run.path, scratch, asked.benches)
    mix = Run(made, ArtifactStore(run.path / "artifacts"), fleet)
    found = addresses(run.path, run.config)
    worker = Worker(found.work, "collector", [Stage.SCORE], IN_FLIGHT, mix.collect)
    working = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(asked.limit_s), Producer(found.submit) as producer:
            await mix.submit(producer)
            await mix.finished.wait()
    except TimeoutError:
        print("the time is up", flush=True)
    wall_s = time.monotonic() - mix.begun
    await asyncio.sleep(1.0)
    mix.sizes["end"] = fleet.sizes()
    worker.stop()
    await working
    codes = fleet.stop()
    faults, failures = mix.judge()
    left = left_behind(run.path, scratch, shm_before)
    return {
        "candidates": len(made),
        "templates": len({m.template for m in made}),
        "verdicts": len(mix.records),
        "faults": dict(faults.most_common()),
        **failures,
        "left_behind": left,
        "grown": grown(mix.sizes) if "start" in mix.sizes else ["never got to a tenth"],
        "sizes": mix.sizes,
        "exit_codes": codes,
        "wall_s": round(wall_s, 1),
        "per_s": round(len(mix.records) / wall_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidates", type=int, default=10_000)
    parser.add_argument("--benches", type=int, default=2)
    parser.add_argument("--variants", type=int, default=4, help="distinct compilations of each template")
    parser.add_argument("--limit-s", type=float, default=1800.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kbrl-mixed-") as folder:
        found = asyncio.run(play(asked, Path(folder)))
    machine = {"cores": len(os.sched_getaffinity(0)), "kernel": platform.release(), "load": os.getloadavg()[0]}
    is_right = not found["wrong_verdicts"] and not found["not_exactly_one"] and not found["grown"]
    is_clean = not any(found["left_behind"].values())  # type: ignore[attr-defined]
    print(json.dumps({"ok": is_right and is_clean, **found, "machine": machine}))
    sys.exit(0 if is_right and is_clean else 1)


if __name__ == "__main__":
    main()
