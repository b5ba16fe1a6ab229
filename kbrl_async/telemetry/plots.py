"""Line charts as self-contained SVG text: for documents, reports and comparisons. Pure; no plotting library needed.

::

    {"S = 0": [(0, .1), (1, .2)], …} ─ line_chart ─▶ '<svg …>'
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 168, 44, 48
_COLOURS = ("#3b6fb6", "#d1603d", "#4f9d69", "#8a63b0", "#c29a2b", "#4aa3a2", "#b0527f", "#6b7280")
_STYLE = "font-family:system-ui,sans-serif;font-size:12px;fill:#374151"


def line_chart(series: Mapping[str, Points], *, title: str, x: str, y: str) -> str:
    """One line a series, with axes, ticks and a legend. A series without points is left out of the chart only."""
    drawn = {name: list(points) for name, points in series.items() if points}
    xs = [point[0] for points in drawn.values() for point in points] or [0.0, 1.0]
    ys = [point[1] for points in drawn.values() for point in points] or [0.0, 1.0]
    across, up = _Axis.over(xs, _LEFT, WIDTH - _RIGHT), _Axis.over([*ys, min(0.0, *ys)], HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" style="{_STYLE}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 24, title, "font-weight:600;font-size:14px"),
        *_grid(across, up),
        _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 10, x, "text-anchor:middle"),
        _text(_LEFT, _TOP - 8, y, "fill:#6b7280"),
    ]
    for number, (name, points) in enumerate(drawn.items()):
        parts += _line(name, points, _COLOURS[number % len(_COLOURS)], number, across, up)
    return "\n".join([*parts, "</svg>", ""])


class _Axis:
    """Maps values to pixels; its ends are round numbers."""

    def __init__(self, low: float, high: float, step: float, start: float, end: float) -> None:
        self.low, self.high, self.step, self.start, self.end = low, high, step, start, end

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> _Axis:
        low, high = min(values), max(values)
        if high - low < 1e-12:
            high = low + 1.0
        rough = (high - low) / 5
        scale = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= rough * 0.999)
        return cls(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step, start, end)

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return [self.low + i * self.step for i in range(round((self.high - self.low) / self.step) + 1)]


def _grid(across: _Axis, up: _Axis) -> list[str]:
    parts = []
    for value in up.ticks():
        at = up(value)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}" stroke="#e5e7eb"/>')
        parts.append(_text(_LEFT - 8, at + 4, _shown(value), "text-anchor:end"))
    parts += [_text(across(v), HEIGHT - _BOTTOM + 18, _shown(v), "text-anchor:middle") for v in across.ticks()]
    return [*parts, f'<path d="M{_LEFT} {up(up.low):.1f}H{WIDTH - _RIGHT}" stroke="#9ca3af"/>']


def _line(name: str, points: Points, colour: str, number: int, across: _Axis, up: _Axis) -> list[str]:
    path = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in points)
    legend = _TOP + 8 + 20 * number
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>',
        f'<rect x="{WIDTH - _RIGHT + 16}" y="{legend - 8}" width="14" height="4" fill="{colour}"/>',
        _text(WIDTH - _RIGHT + 36, legend, name, ""),
    ]


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" style="{style}">{html.escape(text)}</text>'


def _shown(value: float) -> str:
    return f"{value:.6g}" if abs(value) > 1e-9 else "0"


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Means over the last `window` values: noise of single batches out, trend in."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]
