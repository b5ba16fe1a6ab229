"""The aggregator's journal as plain data: scored turns, batches and updates, of runs with or without an archive.

The entries' types belong to a service, which this floor never imports; they are read by their tags and field names.
What a later version adds is passed over.

Invariant: an evaluation rollout is one turn here, its best; a training rollout is as many as it took.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.lab.report.model import TRAIN, ReportedTurn
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.archive.history import entries_of
from kbrl_async.runs.telemetry.by_version import Answers, Tally

FILE = "aggregator.sqlite"


class JournalBatch(msgspec.Struct, frozen=True):
    """Groups that were trained on together; times are on the run's own clock."""

    index: int
    group_ids: tuple[str, ...]
    made: float
    trained: float | None = None
    version: int | None = None


class JournalData(msgspec.Struct, frozen=True):
    """`turns[i].at` is on the run's own clock."""

    turns: list[ReportedTurn]
    batches: list[JournalBatch]
    problems: dict[str, str]
    """Of admitted groups."""
    answers: Answers
    evaluated: dict[str, int]
    """By evaluation: how many of its rollouts have ended, those that infrastructure lost included."""


def read_journal(path: Path) -> JournalData | None:
    """None where there is no journal, or none that can be read."""
    if not path.is_file():
        return None
    try:
        return _collect(_entries(path))
    except (sqlite3.Error, msgspec.MsgspecError):
        return None


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    decoder = msgspec.msgpack.Decoder(dict[str, Any])
    return map(decoder.decode, entries_of(path))


def _collect(entries: Iterator[dict[str, Any]]) -> JournalData:
    turns: list[ReportedTurn] = []
    batches: dict[str, JournalBatch] = {}
    problems: dict[str, str] = {}
    tally, evaluated, clock = Tally(), Counter[str](), 0.0
    for entry in entries:
        clock = max(clock, entry.get("at") or 0.0)
        match entry.get("type"):
            case "admitted":
                problems[entry["group_id"]] = entry["problem_id"]
                tally.admitted(entry["group_id"], entry["rollouts"], entry["version"], entry["problem_id"])
            case "evaluated":
                evaluated[entry["phase"]] += 1
                if entry["stats"] is not None:
                    turns.append(ReportedTurn(_stats(entry), entry["phase"], entry["phase"], clock))
            case "rollout_ended" | "turn_taken" if not entry["group_id"].startswith("eval-"):
                turns.append(ReportedTurn(_stats(entry), TRAIN, entry["group_id"], clock))
                tally.answered(entry["group_id"], turns[-1].stats)
            case "scored":
                tally.ended(entry["group_id"])
            case "lost":
                tally.ended(entry["group_id"], entry["reason"])
            case "swept":
                tally.swept(entry["group_ids"])
            case "stragglers_cut":
                tally.swept(entry["group_ids"], whole=False)
            case "batch_made":
                batches[entry["batch_id"]] = JournalBatch(entry["index"], tuple(entry["group_ids"]), clock)
            case "batch_trained" if entry["batch_id"] in batches:
                made = batches[entry["batch_id"]]
                batches[entry["batch_id"]] = msgspec.structs.replace(made, trained=clock, version=entry["version"])
    return JournalData(turns, list(batches.values()), problems, tally.answers(), dict(evaluated))


def _stats(entry: dict[str, Any]) -> RolloutStats:
    stats = msgspec.convert(entry["stats"], RolloutStats)
    return stats if stats.rollout_id else msgspec.structs.replace(stats, rollout_id=entry["rollout_id"])
