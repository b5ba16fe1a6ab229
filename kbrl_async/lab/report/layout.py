"""What sections are laid out with: figures, tables, views, and rows that share a horizontal axis. Pure.

A browser lays out the words of rows (Gantt charts, heat maps, timelines, intervals, bars); only the strips between them
are stretched, so text has one size on every screen::

    label      ▇▇▇░░░▇▇▇▇▇░░▇▇▇      value
    label      ░░▇▇▇▇░░░░▇▇░░░░      value
               0      2 min     4
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.markup import Content, Markup, element, join
from kbrl_async.lab.report.model import RunData
from kbrl_async.lab.report.scales import time_label, time_ticks


def section(key: str, title: str, intro: Content, *parts: Content) -> Markup:
    """One part of the page; nothing where it has no parts."""
    if not any(parts):
        return Markup("")
    return element("section", element("h2", title), element("p", intro, class_="intro"), *parts, id=key)


def figure(title: str, note: Content, *body: Content, class_: str = "") -> Markup:
    """A chart with its caption above it."""
    words = element("small", note) if note else ""
    return element("figure", element("figcaption", element("b", title), " ", words), *body, class_=class_ or None)


def grid(figures: Sequence[Markup], class_: str = "grid") -> Markup:
    """Charts beside each other, as many as fit; `grid two`: wider ones."""
    there = [made for made in figures if made]
    return element("div", *there, class_=class_) if there else Markup("")


def choice(group: str, options: Sequence[tuple[str, Markup]]) -> Markup:
    """One of several views, chosen without a script: radio buttons and what follows them."""
    buttons = [
        element("input", type="radio", name=group, id=f"{group}-{i}", class_=f"pick p{i}", checked=i == 0)
        + element("label", name, for_=f"{group}-{i}")
        for i, (name, _) in enumerate(options)
    ]
    views = [element("div", view, class_=f"view v{i}") for i, (_, view) in enumerate(options)]
    return element("div", join(buttons), *views, class_="choice")


def data_table(lines: Iterable[Markup], head: Content = "", *, class_: str = "scroll", kind: str = "") -> Markup:
    """`lines` and `head`: rows as elements."""
    top = element("thead", head) if head else ""
    return element("div", element("table", top, element("tbody", *lines), class_=kind or None), class_=class_)


class ShareInterval(NamedTuple):
    """A share and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def two_shares(
    name: Content, before: ShareInterval | None, after: ShareInterval | None, colour: str, tip: str
) -> Markup:
    """A row: the share of one time above that of another, each a dot on its interval. `colour`: of the second."""
    times = [(share, lane, of) for share, lane, of in ((before, 2.5, "none"), (after, 7.5, colour)) if share]
    bars = [Bar(100 * share.low, 100 * share.high, f"{of} s3", (lane - 1, lane + 1)) for share, lane, of in times]
    marks = [Mark(100 * share.value, of if lane > 5 else f"{of} open", lane) for share, lane, of in times]
    return row(name, bars, marks=marks, value=numbers.percent(after.value if after else None), tip=tip, class_="two")


def time_axis(run: RunData) -> Axis:
    """Round moments of the run, in percent of its time."""
    return [(100 * tick / (run.duration or 1.0), time_label(tick)) for tick in time_ticks(run.duration)]


class VersionAxis(NamedTuple):
    """The axis of every chart by policy version, from the first one to the newest; an update stands at the version that
    it made."""

    last: int

    @property
    def ends(self) -> tuple[float, float]:
        return 0.0, float(self.last)

    def ticks(self, most: int = 6) -> list[float]:
        """Whole versions."""
        return [float(v) for v in range(0, self.last + 1, max(1, -(-self.last // most)))]


def version_axis(run: RunData) -> VersionAxis:
    """The same for all charts of a run."""
    made = [update.version for update in run.updates]
    wrote = [answer.stats.policy_version for answer in run.answers.listed]
    return VersionAxis(max([1, *made, *wrote]))


def place(run: RunData, moment: float) -> float:
    return min(100.0, max(0.0, 100 * moment / (run.duration or 1.0)))


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


UNITS = 1000
"""Width of a strip in its own units."""
ROOMY = 36.0
"""Percent between two labels that do not touch on a phone; closer ones are hidden there."""


class Bar(msgspec.Struct, frozen=True):
    """Part of a row, in percent of its width. Bars of one class are drawn as one path."""

    start: float
    end: float
    class_: str
    lane: tuple[float, float] = (0.0, 10.0)
    """From where to where it reaches down the row, of 10."""


class Mark(msgspec.Struct, frozen=True):
    """A dot at a place, in percent."""

    at: float
    class_: str
    lane: float = 5.0
    """How far down the row it is, of 10."""


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
            out[-1] = Bar(out[-1].start, bar.end, bar.class_, bar.lane)
        else:
            out.append(bar)
    return out


def _strip(bars: Sequence[Bar]) -> Markup:
    paths: dict[str, list[str]] = defaultdict(list)
    for bar in bars:
        start, width = bar.start * UNITS / 100, max(1.5, (bar.end - bar.start) * UNITS / 100)
        top, height = bar.lane[0], bar.lane[1] - bar.lane[0]
        paths[bar.class_].append(f"M{start:.1f} {top:g}h{width:.1f}v{height:g}h-{width:.1f}z")
    drawn = [element("path", d="".join(path), class_=class_) for class_, path in paths.items()]
    return element("svg", *drawn, viewBox=f"0 0 {UNITS} 10", preserveAspectRatio="none", aria_hidden="true")


def _guide(at: float) -> Markup:
    return element("i", class_="guide", style=f"left:{at:.2f}%")


def _mark(mark: Mark) -> Markup:
    return element("i", class_=f"mark {mark.class_}", style=f"left:{mark.at:.2f}%;top:{10 * mark.lane:g}%")


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """(class, words) of what a chart's colours mean."""
    keys = [element("span", element("i", class_=f"key {class_}"), words) for class_, words in entries]
    return element("p", *keys, class_="legend")
