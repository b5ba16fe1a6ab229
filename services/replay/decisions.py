"""The aggregator's decisions, made again: every score, admission, batch and advantage. Pure but for reading.

::

    journal ─▶ what came in ─▶ [state, scoring] ─▶ what it decides ─ equal? ─ no ─▶ Divergence
    archive ─▶ records ───────────▲                                     └─ yes, a batch ─▶ its groups, for the learner

Invariants
* An entry is never applied: the call that made it is made again at its time, and must make the same entry.
* Only what the rest can't know is taken from the journal: times, what the infrastructure lost, the learner's answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from kbrl_async.evaluation.rounds import RoundBegun
from kbrl_async.rollouts.buffer.events import (
    Admitted,
    BatchFailed,
    BatchMade,
    BatchTrained,
    Event,
    Finished,
    HoldBegan,
    Lost,
    RolloutScored,
    StragglersCut,
    Swept,
)
from kbrl_async.rollouts.manager import RolloutManager
from kbrl_async.rollouts.rewards.presets import Preset
from kbrl_async.rollouts.scoring import ScoredTurn
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.rollouts.trajectories import TurnTaken
from kbrl_async.rollouts.turns import turn_id
from kbrl_async.runs.archive.recorder import outcomes_of
from kbrl_async.runs.archive.rows import TurnOutcome
from kbrl_async.runs.commands import Command, Evaluated, RolloutEnded, Watched, without_tokens
from kbrl_async.runs.planning import preset_for
from kbrl_async.runs.run_state import RunState
from protocols.records import TrainGroup
from protocols.rollout import Record


class Divergence(msgspec.Struct, frozen=True):
    """The first thing that came out otherwise."""

    where: str
    recorded: str
    replayed: str


class Diverged(Exception):  # noqa: N818 - it is an outcome, not an error
    def __init__(self, where: str, recorded: object, replayed: object) -> None:
        self.divergence = Divergence(where, _short(recorded), _short(replayed))
        super().__init__(where)


class Records(Protocol):
    """What is read of the archive."""

    def record(self, task_id: str) -> Record | None: ...


class MadeBatch(msgspec.Struct, frozen=True):
    """A batch that was made again, ready for the learner."""

    event: BatchMade
    groups: list[TrainGroup]
    is_whole: bool
    """All its tokens are still in the archive."""

    def outcomes(self) -> dict[str, TurnOutcome]:
        """As the archive has them, by task."""
        return {outcome.task_id: outcome for outcome in outcomes_of(self.event, self.groups)}


class Decisions:
    """`for batch in decisions.run(journal.entries()): …` raises `Diverged`."""

    def __init__(self, state: RunState, manager: RolloutManager, presets: list[Preset], records: Records) -> None:
        self._state, self._manager, self._presets, self._records = state, manager, presets, records
        self._follows: dict[str, Command] = {}
        """By rollout: the command that was made with its end, and has an entry of its own."""
        self.entries = 0
        self.rescored = 0
        self.unrecorded = 0
        """Turns whose records the archive no longer has: their journaled scores are taken."""

    def run(self, entries: Iterable[Command]) -> Iterator[MadeBatch]:
        for entry in entries:
            self.entries += 1
            made = self._again(entry)
            if made is None:
                raise Diverged(f"entry {self.entries} of the journal", entry, "nothing: it was ignored")
            if without_tokens(made) != without_tokens(entry):
                where = f"entry {self.entries} of the journal, {type(entry).__name__}"
                raise Diverged(where, without_tokens(entry), without_tokens(made))
            self._state.do(made)
            if isinstance(entry, BatchMade):
                groups = self._state.train_groups(entry.batch_id)
                yield MadeBatch(entry, groups, all(s.token_ids for group in groups for s in group.samples))

    def _again(self, entry: Command) -> Command | None:
        """The command that is made at the entry's place and time; None where none is."""
        match entry:
            case Watched():
                return entry
            case RoundBegun():
                return self._state.round_due(entry.at)
            case TurnTaken():
                return self._turn(entry)
            case RolloutEnded():
                return self._end(entry)
            case Evaluated():
                return self._evaluated(entry)
            case _:
                return self._event(entry)

    def _event(self, event: Event) -> Command | None:
        state, at = self._state, event.at
        match event:
            case Admitted():
                return state.admission(at)
            case Swept() | HoldBegan() | StragglersCut() | BatchMade():
                return state.batch_step(at)
            case RolloutScored():
                return self._scored_again(event)
            case Lost():
                return state.lost(event.group_id, event.rollout_id, event.reason, at)
            case BatchTrained():
                return next(iter(state.trained(event.batch_id, event.version, {}, "", at)[1:]), None)
            case BatchFailed():
                return next(iter(state.untrained(event.batch_id, event.reason, at)), None)
            case Finished():
                return state.finish(at, event.reason)

    # ── rollouts ────────────────────────────────────────────────────────────────────────────────────────────────

    def _turn(self, entry: TurnTaken) -> Command:
        found = self._rescored(entry.group_id, entry.rollout_id)
        if found is None:
            self.unrecorded += 1
            return entry
        scored, record = found
        if not self._manager.goes_on(record.request, scored):
            raise Diverged(f"turn {scored.stats.turn} of {entry.rollout_id}", "another turn follows", "it was the last")
        return self._manager.taken(entry.group_id, scored, _as_kept(scored.stats, entry.stats), record, entry.at)

    def _end(self, entry: RolloutEnded) -> Command | None:
        found = self._rescored(entry.group_id, entry.rollout_id)
        if found is None:
            self.unrecorded += 1
            return entry
        scored, _ = found
        stats = _as_kept(scored.stats, entry.stats)
        made = self._state.ended(entry.group_id, entry.rollout_id, scored.sample, stats, 0.0)
        if not made:
            return None
        self._follows[entry.rollout_id] = made[1]
        return made[0]

    def _scored_again(self, event: RolloutScored) -> Command | None:
        """The rollout's samples with their returns, of records where there are any."""
        if (follows := self._follows.pop(event.rollout_id, None)) is not None:
            return msgspec.structs.replace(follows, at=event.at)
        earlier = self._state.turns(event.rollout_id)
        if earlier and len(event.samples) != len(earlier) + 1:  # it was broken off: the turns before that count
            return next(iter(self._state.broken_off(event.group_id, event.rollout_id, "", event.at)), None)
        # Its last turn has no record any more, or they are a demonstration (method=sft).
        return next(iter(self._state.learned(event.group_id, event.rollout_id, event.samples, event.at)), None)

    def _evaluated(self, entry: Evaluated) -> Command | None:
        turns = len(self._state.turns(entry.rollout_id))
        found = self._rescored(entry.phase, entry.rollout_id)
        if found is None and entry.stats is not None and turns == entry.stats.turn:
            self.unrecorded += 1
            return entry
        if found is None:
            made = self._state.broken_off(entry.phase, entry.rollout_id, "", entry.at)
        else:
            made = self._state.ended(entry.phase, entry.rollout_id, found[0].sample, found[0].stats, entry.at)
        best = made[0].stats if isinstance(made[0], Evaluated) else None
        if best is None or entry.stats is None:
            return made[0]
        return msgspec.structs.replace(made[0], stats=_as_kept(best, entry.stats))

    def _rescored(self, group_id: str, rollout_id: str) -> tuple[ScoredTurn, Record] | None:
        """The newest turn, scored again; None where its record is gone or infrastructure failed."""
        turn = len(self._state.turns(rollout_id))
        record = self._records.record(turn_id(rollout_id, turn))
        preset = preset_for(group_id, self._presets, self._state)
        scored = self._manager.score(rollout_id, record, preset) if record is not None else None
        if record is None or scored is None:
            return None
        self.rescored += 1
        return scored, record


def _as_kept(stats: RolloutStats, recorded: RolloutStats) -> RolloutStats:
    """Where a kernel was kept, and how old it grew on its way, are no decisions."""
    return msgspec.structs.replace(stats, file=recorded.file, ages=recorded.ages)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 400 else f"{text[:400]} …"
