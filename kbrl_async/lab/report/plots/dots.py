"""Values with their intervals, one row a name: what comparisons of arms are drawn as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.markup import Markup, element
from kbrl_async.lab.report.plots import frame
from kbrl_async.lab.report.plots.frame import COLOURS, Box, Format
from kbrl_async.lab.report.plots.scales import Scale

ROW = 46
"""Pixels of one name."""
APART = 13
"""Pixels between the values of one name."""


class Dot(msgspec.Struct, frozen=True):
    """One value and the ends of its interval."""

    value: float
    low: float
    high: float


def dot_chart(
    rows: Mapping[str, Sequence[Dot | None]],
    series: Sequence[str],
    *,
    label: str,
    standalone: Mapping[str, str],
    x_format: Format = numbers.percent,
    width: int = 720,
) -> Markup:
    """`rows`: for each name a value of each of `series`, None where there is none. The axis holds 0."""
    box = Box(width, 110 + ROW * len(rows), 150, 120, 70, 48)
    ends = [end for dots in rows.values() for dot in dots if dot for end in (dot.low, dot.high)]
    across = Scale.linear([0.0, *ends], *box.across)
    parts = _grid(box, across, x_format)
    for place, (name, dots) in enumerate(rows.items()):
        middle = box.top + ROW * (place + 0.5)
        parts.append(frame.text(box.left - 10, middle + 4, name, "tick end"))
        for number, dot in enumerate(dots):
            if dot is not None:
                parts += _dot(dot, middle + APART * (number - (len(dots) - 1) / 2), across, COLOURS[number], x_format)
    names = [(box.top + 14.0 * number, name, COLOURS[number]) for number, name in enumerate(series)]
    return frame.svg(box, [*parts, *frame.end_labels(box, names)], label=label, standalone=standalone)


def _grid(box: Box, across: Scale, x_format: Format) -> list[Markup]:
    bottom, top = box.up
    lines = "".join(f"M{across(tick):.1f} {top:.0f}V{bottom:.0f}" for tick in across.ticks())
    labels = [frame.text(across(tick), bottom + 18, x_format(tick), "tick mid") for tick in across.ticks()]
    zero = element("path", d=f"M{across(0.0):.1f} {top:.0f}V{bottom:.0f}", class_="base")
    return [element("path", d=lines, class_="grid"), zero, *labels]


def _dot(dot: Dot, y: float, across: Scale, colour: str, x_format: Format) -> list[Markup]:
    span = f"M{across(dot.low):.1f} {y:.1f}H{across(dot.high):.1f}"
    title = element("title", f"{x_format(dot.value)} ({x_format(dot.low)} … {x_format(dot.high)})")
    return [
        element("path", d=span, class_=f"line {colour}"),
        element("circle", title, cx=f"{across(dot.value):.1f}", cy=f"{y:.1f}", r=4, class_=f"dot {colour}"),
    ]
