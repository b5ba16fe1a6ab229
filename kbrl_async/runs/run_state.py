"""A run as a pure state machine: evaluate before, train, evaluate after. Live and replayed by the same calls.

::

    before ─ all held-out rollouts ended ─▶ train ─ the rollout buffer is done ─▶ after ─▶ ended
      └ training groups are admitted from the start; only the first batch waits for the evaluation of version 0

Invariants
* State changes in `do` only; the same commands give the same state (I9).
* What comes in, and what time brings, becomes a command by a question (`due`, `ended`, `lost` …).
* An evaluation rollout counts once, and never enters a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kbrl_async.evaluation.heldout import AFTER, BEFORE, OpenRollout, is_evaluation
from kbrl_async.evaluation.rounds import Round, RoundBegun, group_of_round
from kbrl_async.rollouts.alarms import NON_FINITE
from kbrl_async.rollouts.buffer.buffer import RUN_ENDED, rollout_ids
from kbrl_async.rollouts.buffer.events import (
    Admitted,
    BatchFailed,
    BatchMade,
    BatchTrained,
    Closed,
    Event,
    Finished,
    Lost,
    RolloutScored,
    StragglersCut,
)
from kbrl_async.rollouts.curriculum import BatchRates
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.rollouts.trajectories import TurnTaken, best_turn
from kbrl_async.rollouts.turns import turn_id, with_returns
from kbrl_async.runs.commands import (
    AskTurn,
    Command,
    CurriculumMoved,
    Effect,
    Evaluated,
    ForgetGroup,
    RolloutEnded,
    RoundStarted,
    SendBatch,
    Watched,
)
from kbrl_async.runs.run_memory import RunMemory
from kbrl_async.runs.summary import RunCounters
from protocols.records import VERIFIER, GroupOutcome, Purpose, Strictness, TrainGroup, TrainSample


class RunState(RunMemory):
    """See the module's docstring."""

    # ── questions ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def version(self) -> int:
        """The newest policy version."""
        return self._buffer.version

    @property
    def may_train(self) -> bool:
        return self._heldout.has_ended(BEFORE)

    @property
    def has_all_updates(self) -> bool:
        """No batch will be made any more; a run that had more steps before its restart has groups left over."""
        return self._buffer.batches_trained >= self.plan.buffer.max_steps

    @property
    def is_finished(self) -> bool:
        """Training was ended for good."""
        return self._buffer.is_finished

    @property
    def has_trained(self) -> bool:
        return self._buffer.is_done

    @property
    def has_ended(self) -> bool:
        return self.has_trained and self.may_train and self._heldout.has_ended(AFTER)

    @property
    def reasons(self) -> Mapping[str, int]:
        """Why groups ended without being trained on."""
        return self._buffer.reasons

    @property
    def alarm_levels(self) -> Mapping[str, int]:
        """By alarm; 0: quiet."""
        return self._alarms.levels

    @property
    def alarms_raised(self) -> list[str]:
        return self._alarms.any_raised

    @property
    def rounds_ended(self) -> Sequence[Round]:
        """Evaluations beside training that have ended, oldest first."""
        return self._heldout.rounds.ended

    @property
    def best_version(self) -> int | None:
        """By the rounds; None before the first has ended."""
        return self._heldout.rounds.best()

    def stage_of(self, group_id: str) -> str:
        """The stage of rewards that all rollouts of this group are paid by: that of its admission."""
        return self._stages.get(group_id, self._curriculum.stage)

    def strictness_of(self, group_id: str) -> Strictness | None:
        """How closely wrong kernels of this group are looked at: as at its admission."""
        return self._strictness.get(group_id)

    def counters(self) -> RunCounters:
        counts = self._buffer.counts
        return RunCounters(
            groups_admitted=counts["admitted"],
            groups_trained=counts[GroupOutcome.TRAINED],
            groups_filtered=counts[GroupOutcome.FILTERED],
            groups_dropped_stale=counts[GroupOutcome.DROPPED_STALE],
            groups_failed=counts[GroupOutcome.FAILED],
            rollouts=self.turns_scored,
            updates=self.updates,
            max_staleness=self.staleness_max,
        )

    def heldout(self, phase: str) -> list[RolloutStats]:
        return self._heldout.results(phase)

    def evaluated(self, phase: str) -> tuple[int, int]:
        """Answers of this evaluation that have ended, and all of them."""
        return self._heldout.counts(phase)

    def group_version(self, group_id: str) -> int | None:
        """The policy version at admission of an open group; None once it has ended."""
        return self._buffer.group_version(group_id)

    def train_groups(self, batch_id: str) -> list[TrainGroup]:
        """The groups of an outstanding batch, with advantages: the same on every call."""
        return self._buffer.train_groups(batch_id)

    def batch_stats(self, batch_id: str) -> list[RolloutStats]:
        """The rollouts of an outstanding batch, with their age and advantage."""
        batch = next(batch for batch in self._buffer.outstanding() if batch.batch_id == batch_id)
        advantages = {
            turn_id(sample.rollout_id, sample.turn): (sample.advantage, batch.index - sample.policy_version)
            for group in self.train_groups(batch_id)
            for sample in group.samples
        }
        return [
            msgspec.structs.replace(stats, advantage=advantages[key][0], staleness=advantages[key][1])
            for group_id in batch.group_ids
            for key, stats in self._open.get(group_id, {}).items()
            if key in advantages
        ]

    def turns(self, rollout_id: str) -> Sequence[TurnTaken]:
        """The turns of an unfinished rollout, in order."""
        return self._trajectories.turns(rollout_id)

    def failure_of_another(self, rollout_id: str, problem_id: str) -> str:
        return self._trajectories.failure_of_another(rollout_id, problem_id)

    def awaits(self, group_id: str, rollout_id: str, turn: int) -> bool:
        """Whether this is the turn that an open rollout is at: no late copy, and its group has not ended."""
        is_asked = self._heldout.problem(group_id, rollout_id) is not None
        return (is_asked or self._buffer.awaits(group_id, rollout_id)) and turn == len(self.turns(rollout_id))

    def open_work(self) -> list[Effect]:
        """All that is under way, for a start and a restart; what the broker knows already it ignores."""
        found: list[Effect] = list(_evaluate(self._heldout.asked(BEFORE)))
        for group_id, waiting in self._buffer.open_rollouts().items():
            problem = self._problems[self._buffer.group_problem(group_id)]
            found += [AskTurn(rollout_id, group_id, problem, Purpose.TRAIN) for rollout_id in waiting]
        found += [SendBatch(batch) for batch in self._buffer.outstanding()]
        return [*found, *(self._after_training() if self.has_trained else _evaluate(self._heldout.asked_in_round()))]

    def _after_training(self) -> list[Effect]:
        """The last evaluation begins, and one beside training ends where training has ended."""
        running = self._heldout.rounds.running
        retired = [] if running is None else [ForgetGroup(group_of_round(running))]
        return [*_evaluate(self._heldout.asked(AFTER)), *retired]

    # ── what is to happen: questions that answer with commands ────────────────────────────────────────────────

    def due(self, now: float) -> Command | None:
        """What time and state demand next: again and again until it is None."""
        if self._is_over(now) and (finished := self.finish(now)) is not None:
            return finished
        return self.admission(now) or (self.batch_step(now) if self.may_train else None) or self.round_due(now)

    def _is_over(self, now: float) -> bool:
        """At the run's limits, which may be lower than before a restart: what waits for a batch then waits no more."""
        limit, begun = self.plan.max_minutes, self.first_result
        return self.has_all_updates or (limit is not None and begun is not None and now - begun > 60 * limit)

    def finish(self, now: float, reason: str = RUN_ENDED) -> Finished | None:
        """The end of training. Journaled, so that a limit that is raised during the last evaluation does not mix two
        policies in it."""
        return self._buffer.finish(now, reason)

    def admission(self, now: float) -> Admitted | None:
        """A group on the next problem, where there is room."""
        if self._buffer.room() < 1:
            return None
        problem = self._curriculum.pick(self._buffer.counts["admitted"], self._buffer.benched(now))
        return self._buffer.admission(problem.problem_id, problem.level, self.plan.group_size, now)

    def batch_step(self, now: float) -> Event | None:
        """A batch, or what comes before one: stale groups are dropped, it is held back."""
        return self._buffer.poll(now)

    def round_due(self, now: float) -> RoundBegun | None:
        """An evaluation beside training."""
        version = None if self.has_trained else self._heldout.rounds.due(self.version)
        return None if version is None else RoundBegun(version, now)

    def ended(
        self, group_id: str, rollout_id: str, last: TrainSample, stats: RolloutStats, now: float
    ) -> list[Command]:
        """The last turn of a rollout was scored."""
        if is_evaluation(group_id):
            return [self._evaluated(group_id, rollout_id, stats, now)]
        event = self._buffer.scored(group_id, rollout_id, self._with_returns(rollout_id, last), now)
        return [] if event is None else [RolloutEnded(rollout_id, group_id, stats), event]

    def broken_off(self, group_id: str, rollout_id: str, reason: str, now: float) -> list[Command]:
        """Infrastructure failed (I4): the turns before this one count, the rollout goes no further."""
        if is_evaluation(group_id):
            return [self._evaluated(group_id, rollout_id, None, now)]
        if self.turns(rollout_id):
            return self.learned(group_id, rollout_id, self._with_returns(rollout_id), now)
        lost = self.lost(group_id, rollout_id, reason, now)
        return [] if lost is None else [lost]

    def lost(self, group_id: str, rollout_id: str, reason: str, now: float) -> Lost | None:
        """A rollout ended without any reward."""
        return self._buffer.lost(group_id, rollout_id, reason, now)

    def learned(self, group_id: str, rollout_id: str, samples: list[TrainSample], now: float) -> list[Command]:
        """A rollout has these samples and no numbers of its own, such as a demonstration."""
        event = self._buffer.scored(group_id, rollout_id, samples, now)
        return [] if event is None else [event]

    def _evaluated(self, phase: str, rollout_id: str, last: RolloutStats | None, now: float) -> Evaluated:
        """With several turns the best one counts."""
        turns = [*(turn.stats for turn in self.turns(rollout_id)), *([last] if last else [])]
        return Evaluated(phase, rollout_id, best_turn(turns) if turns else None, now)

    def _with_returns(self, rollout_id: str, *last: TrainSample) -> list[TrainSample]:
        return with_returns([*(turn.sample for turn in self.turns(rollout_id)), *last], self.plan.turns)

    def trained(
        self, batch_id: str, version: int, metrics: Mapping[str, float], failure: str, now: float
    ) -> list[Command]:
        """The learner answered, or failed over the batch's numbers; nothing where nobody waits for it."""
        event: Event | None = (
            self._buffer.batch_failed(batch_id, NON_FINITE, now)
            if failure
            else self._buffer.trained(batch_id, version, now)
        )
        if event is None:
            return []
        # What the alarms look at is journaled, so that a restart and a replay see the same ones.
        values = {name: value for name, value in metrics.items() if name in self._alarms.metrics}
        return [Watched(version, values | {NON_FINITE: float(bool(failure))}, now), event]

    def untrained(self, batch_id: str, reason: str, now: float) -> list[Command]:
        """No learner could train it."""
        event = self._buffer.batch_failed(batch_id, reason, now)
        return [] if event is None else [event]

    # ── the only place where state changes ────────────────────────────────────────────────────────────────────

    def do(self, command: Command) -> list[Effect]:
        """Applies a command, and says what is to be done by it: all of it live, none of it again."""
        had_trained = self.has_trained
        effects = self._do(command)
        if self.has_trained and not had_trained:
            self._heldout.begin_after()
            effects += self._after_training()
        return effects

    def _do(self, command: Command) -> list[Effect]:
        match command:
            case Watched():
                return self._watch(command)
            case RoundBegun():
                self._at(command.at)
                return [RoundStarted(command.version), *_evaluate(self._heldout.begin_round(command.version))]
            case Evaluated():
                self._at(command.at)
                return self._end_evaluation(command)
            case TurnTaken():
                self._trajectories.apply(command)
                self._count(command)
                return self._next_turn(command)
            case RolloutEnded():
                self._count(command)
                return []
            case _:
                noted = self._note(command)
                closed = self._buffer.apply(command)
                self._observe(command)
                self._forget(closed)
                return [*noted, *closed, *self._begun_by(command)]

    def _begun_by(self, event: Event) -> list[Effect]:
        if isinstance(event, BatchMade):
            return [SendBatch(event)]
        if not isinstance(event, Admitted):
            return []
        problem = self._problems[event.problem_id]
        ids = rollout_ids(event.group_id, event.rollouts)
        return [AskTurn(rollout_id, event.group_id, problem, Purpose.TRAIN) for rollout_id in ids]

    def _next_turn(self, taken: TurnTaken) -> list[Effect]:
        group_id, rollout_id = taken.group_id, taken.rollout_id
        if (asked := self._heldout.problem(group_id, rollout_id)) is not None:
            return [AskTurn(rollout_id, group_id, asked, Purpose.EVAL)]
        if not self._buffer.awaits(group_id, rollout_id):
            return []
        return [AskTurn(rollout_id, group_id, self._problems[self._buffer.group_problem(group_id)], Purpose.TRAIN)]

    def _note(self, event: Event) -> list[Effect]:
        """What the buffer's event means for everything beside the buffer, which has not applied it yet."""
        self._at(event.at, is_result=not isinstance(event, Admitted))
        match event:
            case Admitted():
                self._curriculum.began(event.problem_id)
                self._stages[event.group_id] = self._curriculum.stage
                if (strictness := self._curriculum.strictness) is not None:
                    self._strictness[event.group_id] = strictness
            case RolloutScored() | Lost():
                self._trajectories.forget(event.rollout_id)
            case StragglersCut():
                for group_id in event.group_ids:
                    self._trajectories.forget_group(group_id)
            case BatchMade():
                self._batches[event.batch_id] = event.group_ids
                self._age(event)
            case BatchTrained():
                self.updates += 1
                self.last_update = event.at
                return self._learn(event)
            case BatchFailed():
                self._batches.pop(event.batch_id, None)
            case _:
                pass
        return []

    def _observe(self, event: Event) -> None:
        """Tell the curriculum of a group when its last rollout has ended, in the order in which they were asked for.

        One by one as they are scored, failures would come first, and the correct ones, last, would weigh most.
        """
        if isinstance(event, RolloutScored | Lost):
            ended = [] if self._buffer.awaits_more(event.group_id) else [event.group_id]
        else:
            ended = event.group_ids if isinstance(event, StragglersCut) else []
        for group_id in ended:
            for _, stats in sorted(self._open.get(group_id, {}).items()):
                if stats.role != VERIFIER:  # a prediction says nothing of how hard the problem is
                    self._curriculum.observe(stats.problem_id, stats.turn, stats.correct)

    def _count(self, command: TurnTaken | RolloutEnded) -> None:
        stats = command.stats
        if is_evaluation(command.group_id):
            return
        self.turns_scored += 1
        if stats.file:
            self.fastest[stats.problem_id] = max(stats.speedup_lo or 0.0, self.fastest.get(stats.problem_id, 0.0))
        self._open.setdefault(command.group_id, {})[turn_id(command.rollout_id, stats.turn)] = stats

    def _watch(self, command: Watched) -> list[Effect]:
        changes = self._alarms.observe(command.version, command.metrics)
        self.alarm_changes += changes
        self._buffer.allowed_staleness = self._alarms.allowed_staleness(self.plan.buffer.max_staleness)
        self._buffer.is_paused = self._alarms.active("pause_admission") > 0
        return list(changes)

    def _at(self, at: float, *, is_result: bool = True) -> None:
        self.clock = max(self.clock, at)
        if is_result and self.first_result is None:
            self.first_result = at

    def _age(self, batch: BatchMade) -> None:
        versions = [s.policy_version for g in batch.group_ids for s in self._open.get(g, {}).values()]
        self.staleness_max = max([self.staleness_max, *(batch.index - version for version in versions)])

    def _learn(self, event: BatchTrained) -> list[Effect]:
        """Tell the curriculum of a batch, before its groups are forgotten."""
        groups = self._batches.pop(event.batch_id, [])
        stats = [s for group_id in groups for s in self._open.get(group_id, {}).values() if s.role != VERIFIER]
        if not stats:
            return []
        rates = BatchRates(sum(s.compiled for s in stats) / len(stats), sum(s.correct for s in stats) / len(stats))
        notes = self._curriculum.batch_trained(rates)
        self.notes += notes
        return [CurriculumMoved(note) for note in notes]

    def _forget(self, closed: Sequence[Closed]) -> None:
        self.ended_lately += closed
        for group in closed:
            self._curriculum.ended(group.problem_id)
            self._open.pop(group.group_id, None)
            self._stages.pop(group.group_id, None)
            self._strictness.pop(group.group_id, None)
            self._trajectories.forget_group(group.group_id)

    def _end_evaluation(self, command: Evaluated) -> list[Effect]:
        self._trajectories.forget(command.rollout_id)
        begun, done = self._heldout.end(command.phase, command.rollout_id, command.stats)
        if done is not None:
            return [done, ForgetGroup(command.phase)]
        return [] if self.has_trained else _evaluate(begun)


def _evaluate(asked: Iterable[OpenRollout]) -> list[Effect]:
    return [AskTurn(*one, Purpose.EVAL) for one in asked]
