"""What a run is to do, and what it remembers. Structs only."""

from __future__ import annotations

import msgspec

from kbrl_async.evaluation.rounds import RoundsState
from kbrl_async.rollouts.alarms import AlarmChange, AlarmsState
from kbrl_async.rollouts.buffer.buffer import BufferRules
from kbrl_async.rollouts.buffer.events import Closed
from kbrl_async.rollouts.buffer.group import BufferState
from kbrl_async.rollouts.curriculum import CurriculumState
from kbrl_async.rollouts.settings import Alarms, Curriculum
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.rollouts.trajectories import TrajectoriesState
from kbrl_async.rollouts.turns import TurnRules
from protocols.records import Problem


class RunPlan(msgspec.Struct, frozen=True):
    """What a run is to do; fixed for its length. `planning.plan_of` makes it of a configuration."""

    training: list[Problem]
    heldout: list[Problem]
    group_size: int
    seed: int
    max_minutes: float | None
    eval_samples: int
    eval_every: int
    eval_credit: int
    buffer: BufferRules
    turns: TurnRules
    curriculum: Curriculum
    alarms: Alarms


class RunSnapshot(msgspec.Struct, frozen=True):
    """All that a run remembers: as large as what is open, however long it is (I10). Journals hold it by these names."""

    buffer: BufferState = msgspec.field(name="book")
    curriculum: CurriculumState
    alarms: AlarmsState
    trajectories: TrajectoriesState = msgspec.field(name="dialogues")
    rounds: RoundsState
    evaluated: dict[str, dict[str, RolloutStats | None]]
    scored: int
    fastest: dict[str, float]
    staleness_max: int = msgspec.field(name="max_staleness")
    updates: int
    first_result: float | None
    last_update: float
    clock: float
    alarm_changes: list[AlarmChange]
    notes: list[str]
    ended_lately: list[Closed]
    stages: dict[str, str]
    batches: dict[str, list[str]]
    open: dict[str, dict[str, RolloutStats]]
