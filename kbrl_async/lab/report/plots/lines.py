"""Lines over time or updates, labelled where they end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.markup import Markup, element
from kbrl_async.lab.report.plots import frame
from kbrl_async.lab.report.plots.frame import COLOURS, INLINE, Box, Format
from kbrl_async.lab.report.plots.points import Points, smooth, thinned
from kbrl_async.lab.report.plots.scales import Scale


class Line(msgspec.Struct, frozen=True):
    """One series. Drawn at most `MOST` points long; `window` > 1 draws the means of so many, over the faint values."""

    name: str
    points: Points
    colour: str = ""
    window: int = 1
    dots: bool = False
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high): a faint area behind the line."""


def line_chart(
    lines: Sequence[Line],
    *,
    label: str,
    x_format: Format = numbers.plain,
    y_format: Format = numbers.plain,
    y_ends: tuple[float, ...] = (0.0,),
    x_ends: tuple[float, ...] = (),
    log: str = "",
    box: Box = INLINE,
    standalone: Mapping[str, str] | None = None,
    labels: str = "values",
    x_ticks: Sequence[float] | None = None,
) -> Markup:
    """`y_ends`, `x_ends`: values that the axes hold in any case. `log`: `x`, `y` or `xy`. Series without points are
    left out. `labels` beside the ends of lines: their names and last `values`, their `names`, or "" for none."""
    if not labels and standalone is None:
        box = msgspec.structs.replace(box, right=14)
    drawn = [_ready(line, number) for number, line in enumerate(line for line in lines if line.points)]
    xs = [x for line, _ in drawn for x, _ in line.points]
    ys = [y for line, faint in drawn for _, y in (*line.points, *faint)]
    ys += [y for line, _ in drawn for _, low, high in line.band for y in (low, high)]
    across = _scale([*xs, *x_ends], box.across, is_log="x" in log, is_x=True)
    if x_ticks is not None:
        across = Scale(
            across.low, across.high, [t for t in x_ticks if across.low <= t <= across.high], *box.across, log="x" in log
        )
    up = _scale([*ys, *(() if "y" in log else y_ends)], box.up, is_log="y" in log, is_x=False)
    parts = frame.axes(box, across, up, x_format, y_format)
    parts += [part for line, faint in drawn for part in _drawn(line, faint, across, up)]
    values = {
        name: f"{name} {y_format(y)}".strip() for name, y in ((line.name, line.points[-1][1]) for line, _ in drawn)
    }
    ends = [
        (up(line.points[-1][1]), values[line.name] if labels == "values" else line.name, line.colour)
        for line, _ in drawn
        if labels
    ]
    tip = _tip(drawn, across, up, x_format, y_format) if standalone is None else ""
    return frame.svg(box, [*parts, *frame.end_labels(box, ends)], label=label, tip=tip, standalone=standalone)


def _ready(line: Line, number: int) -> tuple[Line, Points]:
    """The line as drawn, and the faint values behind it."""
    faint = thinned(line.points) if line.window > 1 else []
    points = thinned(smooth(line.points, line.window) if line.window > 1 else line.points)
    colour = line.colour or COLOURS[number % len(COLOURS)]
    return msgspec.structs.replace(line, points=points, colour=colour), faint


def _scale(values: Sequence[float], ends: tuple[float, float], *, is_log: bool, is_x: bool) -> Scale:
    if is_log:
        return Scale.logarithmic(values, *ends, room=1.3)
    return Scale.linear(values, *ends, steps=5 if is_x else 4, exact=is_x)


def _drawn(line: Line, faint: Points, across: Scale, up: Scale) -> list[Markup]:
    parts = []
    if line.band:
        there = [(across(x), up(high)) for x, _, high in line.band]
        back = [(across(x), up(low)) for x, low, _ in reversed(line.band)]
        parts.append(element("polygon", points=_path([*there, *back]), class_=f"band {line.colour}"))
    if faint:
        path = _path([(across(x), up(y)) for x, y in faint])
        parts.append(element("path", d="M" + path.replace(" ", "L"), class_=f"line faint {line.colour}"))
    places = [(across(x), up(y)) for x, y in line.points]
    parts.append(element("polyline", points=_path(places), class_=f"line {line.colour}"))
    dots = places if line.dots else places[-1:]
    parts += [element("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3, class_=f"dot {line.colour}") for x, y in dots]
    return parts


def _path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _tip(drawn: Sequence[tuple[Line, Points]], across: Scale, up: Scale, x: Format, y: Format) -> str:
    """What a pointer over the chart is told, in words, for page.js."""
    series = [
        {
            "n": line.name,
            "c": line.colour,
            "p": [[round(across(a), 1), round(up(b), 1), x(a), y(b)] for a, b in line.points],
        }
        for line, _ in drawn
    ]
    return msgspec.json.encode(series).decode()
