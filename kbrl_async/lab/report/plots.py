"""Charts as SVG text, in one look: for the run report, comparisons and the bench. No plotting library.

::

    values ─ scales ─▶ few enough points, pixels ─ lines │ areas │ dots ─▶ '<svg …>'   text inside; standalone files too

To add a kind of chart, write a function that returns `Markup`, made of `element`s only. What is laid out by a browser,
with words of one size on every screen, is in `rows`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.markup import Content, Markup, element
from kbrl_async.lab.report.scales import Points, Scale, apart, smooth, thinned

Format = Callable[[float], str]

COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")
"""Classes of series that have no colour of their own; see theme.css."""
LABEL_HEIGHT = 14.0
LETTER = 7.2
"""Pixels of a letter of a label."""
LEAST_LABELLED = 0.035
"""Share of a stacked area that has room for its name."""
ROW = 46
"""Pixels of one name of a chart of dots."""
APART = 13
"""Pixels between the values of one name."""


class Box(msgspec.Struct, frozen=True):
    """A chart's size and margins in pixels."""

    width: int = 400
    height: int = 220
    left: int = 46
    right: int = 104
    top: int = 12
    bottom: int = 26

    @property
    def across(self) -> tuple[float, float]:
        return float(self.left), float(self.width - self.right)

    @property
    def up(self) -> tuple[float, float]:
        return float(self.height - self.bottom), float(self.top)


INLINE = Box()
STANDALONE = Box(720, 400, 62, 150, 62, 48)


def fitted(box: Box, words: Sequence[str], empty: float = 0.0) -> Box:
    """With as much room on the right as the longest label needs, so that the chart has the rest; files keep theirs.

    :param empty: share of the axis behind the last point, where labels find room, too.
    """
    if box is not INLINE:
        return box
    needs = min(box.right, 16 + LETTER * max(map(len, words), default=-1))
    whole = box.width - box.left
    return msgspec.structs.replace(box, right=round(max(12.0, (needs - empty * whole) / (1 - empty))))


def text(x: float, y: float, content: Content, class_: str) -> Markup:
    return element("text", content, x=f"{x:.1f}", y=f"{y:.1f}", class_=class_)


def axes(box: Box, across: Scale, up: Scale, x_format: Format, y_format: Format) -> list[Markup]:
    """Lines across at the ticks of `up`, a base line, and the labels of both."""
    left, right = box.across
    grid, labels = [], []
    for value in up.ticks():
        y = up(value)
        grid.append(f"M{left:.0f} {y:.1f}H{right:.0f}")
        labels.append(text(left - 7, y + 4, y_format(value), "tick end"))
    shown = _roomy(across, x_format)
    labels += [text(across(value), box.up[0] + 18, x_format(value), "tick mid") for value in shown]
    base = element("path", d=f"M{left:.0f} {box.up[0]:.1f}H{right:.0f}", class_="base")
    return [element("path", d="".join(grid), class_="grid"), base, *labels]


def _roomy(across: Scale, shown: Format) -> list[float]:
    """Every tick, or every second or third of them where their labels would touch."""
    ticks = across.ticks()
    for step in range(1, len(ticks) + 1):
        kept = ticks[::step]
        widths = [7.0 * len(shown(tick)) + 6 for tick in kept]
        gaps = [across(b) - across(a) for a, b in itertools.pairwise(kept)]
        if all(gap >= (a + b) / 2 for gap, (a, b) in zip(gaps, itertools.pairwise(widths), strict=True)):
            return kept
    return ticks[:1]


def end_labels(box: Box, ends: Sequence[tuple[float, str, str]], at: float) -> list[Markup]:
    """(height, words, class) beside the ends of series, which are at `at`; moved apart where they would overlap."""
    bottom, top = box.up
    places = apart([y for y, _, _ in ends], LABEL_HEIGHT, top + 4, bottom)
    limit = max(6, int((box.width - at - 8) / LETTER))
    return [
        text(at + 8, y + 4, words if len(words) <= limit else words[: limit - 1] + "…", f"direct {c}")
        for y, (_, words, c) in zip(places, ends, strict=True)
    ]


def svg(
    box: Box,
    parts: Sequence[Content],
    *,
    label: str,
    tip: Sequence[Any] = (),
    standalone: Mapping[str, str] | None = None,
) -> Markup:
    """The document. `standalone`: `title`, and `x` and `y` that name the axes, for a file of its own."""
    if standalone is None:
        inside, extra = list(parts), {}
    else:
        inside, extra = [*_head(box, standalone), *parts], {"xmlns": "http://www.w3.org/2000/svg"}
    return element(
        "svg", *inside, **extra, viewBox=f"0 0 {box.width} {box.height}", role="img", aria_label=label, class_="chart",
        data_tip=msgspec.json.encode(tip).decode() if tip else None,
    )  # fmt: skip


def _head(box: Box, words: Mapping[str, str]) -> list[Markup]:
    left, right = box.across
    return [
        element("style", theme()),
        element("rect", width=box.width, height=box.height, class_="paper"),
        text(left, 26, words.get("title", ""), "headline"),
        text(left, 46, words.get("y", ""), "tick"),
        text((left + right) / 2, box.height - 8, words.get("x", ""), "tick mid"),
    ]


def theme() -> Markup:
    """The colours and lines of every chart, light and dark."""
    return Markup(files("kbrl_async.lab.report").joinpath("theme.css").read_text(encoding="utf-8"))


# ── lines over time or updates, labelled where they end ──────────────────────────────────────────────────────────────


class Series(msgspec.Struct, frozen=True):
    """One series. Drawn at most `MOST` points long; `window` > 1 draws the means of so many, over the faint values."""

    name: str
    points: Points
    colour: str = ""
    window: int = 1
    dots: bool = False
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high): a faint area behind the line."""
    whiskers: Sequence[tuple[float, float, float]] = ()
    """(x, low, high): a thin line at the point."""


def line_chart(
    lines: Sequence[Series],
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
    guides: Sequence[float] = (),
) -> Markup:
    """`y_ends`, `x_ends`: values that the axes hold in any case. `log`: `x`, `y` or `xy`. Series without points are
    left out. `labels` beside the ends of lines: their names and last `values`, their `names`, or "" for none.
    `guides`: moments on the axis that a thin line marks."""
    drawn = [_ready(line, number) for number, line in enumerate(line for line in lines if line.points)]
    ended = [_ending(line, y_format, labels) for line, _ in drawn]
    xs = [x for line, _ in drawn for x, _ in line.points]
    box = fitted(box, ended, _empty(xs, x_ends))
    ys = [y for line, faint in drawn for _, y in (*line.points, *faint)]
    ys += [y for line, _ in drawn for _, low, high in (*line.band, *line.whiskers) for y in (low, high)]
    across = _scale([*xs, *x_ends], box.across, is_log="x" in log, is_x=True).marked(x_ticks)
    up = _scale([*ys, *(() if "y" in log else y_ends)], box.up, is_log="y" in log, is_x=False)
    marks = "".join(f"M{across(x):.1f} {box.up[0]:.0f}V{box.top}" for x in guides)
    parts = [element("path", d=marks, class_="guide")] if marks else []
    parts += axes(box, across, up, x_format, y_format)
    parts += [part for line, faint in drawn for part in _drawn(line, faint, across, up)]
    ends = [
        (up(line.points[-1][1]), words, line.colour) for (line, _), words in zip(drawn, ended, strict=True) if words
    ]
    told = [
        _tooltip(line.name, line.colour, ((across(x), up(y), x_format(x), y_format(y)) for x, y in line.points))
        for line, _ in drawn
        if standalone is None
    ]
    last = across(max(xs, default=across.high))
    return svg(box, [*parts, *end_labels(box, ends, last)], label=label, tip=told, standalone=standalone)


def _empty(xs: Sequence[float], ends: Sequence[float]) -> float:
    """Share of an axis behind the last point."""
    low, high = min([*xs, *ends], default=0.0), max([*xs, *ends], default=0.0)
    return min(0.9, (high - max(xs)) / (high - low)) if xs and high > low else 0.0


def _ending(line: Series, shown: Format, labels: str) -> str:
    """What stands beside its last point."""
    return f"{line.name} {shown(line.points[-1][1])}".strip() if labels == "values" else line.name if labels else ""


def _ready(line: Series, number: int) -> tuple[Series, Points]:
    """The line as drawn, and the faint values behind it."""
    faint = thinned(line.points) if line.window > 1 else []
    points = thinned(smooth(line.points, line.window) if line.window > 1 else line.points)
    colour = line.colour or COLOURS[number % len(COLOURS)]
    return msgspec.structs.replace(line, points=points, colour=colour), faint


def _scale(values: Sequence[float], ends: tuple[float, float], *, is_log: bool, is_x: bool) -> Scale:
    if is_log:
        return Scale.logarithmic(values, *ends, room=1.3)
    return Scale.linear(values, *ends, steps=5 if is_x else 4, exact=is_x)


def _drawn(line: Series, faint: Points, across: Scale, up: Scale) -> list[Markup]:
    parts = []
    if line.band:
        there = [(across(x), up(high)) for x, _, high in line.band]
        back = [(across(x), up(low)) for x, low, _ in reversed(line.band)]
        parts.append(element("polygon", points=_path([*there, *back]), class_=f"band {line.colour}"))
    if faint:
        path = _path([(across(x), up(y)) for x, y in faint])
        parts.append(element("path", d="M" + path.replace(" ", "L"), class_=f"line faint {line.colour}"))
    if line.whiskers:
        reach = "".join(f"M{across(x):.1f} {up(low):.1f}V{up(high):.1f}" for x, low, high in line.whiskers)
        parts.append(element("path", d=reach, class_=f"whisker {line.colour}"))
    places = [(across(x), up(y)) for x, y in line.points]
    parts.append(element("polyline", points=_path(places), class_=f"line {line.colour}"))
    dots = places if line.dots else places[-1:]
    parts += [element("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3, class_=f"dot {line.colour}") for x, y in dots]
    return parts


def _path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _tooltip(name: str, colour: str, points: Iterable[tuple[float, float, str, str]]) -> dict[str, Any]:
    """What a pointer over a series is told, in words, for page.js."""
    return {"n": name, "c": colour, "p": [[round(x, 1), round(y, 1), *words] for x, y, *words in points]}


# ── shares of a whole over time, stacked ─────────────────────────────────────────────────────────────────────────────


def stacked(
    names: Sequence[tuple[str, str]],
    columns: Sequence[tuple[float, Sequence[float]]],
    *,
    label: str,
    x_format: Format,
    x_ends: tuple[float, ...] = (),
    x_ticks: Sequence[float] | None = None,
) -> Markup:
    """`names`: (name, colour) from the bottom up. `columns`: (x, values in that order), shown as shares of them."""
    shares = [(x, [v / (sum(values) or 1.0) for v in values]) for x, values in columns]
    xs = [x for x, _ in shares]
    labelled = [name for i, (name, _) in enumerate(names) if shares[-1][1][i] >= LEAST_LABELLED]
    box = fitted(INLINE, labelled, _empty(xs, x_ends))
    across = Scale.linear([*xs, *x_ends], *box.across, exact=True).marked(x_ticks)
    up = Scale.linear([0.0, 1.0], *box.up, steps=4)
    below = [0.0] * len(shares)
    areas, ends, tips = [], [], []
    for number, (name, colour) in enumerate(names):
        above = [low + values[number] for low, (_, values) in zip(below, shares, strict=True)]
        if any(values[number] for _, values in shares):
            sides = [[(across(x), up(y)) for (x, _), y in zip(shares, side, strict=True)] for side in (above, below)]
            areas.append(element("polygon", points=_path([*sides[0], *reversed(sides[1])]), class_=f"area {colour}"))
            words = ((x_format(x), numbers.percent(values[number])) for x, values in shares)
            tips.append(_tooltip(name, colour, ((*place, *said) for place, said in zip(sides[0], words, strict=True))))
            if shares[-1][1][number] >= LEAST_LABELLED:
                ends.append((up((below[-1] + above[-1]) / 2), name, colour))
        below = above
    parts = [*areas, *axes(box, across, up, x_format, numbers.percent), *end_labels(box, ends, across(xs[-1]))]
    return svg(box, parts, label=label, tip=tips)


# ── values with their intervals, one row a name: what comparisons of arms are drawn as ───────────────────────────────


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
        parts.append(text(box.left - 10, middle + 4, name, "tick end"))
        for number, dot in enumerate(dots):
            if dot is not None:
                parts += _dot(dot, middle + APART * (number - (len(dots) - 1) / 2), across, COLOURS[number], x_format)
    names = [(box.top + 14.0 * number, name, COLOURS[number]) for number, name in enumerate(series)]
    return svg(box, [*parts, *end_labels(box, names, box.across[1])], label=label, standalone=standalone)


def _grid(box: Box, across: Scale, x_format: Format) -> list[Markup]:
    bottom, top = box.up
    lines = "".join(f"M{across(tick):.1f} {top:.0f}V{bottom:.0f}" for tick in across.ticks())
    labels = [text(across(tick), bottom + 18, x_format(tick), "tick mid") for tick in across.ticks()]
    zero = element("path", d=f"M{across(0.0):.1f} {top:.0f}V{bottom:.0f}", class_="base")
    return [element("path", d=lines, class_="grid"), zero, *labels]


def _dot(dot: Dot, y: float, across: Scale, colour: str, x_format: Format) -> list[Markup]:
    span = f"M{across(dot.low):.1f} {y:.1f}H{across(dot.high):.1f}"
    title = element("title", f"{x_format(dot.value)} ({x_format(dot.low)} … {x_format(dot.high)})")
    return [
        element("path", d=span, class_=f"line {colour}"),
        element("circle", title, cx=f"{across(dot.value):.1f}", cy=f"{y:.1f}", r=4, class_=f"dot {colour}"),
    ]
