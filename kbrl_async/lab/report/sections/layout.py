"""What every section is laid out with. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kbrl_async.lab.report.markup import Content, Markup, element, join
from kbrl_async.lab.report.model import RunData
from kbrl_async.lab.report.plots import Axis, time_label, time_ticks
from kbrl_async.runs.telemetry.by_version import Part


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


def time_axis(run: RunData, start: float = 0.0) -> Axis:
    """Round moments of the run from `start` on, in percent of that time."""
    length = run.duration - start or 1.0
    return [(100 * (tick - start) / length, time_label(tick)) for tick in time_ticks(run.duration, 8, start)]


def version_ticks(parts: Sequence[Part], most: int = 5) -> list[float]:
    """Whole versions on an axis."""
    if not parts:
        return []
    first, last = parts[0].first, parts[-1].last
    return [float(v) for v in range(first, last + 1, max(1, -(-(last - first) // most)))]


def place(run: RunData, moment: float) -> float:
    return min(100.0, max(0.0, 100 * moment / (run.duration or 1.0)))
