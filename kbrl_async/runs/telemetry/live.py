"""From the broker's status reports to what `kbrl top` shows: rates, stages, workers, the last errors. Pure.

::

    StatusReport before ─┐
    StatusReport now ────┴─ view ─▶ View ─▶ screen.render | JSON

Invariants
* Counters of a worker whose process was replaced start again at 0 and never count backwards.
* Right after a start of the broker there are no rates; they are None then, never 0.
* Figures about the run itself (rewards, limits) are facts that workers send with their load, so they are there for a
  viewer on another host too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kbrl_async.runs.telemetry import system_metrics
from kbrl_async.runs.telemetry.progress import MAKING, Progress
from kbrl_async.runs.telemetry.system_metrics import WorkerSample
from protocols.messages import Load, StatusReport, TroubleReport, WorkerStanding

RESULT_FACTS = (
    "reward_mean",
    "compile_rate",
    "correct_rate",
    "fast_1",
    "fast_1_proven",
    "speedup_mean",
    "workload_rate",
)
"""Facts of the newest policy version all of whose answers are in, as the reward aggregator sends them."""
LEARNER_FACTS = ("loss", "entropy", "grad_norm", "ess")
"""Facts of the last update, as the learner sends them."""


class RunRates(msgspec.Struct, frozen=True):
    """Over the last half minute."""

    rollouts_per_s: float
    tokens_per_s: float
    updates_per_h: float


class StageView(msgspec.Struct, frozen=True):
    """As `StageStanding`, with names in JSON."""

    stage: str
    queued: int
    in_flight: int
    oldest_s: float
    workers: int
    credit: int
    lag_mean: float
    lag_max: int


class Error(msgspec.Struct, frozen=True):
    """As `TroubleReport`, with names in JSON."""

    at: float
    who: str
    what: str


class WorkerView(msgspec.Struct, frozen=True):
    worker_id: str
    state: str
    """`working`, `idle`, `suspect` (it has missed heartbeats); of a service of which the broker knows no process,
    `starting` or `missing`."""
    stages: list[str]
    leases: int
    credit: int
    done: int
    done_per_s: float | None
    busy: float
    cpu: float
    """Cores."""
    gpu: float | None
    gpu_mb: float | None
    rss_mb: float
    lag_ms: float
    silent_s: float


class View(msgspec.Struct, frozen=True):
    """Everything that is shown."""

    run: str
    state: str
    """`running`, `stopping`, `away` (the broker does not answer), `stopped` or `ended` (there is a result)."""
    at: float = 0.0
    uptime_s: float = 0.0
    epoch: int = 0
    policy_version: int = 0
    away_s: float = 0.0
    """How long the broker has not answered."""
    progress: Progress | None = None
    """How far the run is, where its folder is on this host."""
    rates: RunRates | None = None
    staleness_max: int = 0
    """Most policy versions that a task under way is behind."""
    facts: dict[str, float] = msgspec.field(default_factory=dict)
    """Of the last update."""
    stages: list[StageView] = msgspec.field(default_factory=list)
    workers: list[WorkerView] = msgspec.field(default_factory=list)
    """The broker itself stands first."""
    counters: dict[str, int] = msgspec.field(default_factory=dict)
    errors: list[Error] = msgspec.field(default_factory=list)
    """Newest first."""


def view(
    before: StatusReport | None,
    now: StatusReport,
    more: Iterable[TroubleReport] = (),
    away_s: float = 0.0,
    progress: Progress | None = None,
    expected: Sequence[str] = (),
) -> View:
    """What `now` says, workers' rates since `before`.

    :param more: errors from elsewhere, such as the log files.
    :param expected: services that the run has on this host.
    """
    earlier = before if before and before.epoch == now.epoch and now.at > before.at else None
    loads = [worker.load for worker in now.workers]
    # learner and samplers join when there is a policy
    state = "starting" if progress is None or progress.phase == MAKING else "missing"
    here = {part for worker in now.workers for part in worker.worker_id.split(".")}
    names = [name for name in expected if name not in here] if not (away_s or now.draining) else []
    absent = [msgspec.structs.replace(_process(name, Load()), state=state) for name in names]
    return View(
        run=now.run,
        state="away" if away_s else "stopping" if now.draining else "running",
        at=now.at,
        uptime_s=now.uptime_s,
        epoch=now.epoch,
        policy_version=now.policy_version,
        away_s=away_s,
        progress=progress,
        rates=RunRates(**now.rates) if now.rates.keys() == set(RunRates.__struct_fields__) else None,
        staleness_max=max((stage.lag_max for stage in now.stages), default=0),
        facts={name: value for load in loads for name, value in load.facts.items()},
        stages=[StageView(**msgspec.structs.asdict(stage)) for stage in now.stages],
        workers=[
            _process("broker", now.broker),
            *sorted([*(_worker(w, earlier, now) for w in now.workers), *absent], key=_by_name),
        ],
        counters=now.counters,
        errors=[Error(t.at, t.who, t.what) for t in sorted([*now.troubles, *more], key=lambda t: -t.at)],
    )


def rates(before: StatusReport, now: StatusReport) -> RunRates:
    """What the broker tells in its reports; `before` must be older."""
    return RunRates(**system_metrics.rates(_counted(before), _counted(now), elapsed_s(before, now)))


def elapsed_s(before: StatusReport, now: StatusReport) -> float:
    """Between two reports: by the broker's own age, which no correction of a clock changes, where they tell it."""
    by_age = now.uptime_s - before.uptime_s
    return by_age if by_age > 0 else now.at - before.at


def _counted(report: StatusReport) -> dict[str, WorkerSample]:
    return {
        worker.worker_id: WorkerSample(worker.stages, done=worker.load.done, tokens=worker.load.tokens)
        for worker in report.workers
    }


def _worker(worker: WorkerStanding, before: StatusReport | None, now: StatusReport) -> WorkerView:
    load = worker.load
    old = next((w.load for w in before.workers if w.worker_id == worker.worker_id), None) if before else None
    made = _process(worker.worker_id, load)
    return msgspec.structs.replace(
        made,
        state="suspect" if worker.suspect else "working" if worker.leases else "idle",
        stages=worker.stages,
        leases=worker.leases,
        credit=min(worker.slots, worker.credit),
        done_per_s=system_metrics.grown(old.done, load.done) / (now.at - before.at) if before and old else None,
        silent_s=worker.silent_s,
    )


def _process(name: str, load: Load) -> WorkerView:
    has_gpu = load.gpu >= 0
    return WorkerView(
        worker_id=name,
        state="working",
        stages=[],
        leases=0,
        credit=0,
        done=load.done,
        done_per_s=None,
        busy=load.busy,
        cpu=load.cpu,
        gpu=load.gpu if has_gpu else None,
        gpu_mb=load.gpu_mb if has_gpu else None,
        rss_mb=load.rss_mb,
        lag_ms=load.lag_ms,
        silent_s=0.0,
    )


def _by_name(worker: WorkerView) -> tuple[bool, str]:
    """Suspects first: they are why somebody looks."""
    return worker.state not in ("suspect", "missing"), worker.worker_id
