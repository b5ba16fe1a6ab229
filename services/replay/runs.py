"""A whole run again: decisions from the journal and the archive, updates from the first policy; the first divergence.

::

    journal + archive ─▶ Decisions ─ batch ─▶ advantages equal? ─▶ Updates ─ metrics equal? ─▶ … ─▶ counters equal?
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kbrl_async.errors import CheckpointError
from kbrl_async.rollouts.buffer.events import BatchMade
from kbrl_async.rollouts.manager import RolloutManager
from kbrl_async.rollouts.rewards.presets import find_presets
from kbrl_async.runs import summary
from kbrl_async.runs.archive.archive import FILE, ArchiveReader
from kbrl_async.runs.folder import SUMMARY_FILE, load_run
from kbrl_async.runs.planning import plan_of, rollout_rules
from kbrl_async.runs.prompting import template_prompts
from kbrl_async.runs.run_journal import FILE as JOURNAL_FILE
from kbrl_async.runs.run_journal import RunJournal
from kbrl_async.runs.run_state import RunState
from protocols.records import SamplingParams
from services.replay.decisions import Decisions, Diverged, Divergence, MadeBatch
from services.replay.updates import Curve, ReplayedUpdates, first_trainer

DIVERGED = 1
"""Exit code of a replay that came out otherwise."""


class RunReplay(msgspec.Struct):
    """What `kbrl replay RUN` says."""

    run: str
    entries: int = 0
    rescored: int = 0
    unrecorded: int = 0
    batches: int = 0
    advantages: int = 0
    """Samples whose advantage and return were compared."""
    counters: dict[str, int] = msgspec.field(default_factory=dict)
    curve: Curve | None = None
    weights: str = ""
    divergence: Divergence | None = None
    seconds: float = 0.0


def replay(run_dir: Path, *, with_learner: bool = True, as_json: bool = False) -> int:
    """Prints the report; 0 when everything came out the same, `DIVERGED` else."""
    report = replay_run(run_dir, with_learner=with_learner, told=_tell)
    print(msgspec.json.format(msgspec.json.encode(report)).decode() if as_json else in_words(report))
    return DIVERGED if report.divergence else 0


def replay_run(run_dir: Path, *, with_learner: bool, told: Callable[[str], None] = lambda _line: None) -> RunReplay:
    """Raises `KbrlError` where the run lacks what a replay needs."""
    config = load_run(run_dir)
    started = time.monotonic()
    report = RunReplay(run_dir.name)
    if not (run_dir / JOURNAL_FILE).is_file():
        raise CheckpointError(f"{run_dir} has no {JOURNAL_FILE}", "Give the folder of a run that has begun")
    with ArchiveReader(run_dir / FILE) as archive, RunJournal(run_dir / JOURNAL_FILE) as journal:
        state = RunState(plan_of(config))
        sampling = SamplingParams(config.max_tokens, config.temperature)
        manager = RolloutManager(rollout_rules(config), state, template_prompts(config, run_dir), sampling)
        decisions = Decisions(state, manager, find_presets(config.reward, overlong=config.punishes_overlong), archive)
        updates = ReplayedUpdates(first_trainer(run_dir, config), config) if with_learner else None
        try:
            _run(journal, archive, decisions, updates, report, told)
            if updates is not None and state.version:
                report.weights = updates.compare_weights(run_dir, state.version)
            _compare_counters(run_dir, state)
        except Diverged as found:
            report.divergence = found.divergence
    report.entries, report.rescored, report.unrecorded = decisions.entries, decisions.rescored, decisions.unrecorded
    report.counters = msgspec.structs.asdict(state.counters())
    report.curve = updates.curve if updates else None
    report.seconds = time.monotonic() - started
    return report


def _run(
    journal: RunJournal,
    archive: ArchiveReader,
    decisions: Decisions,
    updates: ReplayedUpdates | None,
    report: RunReplay,
    told: Callable[[str], None],
) -> None:
    recorded = {update.batch_id: update for update in archive.updates()}
    for made in decisions.run(journal.history()):
        batch_id = made.event.batch_id
        report.batches += 1
        report.advantages += _compare_outcomes(archive, made)
        if updates is None or batch_id not in recorded or not _was_trained(made.event, recorded[batch_id].version):
            continue
        if not made.is_whole:
            raise CheckpointError(
                f"the archive no longer holds all records of {batch_id}", "Add --no-train, or raise archive.max_bytes"
            )
        metrics = updates.train(made.groups, made.event.index)
        updates.compare(batch_id, metrics, recorded[batch_id])
        told(f"{batch_id}: loss {metrics['loss']:.6f}, recorded {recorded[batch_id].metrics['loss']:.6f}")


def _was_trained(batch: BatchMade, version: int) -> bool:
    """A batch whose loss was not finite made no version."""
    return version == batch.index + 1


def _compare_outcomes(archive: ArchiveReader, made: MadeBatch) -> int:
    ours = made.outcomes()
    rows = {row.task_id: row for row in archive.rows(batch_id=made.event.batch_id)}
    if rows and rows.keys() != ours.keys():
        raise Diverged(f"members of {made.event.batch_id}", sorted(rows), sorted(ours))
    for task_id, row in rows.items():
        recorded = (row.turn_return, row.advantage)
        replayed = (ours[task_id].turn_return, ours[task_id].advantage)
        if recorded != replayed:
            raise Diverged(f"return and advantage of {task_id} in {made.event.batch_id}", recorded, replayed)
    return len(rows)


def _compare_counters(run_dir: Path, state: RunState) -> None:
    path = run_dir / SUMMARY_FILE
    if not path.is_file():
        return
    content = summary.read(path)
    for name, ours in msgspec.structs.asdict(state.counters()).items():
        if content.get(name) != ours:
            raise Diverged(f"{name} of {SUMMARY_FILE}", content.get(name), ours)


def in_words(report: RunReplay) -> str:
    lines = [
        f"{report.run}: {report.entries} journal entries, {report.rescored} turns scored again, "
        f"{report.batches} batches",
        f"advantages and returns: {report.advantages} compared, all equal" if not report.divergence else "",
        f"{report.unrecorded} turns have no record any more; their journaled scores were taken"
        if report.unrecorded
        else "",
    ]
    if report.curve is not None and report.curve.updates:
        c = report.curve
        worst = f"; largest relative difference {c.worst:.2g} ({c.worst_metric})" if c.worst else ""
        lines.append(f"loss curve: {c.exact} of {c.updates} updates equal to the last bit{worst}")
    lines.append(report.weights)
    counters = ", ".join(f"{name} {value}" for name, value in report.counters.items())
    lines.append(f"counters: {counters}")
    if report.divergence is None:
        lines.append(f"replayed in {report.seconds:.1f} s: everything came out the same")
    else:
        d = report.divergence
        lines.append(f"diverged at {d.where}\n  recorded: {d.recorded}\n  replayed: {d.replayed}")
    return "\n".join(line for line in lines if line)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
