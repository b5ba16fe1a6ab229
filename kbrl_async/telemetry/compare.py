"""Runs side by side: their summaries as one table, and a metric of each over its updates as one chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from kbrl_async.telemetry import summary
from kbrl_async.telemetry.plots import line_chart, smoothed

ROWS = (
    "updates",
    "rollouts",
    "wall_s",
    "updates_per_hour",
    "reward_mean_first",
    "reward_mean_last",
    "compile_rate_last",
    "correct_rate_first",
    "correct_rate_last",
    "success_rate_last",
    "fast_1_last",
    "speedup_mean_last",
    "heldout_correct_rate_before",
    "heldout_correct_rate_after",
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
    for field in ROWS:
        values = [run.get(field) for run in runs.values()]
        if any(value is not None for value in values):
            made.add_row(field, *map(shown, values))
    return made


def shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def curve(run: Path, tag: str) -> list[tuple[float, float]]:
    """(update, value) of a TensorBoard tag of a run; empty where it was not written."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard" / "training"), size_guidance={"scalars": 0})
    events.Reload()
    if tag not in events.Tags()["scalars"]:
        return []
    return [(float(event.step), float(event.value)) for event in events.Scalars(tag)]


def chart(runs: Mapping[str, Path], tag: str, window: int = 3) -> str:
    """SVG of a tag over the updates of each run, smoothed over `window` of them."""
    series = {}
    for name, path in runs.items():
        points = curve(path, tag)
        values = smoothed([value for _, value in points], window)
        series[name] = [(step, value) for (step, _), value in zip(points, values, strict=True)]
    return line_chart(series, title=tag, x="update", y=f"mean of {window} updates")


def summaries(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """`summary.json` of each run by the run's name."""
    return {path.name: summary.read(path / "summary.json") for path in paths}
