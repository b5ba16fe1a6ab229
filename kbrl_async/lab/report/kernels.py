"""The fastest verified kernel of each problem, with its source and the reference's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.errors import KbrlError
from kbrl_async.kernels.problems import load_problems
from kbrl_async.kernels.problems.cases import workload_lines
from kbrl_async.lab.report.model import BestKernel, ReportedTurn
from kbrl_async.runs.archive.archive import ArchiveReader
from protocols.rollout import Record

MOST_SOURCES = 24
"""Kernels shown with their source; the others are a line of the table."""


def best_turns(turns: Sequence[ReportedTurn]) -> list[ReportedTurn]:
    """The turn of each problem with the highest lower end of its speedup's interval, best first.

    Only correct, timed ones, no disturbed measurements; a speedup below 1 is listed too, as the best that was found.
    """
    best: dict[str, ReportedTurn] = {}
    for turn in turns:
        lo = turn.stats.speedup_lo
        if not turn.stats.correct or turn.stats.speedup is None or lo is None or turn.stats.is_disturbed:
            continue
        kept = best.get(turn.stats.problem_id)
        if kept is None or lo > (kept.stats.speedup_lo or 0.0):
            best[turn.stats.problem_id] = turn
    return sorted(best.values(), key=lambda turn: turn.stats.speedup_lo or 0.0, reverse=True)


def read_kernels(
    turns: Sequence[ReportedTurn], run: Path, archive_path: Path | None, problems: str = ""
) -> list[BestKernel]:
    """With sources from the archive where it has them, else from `kernels/` and the folder of `problems` (empty: the
    project's own suite)."""
    best = best_turns(turns)
    references = _references(problems)
    shown, others = best[:MOST_SOURCES], best[MOST_SOURCES:]
    with ArchiveReader(archive_path) if archive_path is not None else nullcontext() as archive:
        records = [archive.record(turn.task_id) if archive is not None else None for turn in shown]
    known = [_sources(turn, run, record, references) for turn, record in zip(shown, records, strict=True)]
    return [*map(_kernel, shown, known), *(_kernel(turn, {}) for turn in others)]


def _kernel(turn: ReportedTurn, found: Mapping[str, Any]) -> BestKernel:
    stats = turn.stats
    assert stats.speedup is not None
    assert stats.speedup_lo is not None
    hi = stats.speedup_hi or stats.speedup
    known = {"file": stats.file, "task_id": turn.task_id, **found}
    made = BestKernel(stats.problem_id, stats.speedup, stats.speedup_lo, hi, rollout_id=stats.rollout_id, at=turn.at)
    return msgspec.structs.replace(made, policy_version=stats.policy_version, turn=stats.turn, **known)


def _sources(turn: ReportedTurn, run: Path, record: Record | None, references: Mapping[str, str]) -> dict[str, Any]:
    problem_id = turn.stats.problem_id
    file = turn.stats.file or f"kernels/{problem_id.replace('/', '_')}.py"
    kept = text_in(run, file)
    own = {"source": kept, "reference": references.get(problem_id, ""), "file": file if kept else ""}
    return {**own, **_from_record(record)}


def _from_record(record: Record | None) -> dict[str, Any]:
    if record is None:
        return {}
    found: dict[str, Any] = {"reference": record.request.problem.source}
    if record.source:
        found["source"] = record.source
    if (timing := record.timing) is not None:
        found |= {"candidate_ms": timing.candidate_ms, "reference_ms": timing.reference_ms}
        found |= {"baselines": timing.baselines, "pairs": timing.n}
        found["workloads"] = tuple(workload_lines(record.verdict, timing))
    if record.bench is not None:
        found["profile"] = record.bench.profile
    return found


def text_in(run: Path, file: str) -> str:
    """A file of the run folder, and of nowhere else: names come from data."""
    path = (run / file).resolve()
    if not path.is_relative_to(run.resolve()) or not path.is_file():
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def _references(problems: str) -> dict[str, str]:
    """Sources by problem; of the project's own suite where the run's folder of problems is not here."""
    try:
        return {problem.problem_id: problem.source for problem in load_problems(problems)}
    except KbrlError:
        return _references("") if problems else {}
