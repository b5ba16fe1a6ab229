"""A report of the bench as a table and as a plot: plain SVG, as nothing else here needs a plotting library."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kbrl_async.timing.resolution import Report, Row

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 400, 70, 60, 40
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2")


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
    rows = report.rows
    lines = {"this bench, worst": [row.worst_error for row in rows], "its resolution": [row.share for row in rows]}
    for name in sorted({name for row in rows for name in row.methods}):
        lines[name] = [row.methods.get(name, math.nan) for row in rows]
    shown = [value for values in lines.values() for value in values if value > 0]
    if not rows or not shown:
        return _document(report.hardware, "")
    x = _scale([row.ms for row in rows], _LEFT, _WIDTH - 20)
    y = _scale(shown, _HEIGHT - _BOTTOM, _TOP)
    parts = [_axis(rows, x), _grid(shown, y)]
    for number, (name, values) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [(x(row.ms), y(value)) for row, value in zip(rows, values, strict=True) if value > 0]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        dots = "".join(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>{dots}')
        parts.append(
            f'<text x="{_LEFT + 10 + 160 * (number % 4)}" y="{_HEIGHT - 22 + 14 * (number // 4)}" fill="{colour}">'
            f"{html.escape(name)}</text>"
        )
    return _document(f"A/A error by kernel length on {report.hardware}", "\n".join(parts))


def _scale(values: list[float], start: float, end: float) -> Callable[[float], float]:
    """From a value to its place between two pixels, by the logarithm."""
    low, high = math.log(min(values) / 1.3), math.log(max(values) * 1.3)
    return lambda value: start + (math.log(value) - low) / (high - low) * (end - start)


def _axis(rows: list[Row], x: Callable[[float], float]) -> str:
    """Each kernel's length below its points."""
    base = _HEIGHT - _BOTTOM
    ticks = "".join(
        f'<line x1="{x(row.ms):.1f}" y1="{base}" x2="{x(row.ms):.1f}" y2="{base + 4}" stroke="black"/>'
        f'<text x="{x(row.ms):.1f}" y="{base + 16}" text-anchor="middle">{row.ms:.3g} ms</text>'
        for row in rows
    )
    return f'<line x1="{_LEFT}" y1="{base}" x2="{_WIDTH - 20}" y2="{base}" stroke="black"/>{ticks}'


def _grid(shown: list[float], y: Callable[[float], float]) -> str:
    """A line for each power of ten among the values, and for the smallest and largest."""
    low, high = math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown)))
    marks = [mark for power in range(low, high + 1) for mark in (10.0**power, 3 * 10.0**power)]
    return "".join(
        f'<line x1="{_LEFT}" y1="{y(mark):.1f}" x2="{_WIDTH - 20}" y2="{y(mark):.1f}" stroke="#ddd"/>'
        f'<text x="{_LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{100 * mark:.3g} %</text>'
        for mark in marks
        if min(shown) / 1.3 <= mark <= max(shown) * 1.3
    )


def _document(title: str, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{_LEFT}" y="20" font-size="14">{html.escape(title)}</text>\n{body}\n</svg>\n'
    )
