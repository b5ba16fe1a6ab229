"""What a run is to do, what it remembers, and how that is written down and read again."""

from __future__ import annotations

from collections import deque

import msgspec

from kbrl_async.evaluation.heldout import HeldoutEvaluations
from kbrl_async.evaluation.rounds import RoundsState
from kbrl_async.rollouts.alarms import AlarmChange, AlarmsState, AlarmWatch, rules_of
from kbrl_async.rollouts.buffer.buffer import RolloutBuffer
from kbrl_async.rollouts.buffer.events import Closed
from kbrl_async.rollouts.buffer.group import BufferState
from kbrl_async.rollouts.buffer.rules import BufferRules
from kbrl_async.rollouts.curriculum import CurriculumState, CurriculumTracker
from kbrl_async.rollouts.settings import Alarms, Curriculum
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.rollouts.trajectories import Trajectories, TrajectoriesState
from kbrl_async.rollouts.turns import TurnRules
from protocols.records import Problem, Strictness

KEPT_CHANGES = 100
"""Changes of alarms that a written state keeps."""
KEPT_ENDS = 256
"""Ends of groups that are told to the archive again after a restart: more than can be on their way to it."""


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
    strictness: dict[str, Strictness] = msgspec.field(default_factory=dict)


class RunMemory:
    """The memory of `RunState`, which alone changes it."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.turns_scored = 0
        """Of training rollouts; their numbers are in the journal's history."""
        self.fastest: dict[str, float] = {}
        """By problem: the lower end of the speedup's interval of the kernel that is kept."""
        self.staleness_max = 0
        self.updates = 0
        self.first_result: float | None = None
        self.last_update = 0.0
        self.clock = 0.0
        self.alarm_changes: list[AlarmChange] = []
        """All so far, newest last."""
        self.notes: list[str] = []
        """What the curriculum has changed, newest last."""
        self.ended_lately: deque[Closed] = deque(maxlen=KEPT_ENDS)
        self._buffer = RolloutBuffer(plan.buffer)
        self._trajectories = Trajectories()
        self._curriculum = CurriculumTracker(plan.curriculum, plan.training, plan.seed)
        self._alarms = AlarmWatch(rules_of(plan.alarms))
        self._heldout = HeldoutEvaluations(plan.heldout, plan.eval_samples, plan.eval_every, plan.eval_credit)
        self._stages: dict[str, str] = {}
        self._strictness: dict[str, Strictness] = {}
        self._batches: dict[str, list[str]] = {}
        self._open: dict[str, dict[str, RolloutStats]] = {}
        """Numbers of the turns of open groups, by group and turn."""
        self._problems = {problem.problem_id: problem for problem in [*plan.training, *plan.heldout]}

    def snapshot(self) -> RunSnapshot:
        """To be written at once: it shares what is open with this object."""
        return RunSnapshot(
            buffer=self._buffer.state(),
            curriculum=self._curriculum.state(),
            alarms=self._alarms.state(),
            trajectories=self._trajectories.state(),
            rounds=self._heldout.rounds.state(),
            evaluated=self._heldout.ended(),
            scored=self.turns_scored,
            fastest=self.fastest,
            staleness_max=self.staleness_max,
            updates=self.updates,
            first_result=self.first_result,
            last_update=self.last_update,
            clock=self.clock,
            alarm_changes=self.alarm_changes[-KEPT_CHANGES:],
            notes=self.notes,
            ended_lately=list(self.ended_lately),
            stages=self._stages,
            batches=self._batches,
            open=self._open,
            strictness=self._strictness,
        )

    def restore(self, snapshot: RunSnapshot) -> None:
        """Makes a new state that of `snapshot`; the plan stays."""
        self._buffer.restore(snapshot.buffer)
        self._curriculum.restore(snapshot.curriculum)
        self._alarms.restore(snapshot.alarms)
        self._trajectories.restore(snapshot.trajectories)
        self._heldout.restore(snapshot.evaluated, snapshot.rounds)
        if self._buffer.is_done:
            self._heldout.begin_after()
        self.turns_scored, self.fastest = snapshot.scored, snapshot.fastest
        self.staleness_max, self.updates = snapshot.staleness_max, snapshot.updates
        self.first_result, self.last_update = snapshot.first_result, snapshot.last_update
        self.clock, self.alarm_changes, self.notes = snapshot.clock, snapshot.alarm_changes, snapshot.notes
        self.ended_lately = deque(snapshot.ended_lately, maxlen=KEPT_ENDS)
        self._stages, self._batches, self._open = snapshot.stages, snapshot.batches, snapshot.open
        self._strictness = snapshot.strictness
