"""What the archive adds to a run: when each stage of a turn began and ended, and which rule fired."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kbrl_async.errors import KbrlError
from kbrl_async.lab.report.model import AFTER, BEFORE, TRAIN, ReportedTurn
from kbrl_async.rollouts.buffer.buffer import RUN_ENDED
from kbrl_async.rollouts.stats import RolloutStats, StepOutcome
from kbrl_async.runs.archive import archive
from kbrl_async.runs.archive.archive import ArchiveReader, GroupEnd, TurnRow
from kbrl_async.runs.telemetry.by_version import Answers
from protocols.records import GroupOutcome
from protocols.rollout import STEPS

PHASES = {"train": TRAIN, "before": BEFORE, "after": AFTER}
"""What the archive calls them; rows of other purposes are no part of this report."""


class Archived(msgspec.Struct, frozen=True):
    """Times are epoch seconds."""

    rows: list[TurnRow]
    updates: list[archive.UpdateRow]
    groups: dict[str, GroupEnd]
    path: Path

    @property
    def lost(self) -> dict[str, int]:
        """How often the infrastructure gave up, by its reason."""
        return dict(Counter(row.status for row in self.rows if row.status != "ok"))

    @property
    def rules(self) -> dict[str, int]:
        return dict(Counter(f"{row.fault}: {row.rule}" for row in self.rows if row.rule).most_common(20))


def read_archive(path: Path) -> Archived | None:
    """None where there is none, or none that can be read."""
    try:
        with ArchiveReader(path) as opened:
            return Archived(list(opened.rows()), opened.updates(), opened.groups(), path)
    except (KbrlError, sqlite3.Error, msgspec.MsgspecError):
        return None


def by_turn(rows: Sequence[TurnRow]) -> dict[tuple[str, int], TurnRow]:
    return {(row.rollout_id, row.turn): row for row in rows if row.status == "ok"}


def enriched(turn: ReportedTurn, row: TurnRow | None) -> ReportedTurn:
    """A turn of the journal with what the archive knows of it."""
    if row is None:
        return turn
    stats = msgspec.structs.replace(turn.stats, staleness=_age(row), advantage=row.advantage)
    return _timed(msgspec.structs.replace(turn, stats=stats, task_id=row.task_id), row)


def as_turns(rows: Sequence[TurnRow]) -> list[ReportedTurn]:
    """Turns from the archive alone; an evaluation rollout is its best turn."""
    best: dict[str, TurnRow] = {}
    for row in rows:
        if row.status == "ok" and PHASES.get(row.purpose, row.purpose) != TRAIN:
            kept = best.get(row.rollout_id)
            if kept is None or (row.correct, row.lo or 0.0) > (kept.correct, kept.lo or 0.0):
                best[row.rollout_id] = row
    evaluated = {row.task_id for row in best.values()}
    return [_turn(row) for row in rows if row.status == "ok" and (row.purpose == "train" or row.task_id in evaluated)]


def evaluated(stored: Archived | None) -> dict[str, int]:
    """How many rollouts of each evaluation of the run have rows."""
    found: dict[str, set[str]] = defaultdict(set)
    for row in stored.rows if stored else ():
        if row.purpose in ("before", "after"):
            found[PHASES[row.purpose]].add(row.rollout_id)
    return {phase: len(rollouts) for phase, rollouts in found.items()}


def groups_that_lack(stored: Archived | None) -> Answers:
    """What the archive alone knows of groups that lack answers: more than the journal, to be safe.

    A group that was trained on, filtered or failed by itself had all of its answers; it can't tell that of the others.
    A sampler is rarely more than a version behind the learner: what they lack is no older than that.
    """
    written: dict[str, int] = {}
    lost: Counter[str] = Counter()
    for row in stored.rows if stored else ():
        if row.purpose == "train" and row.status != "ok":
            lost[row.status] += 1
        elif row.purpose == "train" and row.policy_version >= 0:
            written[row.group_id] = min(row.policy_version, written.get(row.group_id, row.policy_version))
    ends = stored.groups if stored else {}
    open_ = {group_id: version - 1 for group_id, version in written.items() if _is_cut(ends.get(group_id))}
    dropped = frozenset(g for g, end in ends.items() if end.outcome == GroupOutcome.DROPPED_STALE)
    return Answers((), open_, dropped, dict(lost))


def _is_cut(end: GroupEnd | None) -> bool:
    return end is None or (end.outcome == GroupOutcome.FAILED and end.reason == RUN_ENDED)


def _turn(row: TurnRow) -> ReportedTurn:
    stats = RolloutStats(
        problem_id=row.problem_id,
        level=row.level,
        reward=row.reward or 0.0,
        format=row.fault != "format_error" or bool(row.rule),
        compiled=row.compiled,
        correct=row.correct,
        cheated=row.fault == "cheating",
        speedup=row.speedup,
        speedup_lo=row.lo,
        speedup_hi=row.hi,
        disturbed=row.disturbed,
        turn=row.turn,
        tokens=row.tokens,
        policy_version=row.policy_version,
        staleness=_age(row),
        advantage=row.advantage,
        seconds={span.stage: span.seconds for span in row.spans},
        rollout_id=row.rollout_id,
        fault=row.fault,
        role=row.role,
        funnel=_steps(row),
    )
    return _timed(ReportedTurn(stats, PHASES.get(row.purpose, row.purpose), row.group_id, task_id=row.task_id), row)


def _steps(row: TurnRow) -> tuple[StepOutcome, ...]:
    """The funnel without the stages' seconds. Archives from before know less of where a candidate left."""
    last = row.step or _guessed(row)
    return tuple(StepOutcome(name, row.correct or name != last) for name in STEPS[: STEPS.index(last) + 1])


def _guessed(row: TurnRow) -> str:
    if row.correct:
        return "full_inputs" if row.speedup is None else "timing"
    if row.compiled:
        return "small_inputs"
    if row.fault == "format_error" and not row.rule:
        return "format"
    return "compile" if row.fault == "compile_error" else "static"


def _timed(turn: ReportedTurn, row: TurnRow) -> ReportedTurn:
    spans = tuple(span for span in row.spans if span.started)
    return msgspec.structs.replace(turn, at=row.at, asked=row.spans[0].queued if row.spans else None, spans=spans)


def _age(row: TurnRow) -> int | None:
    return None if row.trained_on is None else row.trained_on - row.policy_version
