"""Where else a run's figures go: Weights & Biases and MLflow, beside TensorBoard. Off unless a setting asks for them.

::

    MetricsWriter ─▶ MetricsOutput ─┬─▶ Writer (event files)
                            └─▶ Sinks: a queue and a thread ─▶ wandb, mlflow

Invariants
* A run never waits for a service, and none of their faults ends it: what can't be sent is said once, and counted.
* A continued run goes on in the same run there.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import queue
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog

from kbrl_async.errors import MissingTool
from kbrl_async.runs.settings import Metrics
from kbrl_async.runs.telemetry.tensorboard import Writer

WAITING = 1_000
CLOSE_S = 20.0
"""How long the end of a run waits for what was not sent yet."""
log = structlog.get_logger()


class Sink(Protocol):
    """One service. Its methods are called by one thread, and may raise."""

    def send(self, part: str, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Wandb:
    """`training/*` by update and `system/*` by second, each against an axis of its own."""

    def __init__(self, project: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=project,
            name=run_dir.name,
            id=hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
        )
        for part in ("training", "system"):
            self._run.define_metric(f"{part}/step", hidden=True)
            self._run.define_metric(f"{part}/*", step_metric=f"{part}/step")

    def send(self, part: str, values: Mapping[str, float], step: int) -> None:
        self._run.log({f"{part}/{name}": value for name, value in values.items()} | {f"{part}/step": step})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """Metrics of a run of the experiment `kbrl-async`."""

    EXPERIMENT = "kbrl-async"
    MOST = 1000
    """Metrics of one request, as its servers take them."""

    def __init__(self, uri: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._entities = importlib.import_module("mlflow.entities")
        self._client = importlib.import_module("mlflow.tracking").MlflowClient(uri)
        found = self._client.get_experiment_by_name(self.EXPERIMENT)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(self.EXPERIMENT)
        mark = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
        runs = self._client.search_runs([experiment], f"tags.kbrl = '{mark}'", max_results=1)
        made = runs[0] if runs else self._client.create_run(experiment, run_name=run_dir.name, tags={"kbrl": mark})
        self._run: str = made.info.run_id
        if not runs:
            for name, value in config.items():
                self._client.log_param(self._run, name, value)

    def send(self, part: str, values: Mapping[str, float], step: int) -> None:
        now, metric = int(1000 * time.time()), self._entities.Metric
        metrics = [metric(f"{part}/{name}", value, now, step) for name, value in values.items()]
        for place in range(0, len(metrics), self.MOST):
            self._client.log_batch(self._run, metrics[place : place + self.MOST])

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Sinks:
    """All that a run has; `send` returns at once."""

    def __init__(self, makers: Sequence[Any]) -> None:
        """`makers` make a `Sink` each, in the thread: a service may take its time to answer."""
        self._waiting: queue.Queue[tuple[str, Mapping[str, float], int] | None] = queue.Queue(WAITING)
        self.lost = 0
        self._thread = threading.Thread(target=self._work, args=(makers,), name="sinks", daemon=True)
        self._thread.start()

    def send(self, part: str, values: Mapping[str, float], step: int) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        try:
            self._waiting.put_nowait((part, finite, step))
        except queue.Full:
            self._failed("figures wait for a service that does not take them", "they are in TensorBoard's files")

    def close(self) -> None:
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _work(self, makers: Sequence[Any]) -> None:
        sinks = [sink for make in makers if (sink := self._made(make)) is not None]
        while (found := self._waiting.get()) is not None:
            for sink in sinks:
                try:
                    sink.send(*found)
                except Exception as error:  # supervisor: their faults are no fault of the run
                    self._failed("figures could not be sent", f"{type(error).__name__}: {error}")
        for sink in sinks:
            try:
                sink.close()
            except Exception as error:  # supervisor: the same
                self._failed("a service could not be told of the end", f"{type(error).__name__}: {error}")

    def _made(self, make: Any) -> Sink | None:
        try:
            sink: Sink = make()
        except Exception as error:  # supervisor: no service, no account, no network
            self._failed("no figures go to a service", f"{type(error).__name__}: {error}")
            return None
        return sink

    def _failed(self, what: str, why: str) -> None:
        self.lost += 1
        if self.lost == 1:
            log.warning(what, cause=why[:300], cure="see metrics.wandb_project and metrics.mlflow_uri")


class MetricsOutput:
    """What a `Writer` is, and the sinks beside it; either may be missing."""

    def __init__(self, part: str, writer: Writer | None, sinks: Sinks | None) -> None:
        self._part, self._writer, self._sinks = part, writer, sinks

    def scalars(self, values: Mapping[str, float], step: int, at: float | None = None) -> None:
        if self._writer is not None:
            self._writer.scalars(values, step, at)
        if self._sinks is not None and values:
            self._sinks.send(self._part, values, step)

    def histogram(self, tag: str, values: Sequence[float], step: int) -> None:
        if self._writer is not None:
            self._writer.histogram(tag, values, step)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def open_sinks(settings: Metrics, run_dir: Path, config: Mapping[str, Any]) -> Sinks | None:
    """None where no setting asks for one.

    :raises MissingTool: one is asked for and its library is not installed.
    """
    wanted = {"wandb": (settings.wandb_project, Wandb), "mlflow": (settings.mlflow_uri, Mlflow)}
    makers = []
    for module, (value, kind) in wanted.items():
        if value is None:
            continue
        if importlib.util.find_spec(module) is None:
            raise MissingTool(f"{module} is not installed", f"pip install 'kbrl-async[{module}]'")
        makers.append(lambda kind=kind, value=value: kind(value, run_dir, config))
    return Sinks(makers) if makers else None


def open_output(
    part: str, folder: Path | None, sinks: Sinks | None, without: Collection[str] = ()
) -> MetricsOutput | None:
    """`folder` None: no event files. None where there is nothing to write to."""
    writer = Writer(folder / part, without) if folder is not None else None
    return MetricsOutput(part, writer, sinks) if writer is not None or sinks is not None else None
