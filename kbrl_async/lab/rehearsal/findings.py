"""What a rehearsal has shown: where time and memory went, by process, what bounds it, and what to change. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.lab import plan
from kbrl_async.lab.plan import RunObservation
from kbrl_async.runs.archive.rows import TurnRow, UpdateRow
from kbrl_async.runs.config import Config
from kbrl_async.runs.sizing.footprint import GB
from kbrl_async.runs.sizing.layout import Tenant
from kbrl_async.runs.telemetry.system_metrics import SystemSample, busy_fractions
from protocols.messages import Stage

MIB = 2**20
COUNTED = 1000
"""Updates that a cost is told for."""
BUSY = 0.9
"""From here on, what a process does is what the run waits for."""


class ProcessUse(msgspec.Struct, frozen=True):
    """One process over the time of training."""

    name: str
    busy: float
    """Share of the time with something at work."""
    cores: float
    """Of the CPU, on average."""
    gpu: float
    """Utilisation of its GPUs in the mean, whoever uses them; −1: it has none."""
    gpu_gb: float
    """Most memory of its fullest GPU that was in use, by all."""
    tokens_per_s: float


class RehearsalFindings(msgspec.Struct, frozen=True):
    seconds: float
    """Of training: from the first scored answer to the last new version; of all that was seen where there is none."""
    first_answer_s: float
    """From the first sign of life of the run; −1: there was none."""
    first_update_s: float
    """Likewise."""
    updates: int
    answers: int
    tokens_median: float
    correct: float
    """Share of answers."""
    update_s: float
    """Seconds of the learner, on average."""
    between_s: float
    """Seconds from one new version to the next, on average."""
    learner_tokens_per_s: float
    mfu: float
    learner_gb: float
    """Most memory: of the GPU's allocator, or resident."""
    predicted_gb: dict[str, float]
    """By tenant; of a bench the least."""
    processes: list[ProcessUse]
    bottleneck: str
    """The stage that is busy most; empty before the first update."""
    changes: list[str]

    @property
    def hours(self) -> float:
        """Of `COUNTED` updates."""
        return self.between_s * COUNTED / 3600


def find(
    config: Config,
    samples: Sequence[SystemSample],
    updates: Sequence[UpdateRow],
    rows: Sequence[TurnRow],
    tenants: Sequence[Tenant],
) -> RehearsalFindings:
    """Of a run that ended too soon to train, what there is: who was ready when, busy how much, and its answers.

    :raises UserError: no process has said a word.
    """
    if not samples:
        raise UserError("the rehearsal ended before its processes had begun", "Give it more time")
    trained = _trained(samples)
    observed = plan.so_far(samples) if trained is None else trained
    metrics = [update.metrics for update in updates]
    bottleneck, changes = ("", list[str]()) if trained is None else _bounds(config, trained)
    return RehearsalFindings(
        first_answer_s=_since(samples, lambda sample: _tokens(sample) > 0),
        first_update_s=_since(samples, lambda sample: sample.policy_version > 0),
        seconds=observed.seconds,
        updates=len(updates),
        answers=len(rows),
        tokens_median=statistics.median([row.tokens for row in rows] or [0]),
        correct=sum(row.correct for row in rows) / max(1, len(rows)),
        update_s=observed.update_s,
        between_s=observed.seconds / max(1, observed.updates),
        learner_tokens_per_s=_mean(metrics, "tokens_per_s"),
        mfu=_mean(metrics, "mfu"),
        learner_gb=max([m.get("memory_peak_mb", 0.0) for m in metrics] or [0.0]) * MIB / GB,
        predicted_gb={tenant.name: tenant.footprint.total / GB for tenant in tenants},
        processes=_processes(samples),
        bottleneck=bottleneck,
        changes=changes,
    )


def _trained(samples: Sequence[SystemSample]) -> RunObservation | None:
    """The window of training; None before the first update."""
    try:
        found = plan.observe(samples)
    except UserError:
        return None
    return found if found.updates > 0 else None


def _bounds(config: Config, observed: RunObservation) -> tuple[str, list[str]]:
    """The bottleneck, and what to change."""
    rate, bottleneck = plan.carried(observed)
    window = plan.AdmissionWindow(config.max_staleness, config.batch_size, config.group_size)
    admitted = plan.plan(observed, observed.rollouts_per_hour, window=window).window_per_hour
    return bottleneck, list(_changes(config, observed, bottleneck, admitted < rate))


def _tokens(sample: SystemSample) -> int:
    return sum(worker.tokens for worker in sample.workers.values())


def _since(samples: Sequence[SystemSample], holds: Callable[[SystemSample], bool]) -> float:
    return next((sample.t - samples[0].t for sample in samples if holds(sample)), -1.0)


def _mean(metrics: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.fmean([m.get(name, 0.0) for m in metrics] or [0.0])


def _processes(samples: Sequence[SystemSample]) -> list[ProcessUse]:
    begun = next((s for s in samples if any(w.done for w in s.workers.values())), samples[0])
    inside = [sample for sample in samples if sample.t >= begun.t]
    seconds = max(1e-9, inside[-1].t - inside[0].t)
    busy = busy_fractions(inside, inside[0].t, inside[-1].t)
    found = []
    for name in sorted({name for sample in inside for name in sample.workers}):
        mine = [sample.workers[name] for sample in inside if name in sample.workers]
        written = max(w.tokens for w in mine) - min(w.tokens for w in mine)
        cores, gpu = (statistics.fmean([getattr(w, key) for w in mine]) for key in ("cpu", "gpu"))
        most = max(w.gpu_mb for w in mine) * MIB / GB
        found.append(ProcessUse(name, busy.get(name, 0.0), cores, gpu, most, written / seconds))
    return found


def _changes(config: Config, observed: RunObservation, bottleneck: str, by_window: bool) -> Iterator[str]:
    """What to set, by what the run waited for."""
    if by_window:
        yield f"admission lets less through than its slowest stage carries: raise max_staleness={config.max_staleness}"
    counts = config.processes
    if bottleneck == Stage.GENERATE:
        if config.sampler.engine == "transformers":
            yield "samplers: sampler.engine=vllm, which serves hundreds of answers at once"
        else:
            yield f"samplers: processes.sampler={counts.sampler + 1} on GPUs of their own (placement=split)"
    if bottleneck == Stage.BENCH:
        yield f"benches: processes.timing_bench={counts.timing_bench + 1}, on a GPU of its own or in turns"
    if bottleneck == Stage.COMPILE:
        yield f"compile cores: a host with more, or processes.compile_farm={counts.compile_farm + 1} on another one"
    if bottleneck == plan.TRAIN:
        ranks = config.learner.processes
        yield f"learner: learner.processes={2 * ranks}, a larger learner.token_budget, or fewer learner.epochs"
    busy = observed.update_s * observed.updates / observed.seconds
    if bottleneck != plan.TRAIN and busy < 1 - BUSY:
        yield f"learner: busy {busy:.0%} of the time; it could share its GPU with a sampler"
