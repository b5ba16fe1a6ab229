"""Runs side by side: their summaries as one table, and metrics of each by policy version or update as charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from kbrl_async.errors import UserError
from kbrl_async.evaluation.proportions import KEY
from kbrl_async.lab.report.journal import FILE as JOURNAL_FILE
from kbrl_async.lab.report.journal import read_journal
from kbrl_async.lab.report.markup import Markup
from kbrl_async.lab.report.plots import STANDALONE, Line, line_chart
from kbrl_async.runs import summary
from kbrl_async.runs.telemetry.by_version import FIELDS, Part, points, settled
from kbrl_async.runs.telemetry.training_metrics import turn_scalars

VERSION = "version/"
"""Begins the tags of curves by policy version, which are read from a run's journal."""
MOST_POINTS, LEAST_A_POINT = 160, 16
SOLVED = "success_rate"
"""Rollouts of several turns with a correct one."""

_FIGURES = ("reward_mean", "compile_rate", "correct_rate", "success_rate", "fast_1", "fast_1_proven", "speedup_mean")
_HELDOUT = ("compile_rate", "correct_rate", "fast_1", "fast_1_proven", "speedup_mean")
ROWS = (
    *("method", "preset", "seed", "updates", "rollouts", "lessons", "wall_s", "updates_per_hour"),
    *(f"{what}_{end}" for what in ("versions", "answers", *_FIGURES) for end in ("first", "last")),
    *(f"heldout_{what}_{when}" for what in _HELDOUT for when in ("before", "after")),
    "max_staleness",
)
"""Fields of `summary.json` that are shown; those that no run has are left out."""


def table(runs: Mapping[str, Mapping[str, Any]]) -> Table:
    """One column a run, the best of each row not marked: what is better depends on the question."""
    made = Table(title="Runs compared", title_justify="left")
    made.add_column("")
    for name in runs:
        made.add_column(name, justify="right")
    for field, values in rows(runs):
        made.add_row(field, *values)
    return made


def rows(runs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """(field, what a run says of it, with its interval) of the fields that any run has."""
    known = [summary.by_versions(run) for run in runs.values()]
    there = [field for field in ROWS if any(_field(run, field) is not None for run in known)]
    return [(field, [_said(run, field) for run in known]) for field in there]


def told(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of each run: which answers its first and last figures are of."""
    return [f"{name}: {summary.told(run)}" for name, run in runs.items() if run.get("rollouts", 1)]


def _said(run: Mapping[str, Any], field: str) -> str:
    interval = run.get(f"{field}{KEY}")
    return shown(_field(run, field)) + (f" ({shown(interval[0])} … {shown(interval[1])})" if interval else "")


def _field(run: Mapping[str, Any], field: str) -> Any:
    """Of the summary, or of what it says of the demonstrations (`lessons`)."""
    return run.get(field, run.get("demonstrations", {}).get(field))


def shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):  # the first and the last of some versions
        return "–".join(str(v) for v in dict.fromkeys(value))
    return f"{value:.3f}" if isinstance(value, float) else str(value)


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


def _values(part: Part) -> dict[str, float]:
    values = {name: figure.value for name, figure in part.figures().items()}
    has_turns = any(stats.turn for stats in part.stats)
    return values | ({SOLVED: turn_scalars(part.stats)["trajectory/success_rate"]} if has_turns else {})


def curve(run: Path, tag: str) -> list[tuple[float, float]]:
    """Of one tag: of a policy version's answers (`version/…`), or of an update as TensorBoard has it."""
    return version_curves(run).get(tag, []) if tag.startswith(VERSION) else curves(run, [tag])[tag]


def without(runs: Mapping[str, Path], tag: str) -> list[str]:
    """Runs that have no values of this tag: method=sft has no rollouts, and so no rewards."""
    return [name for name, path in runs.items() if not curve(path, tag)]


def chart(runs: Mapping[str, Path], tag: str, window: int = 3) -> Markup | None:
    """SVG of a tag by version or update of each run, smoothed over `window` of them; None where no run has it."""
    lines = [Line(name, curve(path, tag), window=window) for name, path in runs.items()]
    if not any(line.points for line in lines):
        return None
    what = "policy version" if tag.startswith(VERSION) else "update"
    words = {"title": tag, "x": what, "y": f"mean of {window} {what}s" if window > 1 else ""}
    return line_chart(lines, label=tag, box=STANDALONE, standalone=words, labels="names")


def summaries(paths: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """`summary.json` of each run by the run's name.

    :raises UserError: one can't be read.
    """
    found = {}
    for name, path in paths.items():
        try:
            found[name] = summary.read(path / "summary.json")
        except (OSError, msgspec.MsgspecError) as error:
            raise UserError(f"{path / 'summary.json'} can't be read: {error}", "Restore it from a copy") from None
    return found


def named(paths: Sequence[Path]) -> dict[str, Path]:
    """Runs by their folders' names, with more of the path where two share one."""
    names = [path.name for path in paths]
    return {
        path.name if names.count(path.name) == 1 else "/".join(path.parts[-3:]): path for path in paths
    }  # fmt: skip
