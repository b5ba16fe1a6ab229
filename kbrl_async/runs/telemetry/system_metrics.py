"""From the broker's own lines (`runs/NAME/metrics/system.jsonl`, one a second) to throughput and busy fractions.

Invariants
* A worker keeps its id when its process is replaced; its counters then start at 0 again and never count backwards.
* A process that is not there is idle: its busy fraction is over the whole interval, not over its life.
* The last line may be half written; it is read when it is whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from kbrl_async.durable import write_atomically
from protocols.messages import Stage

ENGINE_FACTS = ("kv_usage", "preemptions")
"""Facts of a sampler whose engine is vLLM."""


class WorkerSample(msgspec.Struct, frozen=True):
    """What a worker said with its last heartbeat, and what the broker knows of it."""

    stages: list[str] = msgspec.field(default_factory=list)
    busy: float = 0.0
    lag_ms: float = 0.0
    rss_mb: float = 0.0
    cpu: float = 0.0
    gpu: float = -1.0
    gpu_mb: float = 0.0
    queued: int = 0
    done: int = 0
    tokens: int = 0
    leases: int = 0
    suspect: bool = False
    facts: dict[str, float] = msgspec.field(default_factory=dict)
    """Figures of its own, as `Load.facts`."""


class BrokerSample(msgspec.Struct, frozen=True):
    busy: float = 0.0
    lag_ms: float = 0.0
    rss_mb: float = 0.0
    cpu: float = 0.0


class SystemSample(msgspec.Struct, frozen=True):
    """One line: the whole system at one moment."""

    t: float
    """Epoch seconds."""
    policy_version: int = -1
    queues: dict[str, int] = msgspec.field(default_factory=dict)
    in_flight: dict[str, int] = msgspec.field(default_factory=dict)
    oldest_s: dict[str, float] = msgspec.field(default_factory=dict)
    counters: dict[str, float] = msgspec.field(default_factory=dict)
    workers: dict[str, WorkerSample] = msgspec.field(default_factory=dict)
    broker: BrokerSample = BrokerSample()


_DECODER = msgspec.json.Decoder(SystemSample)


class Tail:
    """Reads the lines that were added since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[SystemSample]:
        """Whole new lines. What a crash left half written in the middle of the file is passed over."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._offset:
                self._offset = 0  # the broker has set a full file aside and begun a new one
            file.seek(self._offset)
            *lines, rest = file.read().split(b"\n")
            self._offset = file.tell() - len(rest)
        return [sample for line in lines if (sample := parse(line)) is not None]


def written(path: Path) -> Iterator[SystemSample]:
    """All samples that are still on disk, oldest first: those of the file that was set aside, then `path`'s own."""
    for part in (path.with_suffix(f"{path.suffix}.1"), path):
        if part.is_file():
            with part.open("rb") as file:
                yield from (sample for line in file if (sample := parse(line)) is not None)


def begun(run_dir: Path, first: float) -> float:
    """When the run began, in epoch seconds: the time of its first sample, noted once and kept over restarts."""
    note = run_dir / "metrics" / "begun"
    try:
        return float(note.read_text())
    except (FileNotFoundError, ValueError):
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, f"{first:.3f}\n")
        return first


def parse(line: bytes) -> SystemSample | None:
    """One line, None if it is no whole sample."""
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError:
        return None


def scalars(previous: SystemSample | None, current: SystemSample) -> dict[str, float]:
    """TensorBoard tag → value at the time of `current`; rates are since `previous`."""
    values: dict[str, float] = {}
    for folder, by_stage in (
        ("queue", current.queues),
        ("in_flight", current.in_flight),
        ("oldest_s", current.oldest_s),
        ("counter", current.counters),
    ):
        values |= {f"{folder}/{stage}": float(value) for stage, value in by_stage.items()}
    for name, process in _processes(current).items():
        values |= {f"busy/{name}": process.busy, f"lag_ms/{name}": process.lag_ms, f"rss_mb/{name}": process.rss_mb}
        values[f"cpu_cores/{name}"] = process.cpu
        if isinstance(process, WorkerSample) and process.gpu >= 0:
            values |= {f"gpu/{name}": process.gpu, f"gpu_mb/{name}": process.gpu_mb}
        if isinstance(process, WorkerSample):
            values |= {f"{fact}/{name}": process.facts[fact] for fact in ENGINE_FACTS if fact in process.facts}
    values["workers/suspect"] = float(sum(worker.suspect for worker in current.workers.values()))
    return values | (_throughput(previous, current) if previous else {})


def _processes(sample: SystemSample) -> Mapping[str, WorkerSample | BrokerSample]:
    return {"broker": sample.broker, **sample.workers}


def _throughput(previous: SystemSample, current: SystemSample) -> dict[str, float]:
    seconds = current.t - previous.t
    found = rates(previous.workers, current.workers, seconds) if seconds > 0 else {}
    return {f"throughput/{name}": rate for name, rate in found.items()}


def rates(before: Mapping[str, WorkerSample], now: Mapping[str, WorkerSample], seconds: float) -> dict[str, float]:
    """`rollouts_per_s`, `tokens_per_s` and `updates_per_h` of what the workers have counted up meanwhile."""

    def gained(stage: Stage, counter: str) -> int:
        return sum(
            grown(getattr(before.get(name, WorkerSample()), counter), getattr(worker, counter))
            for name, worker in now.items()
            if stage in worker.stages
        )

    return {
        "rollouts_per_s": gained(Stage.SCORE, "done") / seconds,
        "tokens_per_s": gained(Stage.GENERATE, "tokens") / seconds,
        "updates_per_h": gained(Stage.TRAIN, "done") / seconds * 3600,
    }


def grown(before: int, now: int) -> int:
    """By how much a counter rose; a worker that was replaced counts from 0."""
    return now - before if now >= before else now


def busy_fractions(samples: Iterable[SystemSample], start: float, end: float) -> dict[str, float]:
    """Mean busy fraction of each process between `start` and `end` (epoch seconds).

    A sample stands for the time since the one before it, so pauses in the file weigh as long as they lasted.
    """
    worked: dict[str, float] = {}
    before = start
    for sample in samples:
        if start <= sample.t <= end:
            for name in _processes(sample):
                worked[name] = worked.get(name, 0.0) + (sample.t - before) * _busy(sample, name)
            before = sample.t
    total = before - start
    return {name: seconds / total for name, seconds in worked.items()} if total > 0 else {}


def _busy(sample: SystemSample, name: str) -> float:
    process = _processes(sample).get(name)
    # what a suspect said last is old news
    if process is None or (isinstance(process, WorkerSample) and process.suspect):
        return 0.0
    return min(1.0, max(0.0, process.busy))
