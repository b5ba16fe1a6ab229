"""Metrics of a run as curves: by policy version from its journal, by update from TensorBoard's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kbrl_async.lab.report.journal import FILE as JOURNAL_FILE
from kbrl_async.lab.report.journal import read_journal
from kbrl_async.lab.report.markup import Markup
from kbrl_async.lab.report.plots import STANDALONE, Series, line_chart
from kbrl_async.runs.telemetry.by_version import FIELDS, VersionRange, points, settled
from kbrl_async.runs.telemetry.training_metrics import turn_scalars

VERSION = "version/"
"""Begins the tags of curves by policy version, which are read from a run's journal."""
MOST_POINTS, LEAST_A_POINT = 160, 16
SOLVED = "success_rate"
"""Rollouts of several turns with a correct one."""


def curves(run: Path, tags: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """(update, value) by TensorBoard tag of a run; those that were not written are empty."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run / "tensorboard" / "training"
    if not folder.is_dir():
        return {tag: [] for tag in tags}
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    there = events.Tags()["scalars"]
    return {
        tag: [(float(event.step), float(event.value)) for event in events.Scalars(tag)] if tag in there else []
        for tag in tags
    }


def version_curves(run: Path) -> dict[str, list[tuple[float, float]]]:
    """(policy version, value) by `version/…` tag, from the run's journal: of all answers that a version wrote."""
    journal = read_journal(run / JOURNAL_FILE)
    parts = points(settled(journal.answers), MOST_POINTS, LEAST_A_POINT) if journal else []
    found = [(part.middle, _values(part)) for part in parts]
    names = (*FIELDS, SOLVED)
    return {f"{VERSION}{name}": [(x, values[name]) for x, values in found if name in values] for name in names}


def _values(part: VersionRange) -> dict[str, float]:
    values = {name: figure.value for name, figure in part.figures().items()}
    has_turns = any(stats.turn for stats in part.stats)
    return values | ({SOLVED: turn_scalars(part.stats)["multiturn/success_rate"]} if has_turns else {})


def curve(run: Path, tag: str) -> list[tuple[float, float]]:
    """Of one tag: of a policy version's answers (`version/…`), or of an update as TensorBoard has it."""
    return version_curves(run).get(tag, []) if tag.startswith(VERSION) else curves(run, [tag])[tag]


def without(runs: Mapping[str, Path], tag: str) -> list[str]:
    """Runs that have no values of this tag: method=sft has no rollouts, and so no rewards."""
    return [name for name, path in runs.items() if not curve(path, tag)]


def chart(runs: Mapping[str, Path], tag: str, window: int = 3) -> Markup | None:
    """SVG of a tag by version or update of each run, smoothed over `window` of them; None where no run has it."""
    lines = [Series(name, curve(path, tag), window=window) for name, path in runs.items()]
    if not any(line.points for line in lines):
        return None
    what = "policy version" if tag.startswith(VERSION) else "update"
    words = {"title": tag, "x": what, "y": f"mean of {window} {what}s" if window > 1 else ""}
    return line_chart(lines, label=tag, box=STANDALONE, standalone=words, labels="names")


def named(paths: Sequence[Path]) -> dict[str, Path]:
    """Runs by their folders' names, with more of the path where two share one."""
    names = [path.name for path in paths]
    return {
        path.name if names.count(path.name) == 1 else "/".join(path.parts[-3:]): path for path in paths
    }  # fmt: skip
