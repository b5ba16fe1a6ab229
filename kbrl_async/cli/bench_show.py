"""A report of the bench as a table and as a plot."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from kbrl_async.kernels.timing.resolution import Report, Row
from kbrl_async.lab.report.plots import STANDALONE, Line, line_chart


def show(report: Report, console: Console) -> None:
    if report.rows:
        console.print(_table("A/A: a reference against itself", report.rows))
        runs = sum(row.runs for row in report.rows)
        console.print(f"speedups claimed that are not there: {100 * report.false_faster:.2f} % of {runs}")
    if any(row.methods for row in report.rows):
        console.print(_others(report.rows))
    if report.truths:
        console.print(_table("A/B: the same, slowed by a known amount", report.truths))
    clocks = report.clocks
    if clocks:
        console.print(f"clock {clocks['min']:.0f} … {clocks['median']:.0f} … {clocks['max']:.0f} MHz", end="; ")
    console.print(f"throttled: {', '.join(report.throttle) or 'never'}; load by others {report.load:.2f}", markup=False)


def _table(title: str, rows: list[Row]) -> Table:
    """`±`: what no sampling removes, by which intervals are widened; `inside`: how often the truth was."""
    table = Table(title=title, title_justify="left", padding=(0, 0))
    table.add_column("kernel", no_wrap=True)
    for heading in ("ms", "runs", "± %", "false + %", "false − %", "inside %", "worst %", "pairs", "s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        shares = (row.share, row.false_faster, row.false_slower, row.covered, row.worst_error)
        numbers = (f"{100 * share:.2f}" for share in shares)
        table.add_row(row.case, f"{row.ms:.4f}", str(row.runs), *numbers, f"{row.median_n:.0f}", f"{row.seconds:.3f}")
    return table


def _others(rows: list[Row]) -> Table:
    names = sorted({name for row in rows for name in row.methods})
    table = Table(title="worst error of other methods on the same, in %", title_justify="left", padding=(0, 0))
    table.add_column("kernel", no_wrap=True)
    for name in ("this bench", *names):
        table.add_column(name, justify="right")
    for row in rows:
        found = (row.worst_error, *(row.methods.get(name) for name in names))
        table.add_row(row.case, *("" if value is None else f"{100 * value:.2f}" for value in found))
    return table


def plot(report: Report, path: Path) -> None:
    """Worst error and resolution by kernel length, both axes logarithmic; other methods beside them."""
    path.write_text(svg(report))


def svg(report: Report) -> str:
    rows = sorted(report.rows, key=lambda row: row.ms)
    errors = {"this bench, worst": [row.worst_error for row in rows], "its resolution": [row.share for row in rows]}
    for name in sorted({name for row in rows for name in row.methods}):
        errors[name] = [row.methods.get(name, 0.0) for row in rows]
    lines = [
        Line(name, [(row.ms, value) for row, value in zip(rows, values, strict=True) if value > 0], dots=True)
        for name, values in errors.items()
    ]
    return line_chart(
        lines,
        label="error by kernel length",
        x_format=lambda ms: f"{ms:.3g} ms",
        y_format=lambda share: f"{100 * share:.3g} %",
        x_ticks=[row.ms for row in rows],
        log="xy",
        labels="names",
        box=STANDALONE,
        standalone={
            "title": f"A/A error by kernel length on {report.hardware}",
            "x": "length of the kernel",
            "y": "error of a speedup",
        },
    )
