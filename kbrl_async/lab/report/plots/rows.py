"""Rows that share a horizontal axis: Gantt charts, heat maps, timelines, intervals, bars.

A browser lays out the words; only the strips between them are stretched, so text has one size on every screen::

    label      ▇▇▇░░░▇▇▇▇▇░░▇▇▇      value
    label      ░░▇▇▇▇░░░░▇▇░░░░      value
               0      2 min     4
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from kbrl_async.lab.report.markup import Content, Markup, element

UNITS = 1000
"""Width of a strip in its own units."""
ROOMY = 36.0
"""Percent between two labels that do not touch on a phone; closer ones are hidden there."""


class Bar(msgspec.Struct, frozen=True):
    """Part of a row, in percent of its width. Bars of one class are drawn as one path."""

    start: float
    end: float
    class_: str


class Mark(msgspec.Struct, frozen=True):
    """A dot at a place, in percent."""

    at: float
    class_: str


Axis = Sequence[tuple[float, str]]
"""(percent, label)."""


def rows(parts: Sequence[Content], *, label: str, kind: str = "") -> Markup:
    return element("div", *parts, class_=f"rows {kind}".strip(), role="group", aria_label=label)


def row(
    name: Content,
    bars: Sequence[Bar],
    *,
    value: Content = "",
    marks: Sequence[Mark] = (),
    guides: Sequence[float] = (),
    tip: str = "",
    tips: str = "",
    class_: str = "",
) -> Markup:
    """One row. `guides`: places of thin lines behind it. `tip`: shown over all of it; `tips`: see `cells`."""
    strip = element(
        "span", _strip(bars), *map(_guide, guides), *map(_mark, marks), class_="strip", data_cells=tips or None
    )
    return element(
        "div", element("span", name, class_="name"), strip, element("span", value, class_="value"),
        class_=f"row {class_}".strip(), title=tip or None,
    )  # fmt: skip


def axis_row(axis: Axis, note: Content = "") -> Markup:
    """The labels below; those that would touch a neighbour are hidden on narrow screens by page.css."""
    ticks, last = [], -100.0
    for at, words in axis:
        is_close = at - last < ROOMY
        last = last if is_close else at
        class_ = f"{_edge(at)} {'odd' if is_close else ''}".strip()
        ticks.append(element("span", words, style=f"left:{at:.2f}%", class_=class_ or None))
    return element(
        "div", element("span", class_="name"), element("span", *ticks, class_="ticks"),
        element("span", note, class_="value"),
        class_="row axis",
    )  # fmt: skip


def _edge(at: float) -> str:
    return "first" if at < 2 else "last" if at > 97 else ""


def cells(values: Sequence[tuple[float, str] | None], shade: str) -> tuple[list[Bar], str]:
    """Equal parts of a row, each (0 … 1, what it says) or None for nothing there: bars in shades, and their tips."""
    width = 100 / max(1, len(values))
    bars = [
        Bar(i * width, (i + 1) * width, f"{shade} s{level(cell[0])}")
        for i, cell in enumerate(values)
        if cell is not None
    ]
    words = [cell[1] if cell is not None else "" for cell in values]
    return _merged(bars), msgspec.json.encode(words).decode()


def level(share: float) -> int:
    """0 for nothing, 1 … 5 for more and more."""
    return 0 if share <= 0 else min(5, 1 + int(share * 4.999))


def _merged(bars: Sequence[Bar]) -> list[Bar]:
    out: list[Bar] = []
    for bar in bars:
        if out and out[-1].class_ == bar.class_ and abs(out[-1].end - bar.start) < 1e-6:
            out[-1] = Bar(out[-1].start, bar.end, bar.class_)
        else:
            out.append(bar)
    return out


def _strip(bars: Sequence[Bar]) -> Markup:
    paths: dict[str, list[str]] = defaultdict(list)
    for bar in bars:
        start, width = bar.start * UNITS / 100, max(1.5, (bar.end - bar.start) * UNITS / 100)
        paths[bar.class_].append(f"M{start:.1f} 0h{width:.1f}v10h-{width:.1f}z")
    drawn = [element("path", d="".join(path), class_=class_) for class_, path in paths.items()]
    return element("svg", *drawn, viewBox=f"0 0 {UNITS} 10", preserveAspectRatio="none", aria_hidden="true")


def _guide(at: float) -> Markup:
    return element("i", class_="guide", style=f"left:{at:.2f}%")


def _mark(mark: Mark) -> Markup:
    return element("i", class_=f"mark {mark.class_}", style=f"left:{mark.at:.2f}%")


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """(class, words) of what a chart's colours mean."""
    keys = [element("span", element("i", class_=f"key {class_}"), words) for class_, words in entries]
    return element("p", *keys, class_="legend")
