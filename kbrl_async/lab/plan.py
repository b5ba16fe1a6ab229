"""How many processes a wished throughput needs, from stage times that a run has measured.

::

    runs/NAME/metrics/system.jsonl ─ observe ─▶ RunObservation ─ plan ─▶ Capacity: servers by stage, what ends first
                                                    ▲ times of other hosts or models replace measured ones

The operational laws, with headroom. With λ rollouts a second, stage *i* that costs Dᵢ server seconds per rollout and
visits Vᵢ of it per rollout:

* utilisation law: ρᵢ = λ·Dᵢ/mᵢ, so mᵢ = ⌈λ·Dᵢ/ρ*⌉ servers keep it at or below the target ρ* (Denning and Buzen,
  "The operational analysis of queueing network models", 1978);
* wait in its queue, per visit (Erlang's C formula for M/M/m, scaled by variability as Allen and Cunneen do):
  Wᵢ ≈ c·C(mᵢ, λDᵢ)·(Dᵢ/Vᵢ) / (mᵢ(1−ρᵢ)), with c = (c²arrivals + c²service)/2;
* Little's law on the admission window (I2): a rollout holds its place from admission until its update is done, on
  average Σ Vᵢ(Hᵢ+Wᵢ), then half of a batch's gathering, P·G/2λ, then the update T. The window has (S+1)·P·G places,
  so λ ≤ (S+½)·P·G / (Σ Vᵢ(Hᵢ+Wᵢ) + T).

What bounds a given layout is the smallest of mᵢ/Dᵢ and the window's rate.

The window of an observation goes from the first scored rollout to the last new policy version: making the policy and
the evaluation after training are outside of it. A rollout here is one scored answer, so one turn of several.

Invariants
* A worker that was replaced counts from 0 again and never backwards.
* A gap in the broker's lines (a run that was stopped and continued) is no time: at most `MAX_GAP_S` of it counts.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.errors import CheckpointError, UserError
from kbrl_async.runs.telemetry.system_metrics import SystemSample, WorkerSample
from protocols.messages import Stage

MAX_GAP_S = 5.0
STAGES = (Stage.GENERATE, Stage.COMPILE, Stage.VERIFY, Stage.BENCH, Stage.SCORE)
"""Stages that a rollout passes, `verify` where there are verifiers; `train` follows once a batch."""
TRAIN = Stage.TRAIN
BROKER = "broker"


class StageWork(msgspec.Struct, frozen=True):
    """What one stage did in the window."""

    busy_s: float = 0.0
    """Seconds of its processes with at least one task at work, added up; overlapping tasks count once."""
    cores_s: float = 0.0
    """Core seconds that they and their children used; 0 where they did not say."""
    tasks: int = 0
    held_s: float = 0.0
    """Task seconds between dispatch and result, added up: prefetched tasks included."""
    processes: int = 0


class RunObservation(msgspec.Struct, frozen=True):
    """One run, or a part of it."""

    seconds: float
    rollouts: int
    updates: int
    stages: dict[str, StageWork]
    broker_busy_s: float = 0.0

    @property
    def rollouts_per_hour(self) -> float:
        return self.rollouts / self.seconds * 3600

    def demand(self, stage: str) -> float:
        """Seconds of one server that a rollout costs at a stage; of one core at `compile`."""
        if stage == BROKER:
            return self.broker_busy_s / self.rollouts
        work = self.stages.get(stage, StageWork())
        spent = work.cores_s if stage == "compile" and work.cores_s else work.busy_s
        return spent / self.rollouts

    def visits(self, stage: str) -> float:
        """Tasks of a stage per rollout: what fails early never comes to the bench."""
        return self.stages.get(stage, StageWork()).tasks / self.rollouts

    def held(self, stage: str) -> float:
        """Mean seconds from a task's dispatch to its result."""
        work = self.stages.get(stage, StageWork())
        return work.held_s / work.tasks if work.tasks else 0.0

    @property
    def update_s(self) -> float:
        """Seconds that one update takes the learner."""
        return self.stages.get(TRAIN, StageWork()).busy_s / self.updates if self.updates else 0.0

    def scaled(self, factors: Mapping[str, float]) -> RunObservation:
        """The same work at other speeds, such as generation and updates of a larger model."""
        stages = {stage: _times(work, factors.get(stage, 1.0)) for stage, work in self.stages.items()}
        return msgspec.structs.replace(self, stages=stages)

    def replaced(self, times: Mapping[str, float]) -> RunObservation:
        """With server seconds per rollout that were measured elsewhere, by stage."""
        work = {stage: _served(seconds * self.rollouts, self.stages.get(stage)) for stage, seconds in times.items()}
        return msgspec.structs.replace(self, stages={**self.stages, **work})


def observation_of(times: Mapping[str, float], batch: int) -> RunObservation:
    """An observation that is only told: `times` are server seconds per rollout by stage, for batches of `batch`.

    :raises UserError: a stage that there is not, or a time that is none.
    """
    check_times(times)
    work = {stage: _served(seconds * batch, StageWork(tasks=batch)) for stage, seconds in times.items()}
    return RunObservation(1.0, batch, 1, work)


def check_times(times: Mapping[str, float]) -> None:
    for stage, seconds in times.items():
        if stage not in (*STAGES, TRAIN):
            raise UserError(f"'{stage}' is no stage", f"Choose among {', '.join((*STAGES, TRAIN))}")
        if not 0 <= seconds < float("inf"):
            raise UserError(f"{stage}={seconds} is no time", "Give seconds of one server per rollout")


def _times(work: StageWork, factor: float) -> StageWork:
    return msgspec.structs.replace(
        work, busy_s=work.busy_s * factor, cores_s=work.cores_s * factor, held_s=work.held_s * factor
    )


def _served(seconds: float, known: StageWork | None) -> StageWork:
    work = known or StageWork(tasks=1)
    return msgspec.structs.replace(work, busy_s=seconds, cores_s=seconds, held_s=seconds)


def observe(samples: Sequence[SystemSample]) -> RunObservation:
    """The window of training in a run's lines.

    :raises UserError: nothing was trained in them.
    """
    inside = _window(samples)
    found = _measure(inside) if len(inside) > 1 else None
    if found is None or found.rollouts <= 0:
        raise UserError("the run has trained nothing yet that could be measured", "Give a run with a few updates")
    return found


def so_far(samples: Sequence[SystemSample]) -> RunObservation:
    """All of a run's lines, whether or not it has trained."""
    return _measure(samples)


def halves(samples: Sequence[SystemSample]) -> tuple[RunObservation, RunObservation]:
    """The first and the second half of the window: what the one predicts can be held against the other."""
    inside = _window(samples)
    middle = len(inside) // 2
    first, second = (_measure(part) for part in (inside[: middle + 1], inside[middle:]))
    if first.rollouts <= 0 or second.rollouts <= 0:
        raise UserError("the run is too short to be cut in halves", "Give a run with a few updates")
    return first, second


def _window(samples: Sequence[SystemSample]) -> Sequence[SystemSample]:
    begun = [n for n, sample in enumerate(samples) if _done(sample, "score") > 0]
    rose = [n for n, (a, b) in enumerate(itertools.pairwise(samples), 1) if b.policy_version > a.policy_version]
    if not begun or not rose:
        return []
    return samples[max(0, begun[0] - 1) : rose[-1] + 1]


def _measure(inside: Sequence[SystemSample]) -> RunObservation:
    work: dict[str, StageWork] = {stage: StageWork() for stage in (*STAGES, TRAIN)}
    seconds = broker = 0.0
    for before, now in itertools.pairwise(inside):
        span = min(MAX_GAP_S, max(0.0, now.t - before.t))
        seconds += span
        broker += span * now.broker.busy
        work = {stage: _add(done, stage, before, now, span) for stage, done in work.items()}
    scored = work[Stage.SCORE].tasks - work[TRAIN].tasks  # the aggregator's other task: closing a trained batch
    trained = inside[-1].policy_version - inside[0].policy_version  # the learner's other task: the run's end
    return RunObservation(seconds, scored, trained, work, broker)


def _add(work: StageWork, stage: str, before: SystemSample, now: SystemSample, span: float) -> StageWork:
    mine = {name: worker for name, worker in now.workers.items() if stage in worker.stages}
    alive = [worker for worker in mine.values() if not worker.suspect]
    return StageWork(
        work.busy_s + span * sum(worker.busy for worker in alive),
        work.cores_s + span * sum(worker.cpu for worker in alive),
        work.tasks + sum(_gained(before.workers.get(name), worker) for name, worker in mine.items()),
        work.held_s + span * now.in_flight.get(stage, 0),
        max(work.processes, len(mine)),
    )


def _gained(before: WorkerSample | None, now: WorkerSample) -> int:
    earlier = before.done if before is not None else 0
    return now.done - earlier if now.done >= earlier else now.done


def _done(sample: SystemSample, stage: str) -> int:
    return sum(worker.done for worker in sample.workers.values() if stage in worker.stages)


# ── from seconds to servers ──────────────────────────────────────────────────────────────────────────────────────────


TARGET = 0.8
ONLY_ONE = {TRAIN: "learner", "score": "aggregator", BROKER: "broker"}
"""Stages served by one process, and how it is called: more load than it can carry needs a faster one."""
RESOURCES = {
    Stage.GENERATE: "samplers",
    Stage.COMPILE: "compile cores",
    Stage.VERIFY: "verifiers",
    Stage.BENCH: "timing benches",
    **ONLY_ONE,
}
COUNTED = {Stage.GENERATE: "sampler", Stage.VERIFY: "verifier", Stage.BENCH: "timing_bench"}
"""By stage, the key of `processes` that says how many serve it; a farm's cores are no processes."""


class AdmissionWindow(msgspec.Struct, frozen=True):
    """Admission: S, P and G."""

    max_staleness: int
    batch_size: int
    group_size: int

    @property
    def places(self) -> float:
        """Rollouts that may be on their way beside the half batch that gathers."""
        return (self.max_staleness + 0.5) * self.batch_size * self.group_size


class Resource(msgspec.Struct, frozen=True):
    """One stage in a plan."""

    stage: str
    name: str
    demand_s: float
    """Server seconds per rollout."""
    servers: int
    """How many it takes; 1 where there can only be one."""
    load: float
    """λ·D: servers that would be busy all the time."""
    utilisation: float
    wait_s: float
    """In its queue, per visit; infinite at a load that it can't carry."""
    limit_per_hour: float
    """Rollouts an hour at which these servers are never idle."""

    @property
    def is_overloaded(self) -> bool:
        return self.utilisation >= 1.0


class Capacity(msgspec.Struct, frozen=True):
    rollouts_per_hour: float
    target: float
    resources: list[Resource]
    bottleneck: Resource
    """What saturates first if the load grows beyond this plan."""
    residence_s: float
    """From admission to the update, without the batch's gathering."""
    window_per_hour: float
    """Rollouts an hour that the admission window lets through; infinite where it is not known."""

    @property
    def settings(self) -> dict[str, int]:
        """Keys of a configuration that start these processes."""
        return {f"processes.{COUNTED[Stage(r.stage)]}": r.servers for r in self.resources if r.stage in COUNTED}

    @property
    def problems(self) -> list[str]:
        """Why this rate can't be reached by adding processes, in words."""
        found = [
            f"{r.name}: would be busy {r.load:.0%} of the time, and a run has one"
            for r in self.resources
            if r.utilisation > self.target + 1e-9
        ]
        if self.window_per_hour < self.rollouts_per_hour:
            found.append(
                f"admission window: lets {self.window_per_hour:,.0f} an hour through; raise max_staleness or batch_size"
            )
        return found


def plan(
    observed: RunObservation,
    rollouts_per_hour: float,
    *,
    target: float = TARGET,
    variability: float = 1.0,
    window: AdmissionWindow | None = None,
) -> Capacity:
    """Servers for a wished rate.

    :param target: largest utilisation that is planned for, in (0, 1).
    :param variability: c above; 1 is a Poisson stream of exponential times, bursts are more.
    :raises UserError: no positive rate, or a target outside of (0, 1).
    """
    if not rollouts_per_hour > 0 or not 0 < target < 1:
        raise UserError("a plan needs a rate above 0 and a utilisation between 0 and 1", "Such as 20000 and 0.8")
    rate = rollouts_per_hour / 3600
    served = [stage for stage in RESOURCES if stage != Stage.VERIFY or observed.visits(stage)]
    resources = [_resource(observed, stage, rate, target, variability) for stage in served]
    residence = _residence(observed, resources)
    admitted = window.places / residence * 3600 if window is not None and residence > 0 else math.inf
    tightest = min(resources, key=lambda r: r.limit_per_hour)
    return Capacity(rollouts_per_hour, target, resources, tightest, residence, admitted)


def carried(observed: RunObservation) -> tuple[float, str]:
    """Rollouts an hour at which the first stage is never idle, and which one: min mᵢ/Dᵢ of what was measured."""
    rates = {}
    for stage in (*STAGES, TRAIN):
        work = observed.stages.get(stage)
        if work is not None and work.busy_s > 0:
            rates[stage] = work.processes * observed.rollouts / work.busy_s * 3600
    stage = min(rates, key=lambda name: rates[name])
    return rates[stage], stage


def wait_s(service_s: float, servers: int, utilisation: float, variability: float = 1.0) -> float:
    """Mean wait of one task in the queue of a stage; infinite from full load on."""
    if utilisation >= 1:
        return math.inf
    load, blocked = servers * utilisation, 1.0  # Erlang's B, by its recursion: factorials would overflow
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    waits = blocked / (1 - utilisation * (1 - blocked))
    return variability * waits * service_s / (servers * (1 - utilisation))


def _resource(observed: RunObservation, stage: str, rate: float, target: float, variability: float) -> Resource:
    demand, visits = observed.demand(stage), observed.visits(stage)
    load = rate * demand
    servers = 1 if stage in ONLY_ONE else max(1, math.ceil(load / target - 1e-9))
    limit = servers / demand * 3600 if demand > 0 else math.inf
    wait = wait_s(demand / visits if visits > 0 else demand, servers, load / servers, variability)
    return Resource(stage, RESOURCES[stage], demand, servers, load, load / servers, wait, limit)


def _residence(observed: RunObservation, resources: list[Resource]) -> float:
    """Σ Vᵢ(Hᵢ+Wᵢ) + T; a stage that is overloaded waits for ever, and is named as that instead."""
    total = observed.update_s
    for resource in resources:
        wait = 0.0 if resource.is_overloaded else resource.wait_s
        if resource.stage == TRAIN:
            total += wait
        elif resource.stage != BROKER:
            total += observed.visits(resource.stage) * (observed.held(resource.stage) + wait)
    return total


# ── how large a policy is: generation and updates are taken to cost in proportion to its parameters ──────────────────


_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_MAX_HEADER_BYTES = 100 << 20
_NAMED = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([kmbt])(?![A-Za-z0-9])", re.IGNORECASE)
"""A size in a name, as in Qwen2.5-Coder-7B-Instruct."""


def count_parameters(model: str) -> float:
    """Of a folder with safetensors files, or of a name or number that says it, such as 7B.

    :raises UserError: a name that says no size. CheckpointError: a folder without readable weights.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} holds no *.safetensors", "Give a folder that a model was saved to")
        return float(sum(map(_in_file, files)))
    sizes = _NAMED.findall(folder.name)
    if not sizes:
        cure = "Give a folder, or a size such as --model 7B"
        raise UserError(f"how many parameters {model} has can't be told from its name", cure)
    number, unit = sizes[-1]
    return float(number) * _UNITS[unit.lower()]


def _in_file(path: Path) -> int:
    """Elements of all tensors, from the file's header: the weights themselves are not read."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = msgspec.json.decode(file.read(min(length, _MAX_HEADER_BYTES)))
    except (OSError, struct.error, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} can't be read as safetensors: {error}", "Restore it from a copy") from None
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
