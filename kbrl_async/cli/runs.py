"""`kbrl runs`: the runs of this folder, how each stands, and what came of it."""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kbrl_async.cli.shared import EVALUATIONS, log_path, no_runs, print_json, say, table
from kbrl_async.errors import KbrlError
from kbrl_async.runs import summary
from kbrl_async.runs.config import CONFIG_FILE
from kbrl_async.runs.folder import latest, runs_in
from kbrl_async.runs.standing import SUMMARY_FILE, RunStatus, standing

FIGURES = ("correct_rate_first", "correct_rate_last", "heldout_correct_rate_before", "heldout_correct_rate_after")
TOLD = 3
"""Crashed runs whose reason is told below the table."""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One run as it is listed; a figure that is not known (yet) is None."""

    run: str
    path: str
    kind: str
    """`training` or `evaluation`."""
    state: RunStatus
    reason: str = ""
    """Why it crashed."""
    is_latest: bool = False
    started: float
    """Seconds since 1970 of its last start."""
    updates: int | None = None
    correct_rate_first: float | None = None
    """Share of correct answers that the first policy versions wrote; `last`: the last ones."""
    correct_rate_last: float | None = None
    heldout_correct_rate_before: float | None = None
    heldout_correct_rate_after: float | None = None
    policy: str | None = None
    """Of an evaluation: what was evaluated."""
    problems: int | None = None
    correct_rate: float | None = None
    correct_rate_95: tuple[float, float] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON, with unrounded figures")


def run(args: argparse.Namespace) -> int:
    root = log_path()
    found = listed(root)
    if not found:
        raise no_runs(root)
    if args.json:
        print_json(found, pretty=True)
    else:
        show(found, Console())
    return 0


def listed(root: Path) -> list[Listed]:
    """Training runs, then evaluations; of each kind the newest first."""
    newest = latest(root)
    training = [_training(path, path == newest) for path in runs_in(root.resolve())]
    return [*training, *(_evaluation(path) for path in runs_in(root.resolve() / EVALUATIONS))]


def _training(path: Path, is_latest: bool) -> Listed:
    stands, said = standing(path), _summary(path)
    known = dict(summary.by_versions(said)) if said else _so_far(path)
    return Listed(
        run=path.name,
        path=str(path),
        kind="training",
        state=stands.state,
        reason=stands.reason if stands.state is RunStatus.CRASHED else "",
        is_latest=is_latest,
        started=(path / CONFIG_FILE).stat().st_mtime,
        updates=known.get("updates"),
        **{name: known.get(name) for name in FIGURES},
    )


def _evaluation(path: Path) -> Listed:
    stands, said = standing(path), _summary(path)
    figures: Mapping[str, Any] = (said.get("overall") or {}).get("raw") or {}
    correct = figures.get("correct") or {}
    return Listed(
        run=path.name,
        path=str(path),
        kind="evaluation",
        state=stands.state,
        reason=stands.reason if stands.state is RunStatus.CRASHED else "",
        started=(path / CONFIG_FILE).stat().st_mtime,
        policy=(said.get("policy") or {}).get("label"),
        problems=figures.get("problems"),
        correct_rate=correct.get("value"),
        correct_rate_95=(correct["lo"], correct["hi"]) if correct else None,
    )


def _summary(path: Path) -> dict[str, Any]:
    """What a run said at its end; empty where it has not ended, or somebody damaged it."""
    try:
        return summary.read(path / SUMMARY_FILE)
    except (OSError, msgspec.MsgspecError):
        return {}


def _so_far(path: Path) -> dict[str, Any]:
    """The figures of a run that has not ended, from its archive and journal."""
    from kbrl_async.lab.report.journal import FILE, read_journal
    from kbrl_async.runs.archive.archive import FILE as ARCHIVE
    from kbrl_async.runs.archive.archive import ArchiveReader
    from kbrl_async.runs.telemetry import by_version

    try:
        with ArchiveReader(path / ARCHIVE) as archive:
            updates = len(archive.updates())
        journal = read_journal(path / FILE)
    except KbrlError:
        return {}
    return {"updates": updates, **(by_version.fields(journal.answers) if journal else {})}


# ── what is printed ─────────────────────────────────────────────────────────────────────────────────────────────────


def show(found: Sequence[Listed], console: Console) -> None:
    now = time.time()
    training = [run for run in found if run.kind == "training"]
    evaluations = [run for run in found if run.kind == "evaluation"]
    if training:
        console.print(_training_table(training, now))
    if evaluations:
        console.print(_evaluation_table(evaluations, now))
    for line in _hints(found):
        say(line, console)


def _training_table(runs: Sequence[Listed], now: float) -> Table:
    numbers = ("updates", "correct", "held out")
    made = table(("run", "state", *numbers, "started"), right=numbers)
    for run in runs:
        made.add_row(
            f"{run.run} (latest)" if run.is_latest else run.run,
            run.state,
            "–" if run.updates is None else str(run.updates),
            _change(run.correct_rate_first, run.correct_rate_last),
            _change(run.heldout_correct_rate_before, run.heldout_correct_rate_after),
            ago(now - run.started),
        )
    return made


def _evaluation_table(runs: Sequence[Listed], now: float) -> Table:
    numbers = ("problems", "correct")
    made = table(("evaluation", "state", "policy", *numbers, "started"), right=numbers)
    for run in runs:
        problems = "–" if run.problems is None else str(run.problems)
        made.add_row(run.run, run.state, run.policy or "–", problems, _share(run), ago(now - run.started))
    return made


def _share(run: Listed) -> str:
    if run.correct_rate is None or run.correct_rate_95 is None:
        return "–"
    low, high = run.correct_rate_95
    return f"{run.correct_rate:.0%} ({low:.0%} … {high:.0%})"


def _change(first: float | None, last: float | None) -> str:
    if first is None and last is None:
        return "–"
    return " → ".join("–" if share is None else f"{share:.0%}" for share in (first, last))


def _hints(found: Sequence[Listed]) -> Iterator[str]:
    crashed = [run for run in found if run.state is RunStatus.CRASHED]
    for run in crashed[:TOLD]:
        yield f"{run.run} crashed: {run.reason}\n  kbrl logs {run.run} --level error"
    if any(run.updates is not None for run in found):
        yield "correct: first → last policy versions; held out: before → after training"


def ago(seconds: float) -> str:
    """`3 min ago`, and the day where it is long ago."""
    if seconds < 90:
        return f"{max(0, seconds):.0f} s ago"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min ago"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.0f} h ago"
    return datetime.datetime.fromtimestamp(time.time() - seconds).astimezone().strftime("%Y-%m-%d")
