"""An hour at full load: what grows, and what is left behind.

::

    kbrl train (max_steps without end, max_minutes) ── every 10 s ──▶ processes: memory, descriptors, threads
                                                                      folders and files: bytes, entries
    its end ─▶ no process, socket, scratch folder, shared memory segment is left
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import psutil
from scipy.stats import theilslopes

from benchmarks.harness import ROOT, Result, environment, kbrl_command, say
from kbrl_async.lab.chaos.processes import ProcessRole, census

EVERY_S = 10.0
SLACK_MB = 6.0
"""A process of 30 MB may move by more than 5 % of that when one module is imported late."""
FD_SLACK = 6
THREAD_SLACK = 2
MIN_SHARE_ALIVE = 0.75
"""Of the window; a process that lives shorter belongs to one candidate."""
STORE_SLACK = 4 << 20
BY_DESIGN = {
    "rollouts.sqlite": "half a kilobyte a turn, and its record up to archive.max_bytes",
    "aggregator-history.sqlite": "packed entries of ended groups, to look back at",
    "tensorboard": "a point per tag and update, or second",
    "logs": "a few lines an update",
}
FULL_AT = {"policies": 8, "checkpoints": 4}
"""Updates after which so many versions are there as are kept."""
TORCH_CACHE = "torchinductor_"
"""A folder that torch makes for itself, once per user."""
LIMITS = {"metrics": 128 << 20, "artifacts": 512 << 20, "batches": 256 << 20}
"""Bytes; stores that fill up to their limit and stay there."""

Point = tuple[float, float]


class ProcessSample(NamedTuple):
    """One sample of one process."""

    name: str
    pid: int
    rss_mb: float
    anon_mb: float
    """What is its own and in no file: the kernel can't take it back, as it does with pages of libraries."""
    fds: int
    threads: int


def soak(
    *settings: str,
    minutes: Annotated[float, "of training, the warm-up included"] = 60.0,
    warm_up_minutes: Annotated[float, "at most a quarter of the time"] = 10.0,
    tolerance: float = 0.05,
    config: str = "configs/default.yaml",
    folder: Annotated[Path | None, "is kept; default: a temporary one"] = None,
    cache: Annotated[Path | None, "folder that has the small policy already"] = None,
) -> Result:
    """An hour at full load: what grows, and what is left behind.

    A process is flat when its own memory in the last quarter of the window (the time after the warm-up; medians) is
    within --tolerance of its size in the first quarter, and its RSS, of which the kernel takes back what files can give
    again, is no larger; the slope beside it is Theil-Sen's, which a few odd samples do not move. A store is bounded
    when it is flat too, or far below its stated limit; what grows by design is named with its growth per rollout.
    """
    place = (folder or Path(tempfile.mkdtemp(prefix="kbrl-soak-"))).absolute()
    scratch, stored, run_dir = place / "scratch", cache or place / "cache", place / "runs" / "soak"
    scratch.mkdir(parents=True)
    options = [f"log_path={place / 'runs'}", f"cache_path={stored}", "name=soak", "max_steps=10000000"]
    # All of its steps, however slow the machine is: a policy that writes nothing that compiles is no full load.
    options += [f"max_minutes={minutes}", "eval_samples=0", "sft.max_seconds=3600", *settings]
    with training([f"--config={ROOT / config}", *options], place, scratch) as process:
        record, seen, segments = watch(process, run_dir, stored, scratch, minutes * 60 + 5400)
    time.sleep(2.0)
    left = left_behind(run_dir, scratch, segments, seen | {process.pid})
    if len(record.processes) < 8:
        return {"ok": False, "wrong": ["the run ended before it could be judged; see train.txt"], "left_behind": left}
    (place / "samples.json").write_text(json.dumps({"processes": record.processes, "stores": record.stores}))
    found = judged(record, 60 * warm_up_minutes, tolerance, left, process.returncode)
    if folder is None and found["ok"]:
        shutil.rmtree(place)
    return found


# ── samples ───────────────────────────────────────────────────────────────────────────────────────────────────────


def sample(root: psutil.Process, run_dir: Path) -> list[ProcessSample]:
    """Every process of the run, named by the service it belongs to and its place there."""
    named = [("train", root.pid), *(("train relay", relay.pid) for relay in _children(root))]
    roles = {ProcessRole.CHILD: ""}
    named += [(f"{one.instance} {roles.get(one.role, one.role)}".strip(), one.pid) for one in census(run_dir)]
    return [found for name, pid in named if (found := _measure(name, pid)) is not None]


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return process.children()
    return []


def _measure(name: str, pid: int) -> ProcessSample | None:
    with contextlib.suppress(psutil.Error, OSError, KeyError):
        process = psutil.Process(pid)
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        kb = {words[0]: float(words[1]) for words in map(str.split, lines) if words[-1] == "kB"}
        rss, anon = kb["VmRSS:"] / 1024, (kb["RssAnon:"] + kb["VmSwap:"]) / 1024
        return ProcessSample(name, pid, rss, anon, process.num_fds(), process.num_threads())
    return None


def sizes(run_dir: Path, cache: Path, scratch: Path) -> dict[str, tuple[int, int]]:
    """Bytes on disk and number of files of each store: the entries of the run's folder, the cache, and scratch."""
    out = {}
    for entry in sorted(run_dir.iterdir()) if run_dir.is_dir() else []:
        if not entry.name.endswith(("-wal", "-shm")):
            wal = entry.with_name(entry.name + "-wal")
            out[entry.name] = _size(entry, wal)
    return out | {"(cache)": _size(cache), "(scratch)": _size(scratch)}


def _size(*paths: Path) -> tuple[int, int]:
    """Folders come and go while they are looked at, which `os.walk` does not mind."""
    below = (Path(parent, name) for path in paths for parent, *names in os.walk(path) for name in chain(*names))
    found = []
    for file in (*paths, *below):
        with contextlib.suppress(OSError):
            found.append(file.lstat().st_blocks * 512)
    return sum(found), len(found)


def rollouts(run_dir: Path) -> dict[str, int]:
    """The broker's own counters, of its newest line."""
    with (
        contextlib.suppress(OSError, ValueError, IndexError),
        (run_dir / "metrics" / "system.jsonl").open("rb") as file,
    ):
        file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
        line = json.loads(file.read().splitlines()[-1])
        workers = line["workers"].values()
        stages = {"generated": "generate", "compiled": "compile", "verified": "bench"}
        done = {name: sum(w["done"] for w in workers if stage in w["stages"]) for name, stage in stages.items()}
        return {**done, "version": line["policy_version"]}
    return {"generated": 0, "compiled": 0, "verified": 0, "version": 0}


class SoakSamples(NamedTuple):
    """All samples, by time since the start."""

    processes: list[tuple[float, list[ProcessSample]]]
    stores: list[tuple[float, dict[str, tuple[int, int]]]]
    work: list[tuple[float, dict[str, int]]]

    def lasting(self, since: float) -> dict[str, list[tuple[float, ProcessSample]]]:
        """Series of the processes that lived through most of the time after `since`; a name each, twins numbered."""
        series: dict[tuple[str, int], list[tuple[float, ProcessSample]]] = collections.defaultdict(list)
        samples = [(at, found) for at, found in self.processes if at >= since]
        for at, found in samples:
            for process in found:
                series[process.name, process.pid].append((at, process))
        out: dict[str, list[tuple[float, ProcessSample]]] = {}
        for (name, _), points in sorted(series.items()):
            if len(points) >= MIN_SHARE_ALIVE * len(samples):
                twins = sum(known.split(" #")[0] == name for known in out)
                out[f"{name} #{twins + 1}" if twins else name] = points
        return out


# ── judgement ─────────────────────────────────────────────────────────────────────────────────────────────────────


def trend(points: Iterable[Point]) -> dict[str, float]:
    """First and last quarter's medians, their ratio, and Theil-Sen's slope an hour."""
    points = list(points)
    times, values = [p[0] for p in points], [float(p[1]) for p in points]
    quarter = max(1, len(values) // 4)
    first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
    slope = float(theilslopes(values, times)[0]) * 3600 if len(set(times)) > 1 else 0.0
    return {"first": first, "last": last, "ratio": last / first if first else 1.0, "slope_h": slope}


def judged(
    record: SoakSamples, warm_up_s: float, tolerance: float, left: dict[str, list[str]], exit_code: int
) -> Result:
    since = min(warm_up_s, record.processes[-1][0] / 4)
    end = record.processes[-1][0] - 20  # the last samples are of processes that are stopping
    processes, stores = (
        [one for one in record.processes if one[0] <= end],
        [one for one in record.stores if one[0] <= end],
    )
    record = SoakSamples(processes, stores, record.work)
    first = next(work for at, work in record.work if at >= since)
    done = {key: value - first[key] for key, value in record.work[-1][1].items()}
    by_process, wrong = judge_processes(record, since, tolerance)
    by_store, unbounded = judge_stores(record, since, tolerance, done["generated"])
    wrong += unbounded + [f"left behind: {kind} {names[:3]}" for kind, names in left.items() if names]
    if done["verified"] < done["generated"] / 10:
        wrong.append(f"no full load: {done}; the policy writes too little that compiles")
    if exit_code:
        wrong.append(f"the run ended with exit code {exit_code}")
    return {
        "ok": not wrong,
        "wrong": wrong,
        "minutes": record.work[-1][0] / 60,
        "warm_up_minutes": since / 60,
        "work": done,
        "rollouts_per_hour": 3600 * done["generated"] / (record.work[-1][0] - since),
        "processes": by_process,
        "stores": by_store,
        "left_behind": left,
    }


def judge_processes(record: SoakSamples, since: float, tolerance: float) -> tuple[dict[str, Any], list[str]]:
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    for name, points in record.lasting(since).items():
        found = {kind: trend((at, getattr(p, kind)) for at, p in points) for kind in ProcessSample._fields[2:]}
        figures[name] = found
        rss, anon = found["rss_mb"], found["anon_mb"]
        slack = max(SLACK_MB, tolerance * rss["first"])
        if abs(anon["last"] - anon["first"]) > slack or rss["last"] > rss["first"] + slack:
            own = f"{anon['first']:.1f} → {anon['last']:.1f} MB ({anon['slope_h']:+.2f} MB/h)"
            wrong.append(f"{name}: its own memory {own}, RSS {rss['first']:.1f} → {rss['last']:.1f} MB")
        for kind, slack in (("fds", FD_SLACK), ("threads", THREAD_SLACK)):
            if found[kind]["last"] > found[kind]["first"] + slack:
                wrong.append(f"{name}: {kind} {found[kind]['first']} → {found[kind]['last']}")
    return figures, wrong


def judge_stores(record: SoakSamples, since: float, tolerance: float, done: int) -> tuple[dict[str, Any], list[str]]:
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    samples = [(at, stores) for at, stores in record.stores if at >= since]
    for name in sorted({name for _, stores in samples for name in stores}):
        full_at = next((at for at, work in record.work if work["version"] >= FULL_AT.get(name, 0)), since)
        points = [(at, stores[name]) for at, stores in samples if name in stores and at >= full_at]
        if not points:
            continue  # gone before it was full
        size = trend((at, s[0] / 2**20) for at, s in points)
        grown = points[-1][1][0] - points[0][1][0]
        figures[name] = {"mb": size, "files": trend((at, s[1]) for at, s in points)}
        if name in BY_DESIGN:
            figures[name]["by_design"] = BY_DESIGN[name]
            figures[name]["bytes_per_rollout"] = grown / max(1, done)
        elif name == "(cache)":
            continue  # other runs may share it; what it holds is made once
        elif name in LIMITS:
            figures[name]["limit_mb"] = LIMITS[name] >> 20
            if points[-1][1][0] > LIMITS[name] * 1.1:
                wrong.append(f"store {name}: {size['last']:.1f} MB is above its limit of {LIMITS[name] >> 20} MB")
        elif (size["last"] - size["first"]) * 2**20 > max(STORE_SLACK, tolerance * size["first"] * 2**20):
            wrong.append(f"store {name}: {size['first']:.1f} → {size['last']:.1f} MB ({size['slope_h']:+.2f} MB/h)")
    return figures, wrong


# ── the run ───────────────────────────────────────────────────────────────────────────────────────────────────────


def shared_memory(found: list[ProcessSample]) -> set[str]:
    """Segments that processes of ours have mapped; others' come and go on the same host."""
    names: set[str] = set()
    for process in found:
        with contextlib.suppress(OSError), open(f"/proc/{process.pid}/maps") as file:
            names |= {line.split()[-1] for line in file if "/dev/shm/" in line}
    return names


def left_behind(run_dir: Path, scratch: Path, segments: set[str], seen: set[int]) -> dict[str, list[str]]:
    """What must be empty after the end."""
    alive = []
    for pid in seen:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if str(run_dir) in (process.environ().get("KBRL_RUN_DIR", ""), *process.cmdline()):
                alive.append(" ".join(process.cmdline())[:200])
    listening = Path("/proc/net/unix").read_text()
    return {
        "processes": alive,
        "sockets": [line.split()[-1] for line in listening.splitlines() if str(run_dir) in line],
        "scratch": [path.name for path in scratch.iterdir() if not path.name.startswith(TORCH_CACHE)],
        "shared_memory": sorted(name for name in segments if os.path.exists(name)),
        "unfinished": [str(path) for path in (run_dir / "artifacts" / "work").rglob("*")],
    }


@contextlib.contextmanager
def training(words: list[str], folder: Path, scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    command, variables = kbrl_command("train", *words), environment(TMPDIR=str(scratch))
    with (folder / "train.txt").open("ab") as output:
        process = subprocess.Popen(command, env=variables, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def watch(
    process: subprocess.Popen[bytes], run_dir: Path, cache: Path, scratch: Path, limit_s: float
) -> tuple[SoakSamples, set[int], set[str]]:
    """Samples until the run ends by itself; time counts from the first generated rollout."""
    record, seen, segments = SoakSamples([], [], []), set[int](), set[str]()
    root, begun = psutil.Process(process.pid), time.monotonic()
    trained_from: float | None = None
    while process.poll() is None and time.monotonic() - begun < limit_s:
        work = rollouts(run_dir)
        now = time.monotonic()
        if work["generated"] and trained_from is None:
            trained_from = now
        found = sample(root, run_dir)
        seen |= {p.pid for p in found}
        segments |= shared_memory(found)
        if trained_from is not None:
            at = now - trained_from
            record.processes.append((at, found))
            record.stores.append((at, sizes(run_dir, cache, scratch)))
            record.work.append((at, work))
            if len(record.work) % 3 == 1:
                _show(record)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EVERY_S)
    return record, seen, segments


def _show(record: SoakSamples) -> None:
    (at, found), work, stores = record.processes[-1], record.work[-1][1], record.stores[-1][1]
    rss = {p.name: round(p.rss_mb) for p in found if " " not in p.name}
    say(at, work, "MB:", rss, {name: size / 2**20 for name, (size, _) in stores.items() if size > 1 << 20})
