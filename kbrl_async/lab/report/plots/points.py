"""Series made small enough to draw: binned, smoothed, spread. Pure.

Invariant: however many values go in, at most `most` points come out, and their means are those of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Points = Sequence[tuple[float, float]]

MOST = 160


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Means over the last `window` values: noise of single batches out, trend in."""
    total, means = 0.0, []
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        means.append(total / min(i + 1, window))
    return means


def smooth(points: Points, window: int) -> list[tuple[float, float]]:
    values = smoothed([value for _, value in points], window)
    return [(x, value) for (x, _), value in zip(points, values, strict=True)]


def thinned(points: Points, most: int = MOST) -> list[tuple[float, float]]:
    """Neighbours replaced by their mean until there are at most `most` points."""
    size = -(-len(points) // most)
    if size <= 1:
        return list(points)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def binned(items: Iterable[Item], at: Callable[[Item], float], bins: int, start: float, end: float) -> list[list[Item]]:
    """The items by the part of `start … end` that they fall into; those outside go to the nearest part."""
    out: list[list[Item]] = [[] for _ in range(bins)]
    width = (end - start) / bins or 1.0
    for item in items:
        out[min(bins - 1, max(0, int((at(item) - start) / width)))].append(item)
    return out


def apart(wanted: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """The wanted places moved as little as needed so that neighbours are `distance` apart, inside `low … high`."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = list(wanted)
    for before, i in zip([None, *order], order, strict=False):
        places[i] = max(places[i], low if before is None else places[before] + distance)
    for after, i in zip([None, *reversed(order)], reversed(order), strict=False):
        places[i] = min(places[i], high if after is None else places[after] - distance)
    return places
