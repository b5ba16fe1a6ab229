"""What a run has measured of itself: how long each stage works for one rollout. From the broker's lines, one a second.

The window goes from the first scored rollout to the last new policy version: making the policy and the evaluation after
training are outside of it. A rollout here is one scored answer, so one turn in a run of several turns.

Invariants
* A worker that was replaced counts from 0 again and never backwards.
* A gap in the lines (a run that was stopped and continued) is no time: at most `MAX_GAP_S` of it counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.runs.telemetry.system_metrics import SystemSample, WorkerSample
from protocols.messages import Stage
from protocols.rollout import STAGES as WORKED

MAX_GAP_S = 5.0
STAGES = (*WORKED, Stage.SCORE)
"""Stages that a rollout passes; `train` follows once a batch."""
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


class Observation(msgspec.Struct, frozen=True):
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

    def scaled(self, factors: Mapping[str, float]) -> Observation:
        """The same work at other speeds, such as generation and updates of a larger model."""
        stages = {stage: _times(work, factors.get(stage, 1.0)) for stage, work in self.stages.items()}
        return msgspec.structs.replace(self, stages=stages)

    def replaced(self, times: Mapping[str, float]) -> Observation:
        """With server seconds per rollout that were measured elsewhere, by stage."""
        work = {stage: _served(seconds * self.rollouts, self.stages.get(stage)) for stage, seconds in times.items()}
        return msgspec.structs.replace(self, stages={**self.stages, **work})


def told(times: Mapping[str, float], batch: int) -> Observation:
    """An observation that is only told: `times` are server seconds per rollout by stage, for batches of `batch`.

    :raises UserError: a stage that there is not, or a time that is none.
    """
    check_times(times)
    work = {stage: _served(seconds * batch, StageWork(tasks=batch)) for stage, seconds in times.items()}
    return Observation(1.0, batch, 1, work)


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


def observe(samples: Sequence[SystemSample]) -> Observation:
    """The window of training in a run's lines.

    :raises UserError: nothing was trained in them.
    """
    inside = _window(samples)
    found = _measure(inside) if len(inside) > 1 else None
    if found is None or found.rollouts <= 0:
        raise UserError("the run has trained nothing yet that could be measured", "Give a run with a few updates")
    return found


def halves(samples: Sequence[SystemSample]) -> tuple[Observation, Observation]:
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


def _measure(inside: Sequence[SystemSample]) -> Observation:
    work: dict[str, StageWork] = {stage: StageWork() for stage in (*STAGES, TRAIN)}
    seconds = broker = 0.0
    for before, now in itertools.pairwise(inside):
        span = min(MAX_GAP_S, max(0.0, now.t - before.t))
        seconds += span
        broker += span * now.broker.busy
        work = {stage: _add(done, stage, before, now, span) for stage, done in work.items()}
    trained = work[TRAIN].tasks
    scored = work[Stage.SCORE].tasks - trained  # the aggregator's other task: closing a trained batch
    return Observation(seconds, scored, trained, work, broker)


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
