"""Shares of a whole over time, stacked."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.markup import Markup, element
from kbrl_async.lab.report.plots import frame
from kbrl_async.lab.report.plots.frame import INLINE, Box, Format
from kbrl_async.lab.report.plots.scales import Scale

LEAST_LABELLED = 0.035


def stacked(
    names: Sequence[tuple[str, str]],
    columns: Sequence[tuple[float, Sequence[float]]],
    *,
    label: str,
    x_format: Format,
    box: Box = INLINE,
    x_ticks: Sequence[float] | None = None,
) -> Markup:
    """`names`: (name, colour) from the bottom up. `columns`: (x, values in that order), shown as shares of them."""
    shares = [(x, [v / (sum(values) or 1.0) for v in values]) for x, values in columns]
    across = Scale.linear([x for x, _ in shares], *box.across, exact=True)
    if x_ticks is not None:
        inside = [tick for tick in x_ticks if across.low <= tick <= across.high]
        across = Scale(across.low, across.high, inside, *box.across, log=False)
    up = Scale.linear([0.0, 1.0], *box.up, steps=4)
    below = [0.0] * len(shares)
    areas, ends, tips = [], [], []
    for number, (name, colour) in enumerate(names):
        above = [low + values[number] for low, (_, values) in zip(below, shares, strict=True)]
        if any(values[number] for _, values in shares):
            areas.append(element("polygon", points=_outline(shares, below, above, across, up), class_=f"area {colour}"))
            tips.append({
                "n": name,
                "c": colour,
                "p": [
                    [round(across(x), 1), round(up(top), 1), x_format(x), numbers.percent(values[number])]
                    for top, (x, values) in zip(above, shares, strict=True)
                ],
            })  # fmt: skip
            if shares[-1][1][number] >= LEAST_LABELLED:
                ends.append((up((below[-1] + above[-1]) / 2), name, colour))
        below = above
    parts = [*areas, *frame.axes(box, across, up, x_format, numbers.percent), *frame.end_labels(box, ends)]
    return frame.svg(box, parts, label=label, tip=msgspec.json.encode(tips).decode())


def _outline(
    shares: Sequence[tuple[float, Sequence[float]]], below: list[float], above: list[float], across: Scale, up: Scale
) -> str:
    there = [f"{across(x):.1f},{up(top):.1f}" for (x, _), top in zip(shares, above, strict=True)]
    back = [f"{across(x):.1f},{up(low):.1f}" for (x, _), low in zip(shares, below, strict=True)]
    return " ".join([*there, *reversed(back)])
