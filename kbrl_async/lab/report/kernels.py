"""The fastest verified kernel of each problem, with its source and the reference's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec

from kbrl_async.errors import KbrlError
from kbrl_async.kernels.problems import load_problems
from kbrl_async.lab.report.model import Kernel, Turn
from kbrl_async.runs.archive.archive import Archive
from protocols.rollout import Record

MOST_SOURCES = 24
"""Kernels shown with their source; the others are a line of the table."""


def best_turns(turns: Sequence[Turn]) -> list[Turn]:
    """The turn of each problem with the highest lower end of its speedup's interval, best first.

    Only correct, timed ones; a speedup below 1 is listed too, as the best that was found.
    """
    best: dict[str, Turn] = {}
    for turn in turns:
        lo = turn.stats.speedup_lo
        if not turn.stats.correct or turn.stats.speedup is None or lo is None:
            continue
        kept = best.get(turn.stats.problem_id)
        if kept is None or lo > (kept.stats.speedup_lo or 0.0):
            best[turn.stats.problem_id] = turn
    return sorted(best.values(), key=lambda turn: turn.stats.speedup_lo or 0.0, reverse=True)


def read_kernels(turns: Sequence[Turn], run: Path, archive_path: Path | None, problems: str = "") -> list[Kernel]:
    """With sources from the archive where it has them, else from `kernels/` and the folder of `problems` (empty: the
    project's own suite)."""
    best = best_turns(turns)
    references = _references(problems)
    shown, others = best[:MOST_SOURCES], best[MOST_SOURCES:]
    with Archive(archive_path) if archive_path is not None else nullcontext() as archive:
        records = [archive.record(turn.task_id) if archive is not None else None for turn in shown]
    kernels = [_kernel(turn, run, record, references) for turn, record in zip(shown, records, strict=True)]
    return kernels + [_bare(turn) for turn in others]


def _bare(turn: Turn) -> Kernel:
    stats = turn.stats
    assert stats.speedup is not None
    assert stats.speedup_lo is not None
    return Kernel(
        stats.problem_id,
        stats.speedup,
        stats.speedup_lo,
        stats.speedup_hi or stats.speedup,
        file=stats.file,
        policy_version=stats.policy_version,
        rollout_id=stats.rollout_id,
        turn=stats.turn,
        at=turn.at,
    )


def _kernel(turn: Turn, run: Path, record: Record | None, references: Mapping[str, str]) -> Kernel:
    stats = turn.stats
    found = _from_record(record) if record is not None else {}
    file = stats.file or f"kernels/{stats.problem_id.replace('/', '_')}.py"
    kept = _text(run, file)
    found.setdefault("source", kept)
    found.setdefault("reference", references.get(stats.problem_id, ""))
    return msgspec.structs.replace(_bare(turn), file=file if kept else "", **found)


def _from_record(record: Record) -> dict[str, object]:
    found: dict[str, object] = {"reference": record.request.problem.source}
    if record.source:
        found["source"] = record.source
    if (timing := record.timing) is not None:
        found |= {
            "candidate_ms": timing.candidate_ms,
            "reference_ms": timing.reference_ms,
            "baselines": timing.baselines,
            "pairs": timing.n,
        }
    return found


def _text(run: Path, file: str) -> str:
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
