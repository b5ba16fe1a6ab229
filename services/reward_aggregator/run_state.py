"""The run as a pure state machine: evaluate before, train, evaluate after. Replayable from its own entries.

::

    before ─ all held-out rollouts ended ─▶ train ─ the group book is done ─▶ after ─▶ ended
      └ training groups are admitted from the start; only the first batch waits for the evaluation of version 0

Invariants
* Every change is an `Entry`; `apply` of the same entries gives the same campaign (I9).
* An evaluation rollout counts once, and never enters a batch.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import msgspec

from kbrl_async.rollouts.alarms import AlarmChange, AlarmOptions, Alarms, AlarmsState
from kbrl_async.rollouts.buffer.buffer import BufferOptions, RolloutBuffer
from kbrl_async.rollouts.buffer.events import Admitted, BatchFailed, BatchMade, BatchTrained, Closed, Event, Lost
from kbrl_async.rollouts.buffer.events import Scored as BookScored
from kbrl_async.rollouts.buffer.group import BufferState
from kbrl_async.rollouts.curriculum import BatchRates, Curriculum, CurriculumOptions, CurriculumState
from kbrl_async.rollouts.turns import turn_id
from kbrl_async.runs.summary import RunCounters
from kbrl_async.runs.telemetry.training_metrics import RolloutStats
from protocols.records import VERIFIER, GroupOutcome, Problem, TrainGroup
from services.reward_aggregator.rounds import RoundBegun, Rounds, RoundsState, is_round
from services.rollouts import trajectories as dialogues
from services.rollouts.trajectories import DialoguesState, Trajectories, TurnTaken

BEFORE, AFTER = "eval-before", "eval-after"
KEPT_CHANGES = 100
"""Changes of alarms that a written campaign keeps."""
KEPT_ENDS = 256
"""Ends of groups that are told to the archive again after a restart: more than can be on their way to it."""


def is_evaluation(group_id: str) -> bool:
    """Whether these rollouts are of an evaluation: counted by no group, in no batch."""
    return group_id in (BEFORE, AFTER) or is_round(group_id)


class RolloutEnded(msgspec.Struct, frozen=True, tag="rollout_ended"):
    """The numbers of a training rollout's last turn; written together with the book's own event."""

    rollout_id: str
    group_id: str
    stats: RolloutStats


class Evaluated(msgspec.Struct, frozen=True, tag="evaluated"):
    """A held-out rollout ended; `stats` is None where infrastructure failed."""

    phase: str
    rollout_id: str
    stats: RolloutStats | None
    at: float = 0.0


class Watched(msgspec.Struct, frozen=True, tag="watched"):
    """What the alarms see of an update; written together with the book's own event."""

    version: int
    metrics: dict[str, float]
    at: float = 0.0


Entry = Event | RolloutEnded | TurnTaken | Evaluated | RoundBegun | Watched


class Plan(msgspec.Struct, frozen=True):
    """What the campaign is to do; fixed for a run."""

    training: list[Problem]
    heldout: list[Problem]
    eval_samples: int
    group_size: int
    seed: int
    book: BufferOptions
    curriculum: CurriculumOptions = CurriculumOptions()
    eval_every: int = 0
    eval_credit: int = 4
    alarms: AlarmOptions = AlarmOptions()


class CampaignState(msgspec.Struct, frozen=True):
    """All that a campaign remembers: as large as what is open, however long the run is (I10)."""

    book: BufferState
    curriculum: CurriculumState
    alarms: AlarmsState
    dialogues: DialoguesState
    rounds: RoundsState
    evaluated: dict[str, dict[str, RolloutStats | None]]
    scored: int
    fastest: dict[str, float]
    max_staleness: int
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


class RunState:
    """See the module's docstring."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.book = RolloutBuffer(plan.book)
        self.scored = 0
        """Training rollouts (turns) that were scored; their numbers are in the journal's history."""
        self.fastest: dict[str, float] = {}
        """By problem: the lower end of the speedup's interval of the kernel that is kept."""
        self.evaluated: dict[str, dict[str, RolloutStats | None]] = {BEFORE: {}, AFTER: {}}
        self.max_staleness = 0
        self.updates = 0
        self.first_result: float | None = None
        self.last_update = 0.0
        self.clock = 0.0
        self.dialogues = Trajectories()
        self.curriculum = Curriculum(plan.curriculum, plan.training, plan.seed)
        self.alarms = Alarms(plan.alarms.rules())
        self.alarm_changes: list[AlarmChange] = []
        """All so far, newest last."""
        self.rounds = Rounds(plan.heldout, plan.eval_samples, plan.eval_every, plan.eval_credit)
        self.notes: list[str] = []
        """What the curriculum has changed, newest last."""
        self.ended_lately: deque[Closed] = deque(maxlen=KEPT_ENDS)
        self._stages: dict[str, str] = {}
        self._batches: dict[str, list[str]] = {}
        self._open: dict[str, dict[str, RolloutStats]] = {}
        self._problems = {problem.problem_id: problem for problem in plan.training}

    # ── all of it ─────────────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> CampaignState:
        """To be written at once: it shares what is open with the campaign."""
        return CampaignState(
            self.book.state(),
            self.curriculum.state(),
            self.alarms.state(),
            self.dialogues.state(),
            self.rounds.state(),
            self.evaluated,
            self.scored,
            self.fastest,
            self.max_staleness,
            self.updates,
            self.first_result,
            self.last_update,
            self.clock,
            self.alarm_changes[-KEPT_CHANGES:],
            self.notes,
            list(self.ended_lately),
            self._stages,
            self._batches,
            self._open,
        )

    def restore(self, state: CampaignState) -> None:
        """The campaign as it was when `state` was taken; its plan stays."""
        self.book.restore(state.book)
        self.curriculum.restore(state.curriculum)
        self.alarms.restore(state.alarms)
        self.dialogues.restore(state.dialogues)
        self.rounds.restore(state.rounds)
        self.evaluated, self.scored, self.fastest = state.evaluated, state.scored, state.fastest
        self.max_staleness, self.updates, self.first_result = state.max_staleness, state.updates, state.first_result
        self.last_update, self.clock = state.last_update, state.clock
        self.alarm_changes, self.notes = state.alarm_changes, state.notes
        self.ended_lately = deque(state.ended_lately, maxlen=KEPT_ENDS)
        self._stages, self._batches, self._open = state.stages, state.batches, state.open

    # ── questions ─────────────────────────────────────────────────────────────────────────────────────────────

    def eval_ids(self, phase: str) -> dict[str, Problem]:
        """Rollout ids of an evaluation and their problems."""
        return {
            f"{phase}.{problem.problem_id}.{sample}": problem
            for problem in self.plan.heldout
            for sample in range(self.plan.eval_samples)
        }

    def awaited(self, phase: str) -> dict[str, Problem]:
        """Evaluation rollouts without a result."""
        return {key: problem for key, problem in self.eval_ids(phase).items() if key not in self.evaluated[phase]}

    @property
    def may_train(self) -> bool:
        return not self.awaited(BEFORE)

    @property
    def has_all_updates(self) -> bool:
        """No batch will be made any more; a run that had more steps before its restart has groups left over."""
        return self.book.batches_trained >= self.plan.book.max_batches

    @property
    def has_trained(self) -> bool:
        return self.book.is_done

    @property
    def has_ended(self) -> bool:
        return self.has_trained and not self.awaited(BEFORE) and not self.awaited(AFTER)

    def stage_of(self, group_id: str) -> str:
        """The stage of rewards that all rollouts of this group are paid by: that of its admission."""
        return self._stages.get(group_id, self.curriculum.stage)

    def next_problem(self, now: float) -> Problem:
        """Every training problem once in random order, then again; or what another curriculum draws. A function of the
        admitted count, the seed and what was observed."""
        if self.plan.curriculum.kind != "uniform":
            return self.curriculum.pick(self.book.counts["admitted"], self.book.benched(now))
        count, n = self.book.counts["admitted"], len(self.plan.training)
        order = random.Random(f"{self.plan.seed}.{count // n}").sample(self.plan.training, n)
        benched = self.book.benched(now)
        chosen = [*order[count % n :], *order[: count % n]]
        return next((problem for problem in chosen if problem.problem_id not in benched), chosen[0])

    def problem(self, problem_id: str) -> Problem:
        return self._problems[problem_id]

    def counters(self) -> RunCounters:
        counts = self.book.counts
        return RunCounters(
            groups_admitted=counts["admitted"],
            groups_trained=counts[GroupOutcome.TRAINED],
            groups_filtered=counts[GroupOutcome.FILTERED],
            groups_dropped_stale=counts[GroupOutcome.DROPPED_STALE],
            groups_failed=counts[GroupOutcome.FAILED],
            rollouts=self.scored,
            updates=self.updates,
            max_staleness=self.max_staleness,
        )

    def heldout(self, phase: str) -> list[RolloutStats]:
        return [stats for stats in self.evaluated[phase].values() if stats is not None]

    def batch_stats(self, batch: BatchMade) -> list[RolloutStats]:
        """The rollouts of an outstanding batch, with their age and advantage."""
        advantages = {
            turn_id(sample.rollout_id, sample.turn): (sample.advantage, batch.index - sample.policy_version)
            for group in self.book.train_groups(batch.batch_id)
            for sample in group.samples
        }
        return [
            msgspec.structs.replace(stats, advantage=advantages[key][0], staleness=advantages[key][1])
            for group_id in batch.group_ids
            for key, stats in self._open.get(group_id, {}).items()
            if key in advantages
        ]

    # ── the only place where state changes ────────────────────────────────────────────────────────────────────

    def apply(self, entry: Entry) -> list[Closed]:
        """Applies one entry of the journal, or one just made; returns the groups that it ended."""
        if isinstance(entry, Watched):
            self._watch(entry)
            return []
        if isinstance(entry, RoundBegun):
            self._at(entry.at)
            self.rounds.begin(entry)
            return []
        if isinstance(entry, Evaluated):
            self._at(entry.at)
            if is_round(entry.phase):
                self.rounds.take(entry.phase, entry.rollout_id, entry.stats)
            else:
                self.evaluated[entry.phase].setdefault(entry.rollout_id, entry.stats)
            self.dialogues.forget(entry.rollout_id)
            return []
        if isinstance(entry, TurnTaken):
            self.dialogues.apply(entry)
        if isinstance(entry, RolloutEnded | TurnTaken):
            if not is_evaluation(entry.group_id):
                self._count(entry.stats)
                self._open.setdefault(entry.group_id, {})[turn_id(entry.rollout_id, entry.stats.turn)] = entry.stats
            return []
        closed = self.book.apply(self._noted(entry))
        self._observe(entry)
        return self._forget(closed)

    def note(self, event: Event, closed: list[Closed]) -> list[Closed]:
        """Like `apply` for an event that the book has applied itself already."""
        self._noted(event)
        self._observe(event)
        return self._forget(closed)

    def _noted(self, event: Event) -> Event:
        self._at(event.at, is_result=not isinstance(event, Admitted))
        if isinstance(event, Admitted):
            self._stages[event.group_id] = self.curriculum.stage
        if isinstance(event, BookScored | Lost):
            self.dialogues.forget(event.rollout_id)
        if isinstance(event, BatchTrained):
            self.updates += 1
            self.last_update = event.at
            self._learn(event)
        if isinstance(event, BatchFailed):
            self._batches.pop(event.batch_id, None)
        if isinstance(event, BatchMade):
            self._batches[event.batch_id] = event.group_ids
            self._age(event)
        return event

    def _observe(self, event: Event) -> None:
        """Tell the curriculum of a group when its last rollout has ended, in the order in which they were asked for.

        One by one as they are scored, failures would come first, and the correct ones, last, would weigh most.
        """
        if not isinstance(event, BookScored | Lost) or self.book.awaits(event.group_id):
            return
        for _, stats in sorted(self._open.get(event.group_id, {}).items()):
            if stats.role != VERIFIER:  # a prediction says nothing of how hard the problem is
                self.curriculum.observe(stats.problem_id, stats.turn, stats.correct)

    def _count(self, stats: RolloutStats) -> None:
        self.scored += 1
        if stats.file:
            self.fastest[stats.problem_id] = max(stats.speedup_lo or 0.0, self.fastest.get(stats.problem_id, 0.0))

    def _watch(self, entry: Watched) -> None:
        self.alarm_changes += self.alarms.observe(entry.version, entry.metrics)
        self.book.window_lag = self.alarms.window_lag(self.plan.book.max_lag)
        self.book.is_paused = self.alarms.active("pause_admission") > 0

    def _at(self, at: float, *, is_result: bool = True) -> None:
        self.clock = max(self.clock, at)
        if is_result and self.first_result is None:
            self.first_result = at

    def _age(self, batch: BatchMade) -> None:
        versions = [s.policy_version for g in batch.group_ids for s in self._open.get(g, {}).values()]
        self.max_staleness = max([self.max_staleness, *(batch.index - version for version in versions)])

    def _learn(self, event: BatchTrained) -> None:
        """Tell the curriculum of a batch, before its groups are forgotten."""
        groups = self._batches.pop(event.batch_id, [])
        stats = [s for group_id in groups for s in self._open.get(group_id, {}).values() if s.role != VERIFIER]
        if stats:
            n = len(stats)
            rates = BatchRates(sum(s.compiled for s in stats) / n, sum(s.correct for s in stats) / n)
            self.notes += self.curriculum.batch_trained(rates)

    def _forget(self, closed: list[Closed]) -> list[Closed]:
        self.ended_lately += closed
        for group in closed:
            self._open.pop(group.group_id, None)
            self._stages.pop(group.group_id, None)
            self.dialogues.forget_group(group.group_id)
        return closed


def without_tokens(entry: Entry) -> Entry:
    """What must stay of a scored rollout once its group has ended: its reward and version, not its tokens (I10)."""
    if isinstance(entry, TurnTaken):
        return dialogues.without_tokens(entry)
    if not isinstance(entry, BookScored):
        return entry
    samples = [msgspec.structs.replace(s, prompt_ids=[], token_ids=[], logprobs=[]) for s in entry.samples]
    return msgspec.structs.replace(entry, samples=samples)


def group_of(entry: Entry) -> str:
    """The group that an entry's tokens belong to; empty for all entries that carry none."""
    return entry.group_id if isinstance(entry, BookScored | TurnTaken) else ""


def batch_frames(groups: Sequence[TrainGroup]) -> list[bytes]:
    return [msgspec.msgpack.encode(group) for group in groups]
