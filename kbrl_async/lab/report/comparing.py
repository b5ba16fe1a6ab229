"""Runs side by side: their summaries as one table, and metrics of each over its updates as charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from kbrl_async.errors import UserError
from kbrl_async.lab.report.markup import Markup
from kbrl_async.lab.report.plots import STANDALONE, Line, line_chart
from kbrl_async.runs import summary

ROWS = (
    "method",
    "preset",
    "seed",
    "updates",
    "rollouts",
    "lessons",
    "wall_s",
    "updates_per_hour",
    "reward_mean_first",
    "reward_mean_last",
    "compile_rate_last",
    "correct_rate_first",
    "correct_rate_last",
    "success_rate_last",
    "fast_1_last",
    "speedup_mean_first",
    "speedup_mean_last",
    "heldout_compile_rate_before",
    "heldout_compile_rate_after",
    "heldout_correct_rate_before",
    "heldout_correct_rate_after",
    "heldout_fast_1_before",
    "heldout_fast_1_after",
    "heldout_speedup_mean_before",
    "heldout_speedup_mean_after",
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
        made.add_row(field, *map(shown, values))
    return made


def rows(runs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """(field, a value a run) of the fields that any run has."""
    found = [(field, [_field(run, field) for run in runs.values()]) for field in ROWS]
    return [(field, values) for field, values in found if any(value is not None for value in values)]


def _field(run: Mapping[str, Any], field: str) -> Any:
    """Of the summary, or of what it says of the demonstrations (`lessons`)."""
    return run.get(field, run.get("demonstrations", {}).get(field))


def shown(value: Any) -> str:
    if value is None:
        return "–"
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


def curve(run: Path, tag: str) -> list[tuple[float, float]]:
    """Of one tag."""
    return curves(run, [tag])[tag]


def without(runs: Mapping[str, Path], tag: str) -> list[str]:
    """Runs that have no values of this tag: method=sft has no rollouts, and so no rewards."""
    return [name for name, path in runs.items() if not curve(path, tag)]


def chart(runs: Mapping[str, Path], tag: str, window: int = 3) -> Markup | None:
    """SVG of a tag over the updates of each run, smoothed over `window` of them; None where no run has it."""
    lines = [Line(name, curve(path, tag), window=window) for name, path in runs.items()]
    if not any(line.points for line in lines):
        return None
    words = {"title": tag, "x": "update", "y": f"mean of {window} updates" if window > 1 else ""}
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
