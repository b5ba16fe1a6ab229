"""What a process serves to Prometheus: its own load, the broker's queues and workers, the figures of the last update.

::

    Load, StatusReport, {tag: value} ─ families ─▶ Exporter ─▶ http://127.0.0.1:PORT/metrics
                                                      └─▶ RUN/metrics/prometheus-PROCESS.json   (for file_sd_configs)

Invariants
* Values are read when they are fetched, from plain values that the process's loop has left; nothing waits for anybody.
* `run` and `process` are labels of the target, from the file, so that one dashboard serves any number of runs.
* A port that is taken is given way to: the file says which one it became.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kbrl_async.durable import write_atomically
from protocols.messages import Load, StageStanding, StatusReport, WorkerStanding

PREFIX = "kbrl_"
PORTS_EACH = 16
"""Ports of one kind of process: the first is the base's, the next that of its second process, and so on."""
_MB = 2.0**20

_LOAD: Mapping[str, tuple[str, Callable[[Load], float]]] = {
    "busy_ratio": ("Share of the last second at work", lambda load: load.busy),
    "loop_lag_seconds": ("Worst lag of the event loop in the last second", lambda load: load.lag_ms / 1000),
    "resident_bytes": ("Resident memory", lambda load: load.rss_mb * _MB),
    "cpu_cores": ("Cores in use by the process and its children", lambda load: load.cpu),
}
_GPU: Mapping[str, tuple[str, Callable[[Load], float]]] = {
    "gpu_ratio": ("Utilisation of the process's GPUs, in the mean", lambda load: load.gpu),
    "gpu_memory_bytes": ("Memory in use on the fullest of the process's GPUs", lambda load: load.gpu_mb * _MB),
}
_COUNTS: Mapping[str, tuple[str, Callable[[Load], float]]] = {
    "tasks_done": ("Tasks finished since start", lambda load: float(load.done)),
    "tokens": ("Tokens generated or trained since start", lambda load: float(load.tokens)),
}
_STAGE: Mapping[str, tuple[str, Callable[[StageStanding], float]]] = {
    "stage_queued": ("Tasks that wait at a stage", lambda stage: stage.queued),
    "stage_in_flight": ("Tasks that are leased at a stage", lambda stage: stage.in_flight),
    "stage_oldest_seconds": ("How long the head of a stage's queue has waited", lambda stage: stage.oldest_s),
    "stage_workers": ("Workers of a stage", lambda stage: stage.workers),
    "stage_credit": ("Leases that a stage's workers would take", lambda stage: stage.credit),
    "stage_versions_behind_mean": ("Mean policy lag of a stage's tasks", lambda stage: stage.lag_mean),
    "stage_versions_behind_max": ("Largest policy lag of a stage's tasks", lambda stage: stage.lag_max),
}
_WORKER: Mapping[str, tuple[str, Callable[[WorkerStanding], float]]] = {
    "worker_leases": ("Leases that a worker holds", lambda worker: worker.leases),
    "worker_suspect": ("1 while a worker misses its heartbeats", lambda worker: float(worker.suspect)),
    "worker_silent_seconds": ("Since a worker was last heard of", lambda worker: worker.silent_s),
}
_PARTS = re.compile(r"(?P<kind>level|turn_)(?P<value>[^/]+)/(?P<rest>.+)")


def _gauges(table: Mapping[str, tuple[str, Callable[[Any], float]]], prefix: str, values: Any) -> Iterator[Metric]:
    for name, (words, read) in table.items():
        yield GaugeMetricFamily(f"{PREFIX}{prefix}{name}", words, value=read(values))


def _by_label(
    table: Mapping[str, tuple[str, Callable[[Any], float]]],
    label: str,
    rows: Iterable[tuple[str, Any]],
    prefix: str = "",
) -> Iterator[Metric]:
    listed = list(rows)
    for name, (words, read) in table.items():
        family = GaugeMetricFamily(f"{PREFIX}{prefix}{name}", words, labels=[label])
        for value, row in listed:
            family.add_metric([value], read(row))
        yield family


def load_families(load: Load) -> Iterator[Metric]:
    """Of this process."""
    yield from _gauges(_LOAD, "process_", load)
    if load.gpu >= 0:
        yield from _gauges(_GPU, "process_", load)
    for name, (words, read) in _COUNTS.items():
        yield CounterMetricFamily(f"{PREFIX}process_{name}", words, value=read(load))


def status_families(report: StatusReport) -> Iterator[Metric]:
    """Of the whole system, as the broker sees it."""
    yield GaugeMetricFamily(f"{PREFIX}policy_version", "Newest policy version", value=report.policy_version)
    yield GaugeMetricFamily(f"{PREFIX}broker_epoch", "Starts of the broker in this run", value=report.epoch)
    yield GaugeMetricFamily(f"{PREFIX}broker_uptime_seconds", "Age of the broker's process", value=report.uptime_s)
    yield from _by_label(_STAGE, "stage", [(stage.stage, stage) for stage in report.stages])
    workers = [(worker.worker_id, worker) for worker in report.workers]
    yield from _by_label(_WORKER, "worker", workers)
    yield from _by_label(_LOAD, "worker", [(name, worker.load) for name, worker in workers], "worker_")
    on_gpu = [(name, worker.load) for name, worker in workers if worker.load.gpu >= 0]
    yield from _by_label(_GPU, "worker", on_gpu, "worker_")
    events = CounterMetricFamily(f"{PREFIX}ledger_events", "What the ledger has counted", labels=["event"])
    for name, count in report.counters.items():
        if name != "live":
            events.add_metric([name], count)
    yield events
    yield GaugeMetricFamily(f"{PREFIX}live_tasks", "Tasks under way", value=report.counters.get("live", 0))


def scalar_families(scalars: Mapping[str, float]) -> list[Metric]:
    """TensorBoard's tags: `version/correct_rate` is `kbrl_version_correct_rate`, `level2/correct_rate` is
    `kbrl_level_correct_rate{level="2"}`; turns alike."""
    found: dict[str, GaugeMetricFamily] = {}
    for tag, value in scalars.items():
        part = _PARTS.fullmatch(tag)
        label = part["kind"].rstrip("_") if part else ""
        name = metric_name(f"{label}/{part['rest']}" if part else tag)
        if name not in found:
            words = f"Last value of TensorBoard's {tag}"
            found[name] = GaugeMetricFamily(name, words, labels=[label] if label else [])
        found[name].add_metric([part["value"]] if part else [], value)
    return list(found.values())


def metric_name(tag: str) -> str:
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", tag)


class MetricsSource(msgspec.Struct, frozen=True):
    """Where a process's values are read from, each time they are fetched."""

    load: Callable[[], Load]
    status: Callable[[], StatusReport | None] = lambda: None
    scalars: Callable[[], Mapping[str, float]] = dict


class SourceCollector(Collector):
    def __init__(self, source: MetricsSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        yield from load_families(self._source.load())
        report = self._source.status()
        if report is not None:
            yield from status_families(report)
        yield from scalar_families(dict(self._source.scalars()))


class Exporter:
    """One process's endpoint; `close` takes it down and its file away."""

    def __init__(
        self, source: MetricsSource, *, run_dir: Path, process: str, host: str, port: int, labels: Mapping[str, str]
    ) -> None:
        """`port` 0, or one that is taken: any free one. Raises `OSError` where `host` is no address of ours."""
        registry = CollectorRegistry()
        registry.register(SourceCollector(source))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError:
            if not port:
                raise
            self._server, self._thread = start_http_server(0, host, registry)
        self.port: int = self._server.server_port
        self.path = target_file(run_dir, process)
        shown = f"[{host}]" if ":" in host else host
        targets = [{"targets": [f"{shown}:{self.port}"], "labels": {"process": process, **labels}}]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, msgspec.json.encode(targets).decode())

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def target_file(run_dir: Path, process: str) -> Path:
    """Prometheus finds all of a run with the pattern `RUN/metrics/prometheus-*.json`."""
    return run_dir / "metrics" / f"prometheus-{process}.json"


def port_of(base: int, kind: int, instance: int) -> int:
    """Port of the `instance`-th process of the `kind`-th service; 0 stays 0."""
    return base + PORTS_EACH * kind + instance if base else 0
