"""How numbers are written on a page, in one place: the same quantity looks the same everywhere. Pure."""

from __future__ import annotations

import math


def percent(value: float | None) -> str:
    return (
        "–"
        if value is None
        else f"{100 * value:.0f}\u00a0%"
        if abs(value) >= 0.1 or value == 0
        else f"{100 * value:.1f}\u00a0%"
    )


def times(value: float | None) -> str:
    """A speedup: three figures are more than a bench resolves."""
    if value is None:
        return "–"
    return f"{value:.0f}×" if value >= 100 else f"{value:.1f}×" if value >= 10 else f"{value:.2f}×"


def plain(value: float | None) -> str:
    """Up to three significant figures, no trailing zeros."""
    if value is None or math.isnan(value):
        return "–"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """A duration as a person says it: 40 ms, 3.2 s, 4 min 10 s, 2 h 05."""
    if value is None:
        return "–"
    if value < 0.0995:
        return f"{1000 * value:.0f} ms"
    if value < 60:
        return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d}"


def milliseconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{1000 * value:.3g} µs" if value < 1 else f"{value:.3g} ms"


def count(value: float | None, noun: str, plural: str = "") -> str:
    """`1 rollout`, `2 rollouts`."""
    if value is None:
        return "–"
    return f"{value:,.0f} {noun if value == 1 else plural or noun + 's'}"


def points(found: tuple[float, float, float]) -> str:
    """A difference of shares with its interval: `+13 points, +4 … +22`."""
    value, low, high = (f"{100 * part:+.0f}".replace("-", "−") for part in found)
    return f"{value} points, {low} … {high}"
