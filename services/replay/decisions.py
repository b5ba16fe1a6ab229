"""The aggregator's decisions, made again: every score, admission, batch and advantage. Pure but for reading.

::

    journal ─▶ what came in ─▶ [campaign, scoring, group book] ─▶ what it decides ─ equal? ─ no ─▶ Divergence
    archive ─▶ records ───────────▲                                     └─ yes, a batch ─▶ its groups, for the learner

Invariants
* An entry is never applied: the call that made it is made again at its time, and must make the same entry.
* Only what the rest can't know is taken from the journal: times, what the infrastructure lost, the learner's answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from kbrl_async.rollouts.buffer.events import (
    Admitted,
    BatchFailed,
    BatchMade,
    BatchTrained,
    Change,
    Finished,
    HoldBegan,
    Lost,
    Swept,
)
from kbrl_async.rollouts.buffer.events import Scored as BookScored
from kbrl_async.rollouts.rewards.presets import Preset
from kbrl_async.rollouts.turns import turn_id, with_returns
from kbrl_async.runs.archive.rows import TurnOutcome
from kbrl_async.runs.telemetry.training_metrics import RolloutStats
from protocols.records import TrainGroup, TrainSample
from protocols.rollout import Record
from services.reward_aggregator.planning import preset_for
from services.reward_aggregator.rounds import RoundBegun
from services.reward_aggregator.run_state import Entry, Evaluated, RolloutEnded, RunState, Watched, without_tokens
from services.rollouts.manager import RolloutManager
from services.rollouts.scoring import Scored
from services.rollouts.trajectories import TurnTaken, best_turn


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
        e = self.event
        made = [
            TurnOutcome(turn_id(s.rollout_id, s.turn), e.batch_id, e.index, s.reward, s.advantage)
            for group in self.groups
            for s in group.samples
        ]
        return {outcome.task_id: outcome for outcome in made}


class Decisions:
    """`for batch in decisions.run(journal.entries()): …` raises `Diverged`."""

    def __init__(self, campaign: RunState, conductor: RolloutManager, presets: list[Preset], records: Records) -> None:
        self.campaign = campaign
        self._conductor, self._presets, self._records = conductor, presets, records
        self._last: dict[str, TrainSample] = {}
        self.entries = 0
        self.rescored = 0
        self.unrecorded = 0
        """Turns whose records the archive no longer has: their journaled scores are taken."""

    def run(self, entries: Iterable[Entry]) -> Iterator[MadeBatch]:
        for entry in entries:
            self.entries += 1
            made = self._again(entry)
            if without_tokens(made) != without_tokens(entry):
                where = f"entry {self.entries} of the journal, {type(entry).__name__}"
                raise Diverged(where, without_tokens(entry), without_tokens(made))
            if isinstance(entry, BatchMade):
                groups = self.campaign.book.train_groups(entry.batch_id)
                yield MadeBatch(entry, groups, all(s.token_ids for group in groups for s in group.samples))

    def _again(self, entry: Entry) -> Entry:
        """Makes the entry again, and applies what came out."""
        if isinstance(entry, TurnTaken | RolloutEnded | Evaluated):
            made = self._rollout(entry)
            self.campaign.apply(made)
            return made
        if isinstance(entry, Watched):
            self.campaign.apply(entry)
            return entry
        if isinstance(entry, RoundBegun):
            version = self.campaign.rounds.due(self.campaign.book.version)
            begun = RoundBegun(-1 if version is None else version, entry.at)
            self.campaign.apply(begun)
            return begun
        change = self._decide(entry)
        if change.event is None:
            raise Diverged(f"entry {self.entries} of the journal", entry, "nothing: the group book ignored it")
        self.campaign.note(change.event, change.closed)
        return change.event

    def _decide(self, event: Entry) -> Change:
        book, at = self.campaign.book, event.at  # type: ignore[union-attr] # RolloutEnded has no time and is elsewhere
        match event:
            case Admitted():
                problem = self.campaign.next_problem(at)
                return book.admit(problem.problem_id, problem.level, self.campaign.plan.group_size, at)
            case BookScored():
                return book.scored(event.group_id, event.rollout_id, self._samples(event), at)
            case Lost():
                return book.lost(event.group_id, event.rollout_id, event.reason, at)
            case Swept() | HoldBegan() | BatchMade():
                return book.poll(at)
            case BatchTrained():
                return book.trained(event.batch_id, event.version, at)
            case BatchFailed():
                return book.batch_failed(event.batch_id, event.reason, at)
            case Finished():
                return book.finish(at, event.reason)
        raise AssertionError(f"unknown entry {event}")

    # ── rollouts ────────────────────────────────────────────────────────────────────────────────────────────────

    def _rollout(self, entry: TurnTaken | RolloutEnded | Evaluated) -> TurnTaken | RolloutEnded | Evaluated:
        if isinstance(entry, Evaluated):
            return self._evaluated(entry)
        found = self._scored(entry.group_id, entry.rollout_id)
        if found is None:
            self.unrecorded += 1
            return entry
        scored, record = found
        stats = _with_file(scored.stats, entry.stats)
        if isinstance(entry, RolloutEnded):
            self._last[entry.rollout_id] = scored.sample
            return RolloutEnded(entry.rollout_id, entry.group_id, stats)
        if not self._conductor.goes_on(entry.rollout_id, scored):
            raise Diverged(f"turn {scored.stats.turn} of {entry.rollout_id}", "another turn follows", "it was the last")
        return self._conductor.taken(entry.group_id, scored, stats, record, entry.at)

    def _evaluated(self, entry: Evaluated) -> Evaluated:
        turns = [turn.stats for turn in self.campaign.dialogues.turns(entry.rollout_id)]
        found = self._scored(entry.phase, entry.rollout_id)
        if found is None and entry.stats is not None and len(turns) == entry.stats.turn:
            self.unrecorded += 1
            return entry
        turns += [found[0].stats] if found else []
        best = best_turn(turns) if turns else None
        if best is not None and entry.stats is not None:
            best = _with_file(best, entry.stats)
        return Evaluated(entry.phase, entry.rollout_id, best, entry.at)

    def _scored(self, group_id: str, rollout_id: str) -> tuple[Scored, Record] | None:
        """The newest turn, scored again; None where its record is gone or infrastructure failed."""
        turn = len(self.campaign.dialogues.turns(rollout_id))
        record = self._records.record(turn_id(rollout_id, turn))
        preset = preset_for(group_id, self._presets, self.campaign)
        scored = self._conductor.score(rollout_id, record, preset) if record is not None else None
        if record is None or scored is None:
            return None
        self.rescored += 1
        return scored, record

    def _samples(self, event: BookScored) -> list[TrainSample]:
        """The rollout's samples with their returns, of records where there are any."""
        earlier = [turn.sample for turn in self.campaign.dialogues.turns(event.rollout_id)]
        last = self._last.pop(event.rollout_id, None)
        if last is None and (not earlier or len(event.samples) == len(earlier) + 1):
            return event.samples  # its last turn has no record any more, or they are a lesson (method=sft)
        return with_returns([*earlier, *([last] if last else [])], self._conductor.options)


def _with_file(stats: RolloutStats, recorded: RolloutStats) -> RolloutStats:
    """Where a kernel was kept, and how old it grew on its way, are no decisions of the campaign."""
    return msgspec.structs.replace(stats, file=recorded.file, ages=recorded.ages)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 400 else f"{text[:400]} …"
