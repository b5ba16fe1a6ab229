"""What all SVG charts share: size, axes, ticks, direct labels, and the style that a standalone file carries with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files

import msgspec

from kbrl_async.lab.report.markup import Content, Markup, element
from kbrl_async.lab.report.plots.points import apart
from kbrl_async.lab.report.plots.scales import Scale

Format = Callable[[float], str]

COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")
"""Classes of series that have no colour of their own; see theme.css."""
LABEL_HEIGHT = 14.0


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


def end_labels(box: Box, ends: Sequence[tuple[float, str, str]]) -> list[Markup]:
    """(height, words, class) beside the ends of series; moved apart where they would overlap."""
    bottom, top = box.up
    places = apart([y for y, _, _ in ends], LABEL_HEIGHT, top + 4, bottom)
    limit = max(6, int((box.right - 8) / 6.6))
    return [
        text(
            box.width - box.right + 8, y + 4, words if len(words) <= limit else words[: limit - 1] + "…", f"direct {c}"
        )
        for y, (_, words, c) in zip(places, ends, strict=True)
    ]


def svg(
    box: Box, parts: Sequence[Content], *, label: str, tip: str = "", standalone: Mapping[str, str] | None = None
) -> Markup:
    """The document. `standalone`: `title`, and `x` and `y` that name the axes, for a file of its own."""
    if standalone is None:
        inside, extra = list(parts), {}
    else:
        inside, extra = [*_head(box, standalone), *parts], {"xmlns": "http://www.w3.org/2000/svg"}
    return element(
        "svg", *inside, **extra, viewBox=f"0 0 {box.width} {box.height}", role="img", aria_label=label, class_="chart",
        data_tip=tip or None,
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
