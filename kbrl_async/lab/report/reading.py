"""A run folder becomes `RunData`: the archive where there is one, else what the journal, logs and metrics hold.

::

    rollouts.sqlite ─┐
    aggregator.sqlite├─▶ turns, updates ─┐
    logs/            ┘                   ├─▶ RunData
    metrics/system.jsonl  summary.json   │
    tensorboard/  kernels/  config.yaml ─┘

Only reads. A file that is missing or torn costs its part of the report, and is named in `missing`.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kbrl_async.errors import CheckpointError, UserError
from kbrl_async.evaluation import document
from kbrl_async.lab.report import archived, numbers
from kbrl_async.lab.report.archived import Archived
from kbrl_async.lab.report.curves import curves
from kbrl_async.lab.report.examples import read_examples
from kbrl_async.lab.report.journal import FILE as JOURNAL_FILE
from kbrl_async.lab.report.journal import JournalData, read_journal
from kbrl_async.lab.report.kernels import read_kernels
from kbrl_async.lab.report.model import BEFORE, TRAIN, LogLine, PolicyUpdate, ReportedTurn, RunData
from kbrl_async.runs import summary
from kbrl_async.runs.archive import archive
from kbrl_async.runs.telemetry import logs
from kbrl_async.runs.telemetry.by_version import Answers, ScoredAnswer
from kbrl_async.runs.telemetry.system_metrics import SystemSample, Tail

POLICY_CURVES = ("loss", "entropy", "grad_norm", "mismatch_kl", "ess", "ratio_p99", "lr", "tokens_per_s")


def read_run(path: Path) -> RunData:
    """Everything that a report of `path` shows. UserError where it is no run folder."""
    stored = archived.read_archive(path / archive.FILE)
    journal = read_journal(path / JOURNAL_FILE)
    config = _config(path / "config.yaml")
    if not any((path / name).exists() for name in (archive.FILE, JOURNAL_FILE, "config.yaml")):
        raise UserError(f"{path} is no run folder", "Give a folder that 'kbrl train' made")
    log = read_logs(path / "logs")
    samples = Tail(path / "metrics" / "system.jsonl").new()
    result = _summary(path / "summary.json")
    origin = min([sample.t for sample in samples[:1]] + [log.began or float("inf")] + _first(stored))
    origin = origin if origin < float("inf") else 0.0
    clock = _clock(journal, log, stored, origin)
    turns = _turns(journal, stored, clock, origin)
    evaluated = journal.evaluated if journal and journal.turns else archived.evaluated(stored)
    turns, cut = _whole_evaluations(turns, evaluated, is_training=bool(journal and journal.batches))
    updates = _updates(journal, stored, log, clock, origin)
    system = [msgspec.structs.replace(sample, t=sample.t - origin) for sample in samples]
    problems = str((config or {}).get("problems") or "")
    return RunData(
        name=str(result.get("run") or path.name),
        summary=result,
        evaluation=_evaluation(path / document.FILE),
        config=_as_yaml(config),
        turns=turns,
        answers=_answers(turns, journal, stored),
        updates=updates,
        system=system,
        curves=_curves(path, stored),
        kernels=read_kernels(turns, path, stored.path if stored else None, problems),
        examples=read_examples(turns, stored),
        rules=stored.rules if stored else {},
        log=[msgspec.structs.replace(line, at=line.at - origin) for line in log.loud],
        log_count=log.loud_count,
        facts=_facts(stored, log),
        started_at=origin,
        duration=_duration(turns, updates, system),
        missing=[*_missing(config, stored, journal, result, samples), *cut],
    )


def _first(stored: Archived | None) -> list[float]:
    return [row.spans[0].queued for row in (stored.rows if stored else [])[:200] if row.spans and row.spans[0].queued]


def _config(path: Path) -> dict[str, Any] | None:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None


def _as_yaml(config: dict[str, Any] | None) -> str:
    """As YAML, secrets blanked."""
    return yaml.safe_dump(dict(logs.redact(None, "", config)), sort_keys=False, allow_unicode=True) if config else ""


def _summary(path: Path) -> summary.Summary:
    try:
        return summary.read(path)
    except (OSError, msgspec.MsgspecError):
        return {}


def _evaluation(path: Path) -> document.Document | None:
    try:
        return document.read(path) if path.is_file() else None
    except CheckpointError:
        return None


def _clock(journal: JournalData | None, log: Logs, stored: Archived | None, origin: float) -> WallClock:
    """From the run's own clock to seconds since `origin`."""
    walls = {version: end for version, (_, end) in log.updated.items()}
    walls |= {update.version: update.finished for update in (stored.updates if stored else []) if update.finished}
    batches = journal.batches if journal else []
    pairs = [(b.trained, walls[b.version]) for b in batches if b.trained is not None and b.version in walls]
    if not pairs and stored:
        pairs = [(row.clock, row.at) for row in stored.rows if row.clock]
    return WallClock([(run, wall - origin) for run, wall in pairs])


def _turns(journal: JournalData | None, stored: Archived | None, clock: WallClock, origin: float) -> list[ReportedTurn]:
    if journal is None or (stored and not journal.turns):
        turns = archived.as_turns(stored.rows) if stored else []
        return [_since(turn, origin) for turn in turns]
    rows = archived.by_turn(stored.rows) if stored else {}
    ages = _ages(journal)
    out = []
    for turn in journal.turns:
        timed = msgspec.structs.replace(turn, at=clock(turn.at or 0.0))
        row = rows.get((turn.stats.rollout_id, turn.stats.turn))
        if row is not None:
            timed = _since(archived.enriched(turn, row), origin)
        elif (index := ages.get(turn.group_id)) is not None:
            age = index - turn.stats.policy_version
            timed = msgspec.structs.replace(timed, stats=msgspec.structs.replace(turn.stats, staleness=age))
        out.append(timed)
    return out


def _answers(turns: Sequence[ReportedTurn], journal: JournalData | None, stored: Archived | None) -> Answers:
    """With what the archive knows of each turn."""
    listed = [ScoredAnswer(turn.group_id, turn.stats) for turn in turns if turn.phase == TRAIN]
    known = journal.answers if journal and journal.turns else archived.groups_that_lack(stored)
    return msgspec.structs.replace(known, listed=listed)


def _whole_evaluations(
    turns: Sequence[ReportedTurn], ended: Mapping[str, int], *, is_training: bool
) -> tuple[list[ReportedTurn], list[str]]:
    """Without the answers of evaluations that have not ended: failures are scored first.

    :param ended: by evaluation: how many of its rollouts have ended.
    :param is_training: a batch was made, so the evaluation before has ended; all others are as large.
    """
    size = ended.get(BEFORE, 0) if is_training else max(ended.values(), default=0)
    cut = {phase: count for phase, count in ended.items() if count < size}
    words = [
        f"{phase} has not ended: its first {numbers.count(count, 'answer')} of {size}, mostly failures, are left out."
        for phase, count in cut.items()
    ]
    return [turn for turn in turns if turn.phase not in cut], words


def _ages(journal: JournalData) -> dict[str, int]:
    """The version that each group was trained on."""
    return {
        group_id: batch.index for batch in journal.batches if batch.trained is not None for group_id in batch.group_ids
    }


def _since(turn: ReportedTurn, origin: float) -> ReportedTurn:
    spans = tuple(span.since(origin) for span in turn.spans)
    at = None if turn.at is None else turn.at - origin
    asked = None if turn.asked is None else turn.asked - origin
    return msgspec.structs.replace(turn, at=at, asked=asked, spans=spans)


def _updates(
    journal: JournalData | None, stored: Archived | None, log: Logs, clock: WallClock, origin: float
) -> list[PolicyUpdate]:
    spans = dict(log.updated)
    spans |= {u.version: (u.started, u.finished) for u in (stored.updates if stored else []) if u.finished}
    groups = {batch.version: batch for batch in (journal.batches if journal else []) if batch.version is not None}
    members = _members(stored)
    versions = sorted(set(spans) | {version for version in groups if version is not None})
    out = []
    for version in versions:
        batch, span = groups.get(version), spans.get(version)
        trained = clock(batch.trained or 0.0) if batch else 0.0
        out.append(
            PolicyUpdate(
                version,
                span[1] - origin if span else trained,
                span[0] - origin if span else None,
                clock(batch.made) if batch else None,
                batch.group_ids if batch else tuple(members.get(version - 1, ())),
            )
        )
    return out


def _members(stored: Archived | None) -> dict[int, dict[str, None]]:
    """The groups that were trained on, by the version that they were trained on."""
    members: dict[int, dict[str, None]] = defaultdict(dict)
    for row in stored.rows if stored else ():
        if row.trained_on is not None:
            members[row.trained_on][row.group_id] = None
    return members


def _curves(path: Path, stored: Archived | None) -> Mapping[str, Sequence[tuple[float, float]]]:
    """The learner's own metrics by update: from the archive, else from TensorBoard's files."""
    if stored and stored.updates:
        return {
            name: [(float(u.version), u.metrics[name]) for u in stored.updates if name in u.metrics]
            for name in POLICY_CURVES
        }
    found = curves(path, [f"policy/{name}" for name in POLICY_CURVES])
    return {tag.removeprefix("policy/"): points for tag, points in found.items()}


def _facts(stored: Archived | None, log: Logs) -> dict[str, str]:
    facts = dict(log.facts)
    if stored and stored.lost:
        facts["turns that infrastructure lost"] = ", ".join(f"{n} {status}" for status, n in stored.lost.items())
    return facts


def _duration(turns: Sequence[ReportedTurn], updates: Sequence[PolicyUpdate], system: Sequence[SystemSample]) -> float:
    ends = [turn.at or 0.0 for turn in turns] + [update.at for update in updates] + [s.t for s in system[-1:]]
    return max(ends, default=0.0)


def _missing(
    config: dict[str, Any] | None,
    stored: Archived | None,
    journal: JournalData | None,
    result: Mapping[str, Any],
    samples: Sequence[object],
) -> list[str]:
    is_evaluation = result.get("kind") == document.KIND
    lacks = {
        "The run has no archive (rollouts.sqlite), as runs before it was introduced, or with archive.keep=none: single "
        "rollouts have durations but no times of day, and rules that fired are not known.": stored is None,
        "The aggregator's journal is missing or can't be read.": journal is None and not is_evaluation,
        "The run has not ended: it has no summary.json, and these are the figures so far.": not result,
        "metrics/system.jsonl is missing: queues and the business of processes are not known.": not samples,
        "config.yaml is missing or can't be read.": config is None,
    }
    return [words for words, is_so in lacks.items() if is_so]


# ── the run's own clock, laid onto the wall's ────────────────────────────────────────────────────────────────────────


class WallClock:
    """`WallClock([(run, wall), …])(run) -> wall`; without any pair, the run's clock itself, which stops with the run.

    Both are known at every update: the journal has the one, the logs and the archive the other. Between updates the
    offset of the next one holds, so a pause between two starts of a run is where it was.
    """

    def __init__(self, pairs: Sequence[tuple[float, float]]) -> None:
        ordered = sorted(pairs)
        self._at = [run for run, _ in ordered]
        self._offsets = [wall - run for run, wall in ordered]

    def __call__(self, run: float) -> float:
        if not self._at:
            return run
        return run + self._offsets[min(bisect.bisect_left(self._at, run), len(self._at) - 1)]


# ── what log files say that no other file does: warnings, errors, and when each update was ───────────────────────────


MOST_LOUD = 40
LOUD = ("warning", "error", "critical")
_KNOWN = frozenset({"process", "pid", "event", "level", "timestamp"})


class Logs(msgspec.Struct, frozen=True):
    """Times are epoch seconds."""

    loud: list[LogLine]
    """The newest warnings and errors."""
    loud_count: int
    updated: dict[int, tuple[float, float]]
    """By policy version: when the update began and ended."""
    facts: dict[str, str]
    began: float | None


def read_logs(folder: Path) -> Logs:
    """Lines that are torn, or not ours, are passed over."""
    loud: list[LogLine] = []
    updated: dict[int, tuple[float, float]] = {}
    facts: dict[str, str] = {}
    began = None
    for path in sorted(folder.glob("*.jsonl")):
        for line in _lines(path):
            at = line["at"]
            began = at if began is None else min(began, at)
            if line.get("level") in LOUD:
                loud.append(_loud(line))
            elif line.get("event") == "updated" and "policy_version" in line:
                updated[int(line["policy_version"])] = (at - float(line.get("seconds", 0.0)), at)
            elif line.get("event") == "ready":
                facts |= _ready_facts(path.stem, line)
    loud.sort(key=lambda line: line.at)
    return Logs(loud[-MOST_LOUD:], len(loud), updated, facts, began)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for raw in file:
            try:
                line = msgspec.json.decode(raw, type=dict[str, Any])
                line["at"] = datetime.fromisoformat(line["timestamp"]).timestamp()
            except (msgspec.DecodeError, KeyError, TypeError, ValueError):
                continue
            yield line


def _loud(line: dict[str, Any]) -> LogLine:
    detail = ", ".join(f"{key}={value}" for key, value in line.items() if key not in _KNOWN and key != "at")
    return LogLine(line["at"], str(line.get("process", "")), line["level"], str(line.get("event", "")), detail)


def _ready_facts(process: str, line: dict[str, Any]) -> dict[str, str]:
    wanted = ("device", "isolation", "backends", "slots", "core", "cores")
    said = ", ".join(f"{key} {line[key]}" for key in wanted if line.get(key) not in (None, ""))
    return {process: said} if said else {}
