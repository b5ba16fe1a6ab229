"""Series made small enough to draw (binned, smoothed, spread), and from values to pixels with round numbers. Pure.

Invariant: however many values go in, at most `most` points come out, and their means are those of the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Points = Sequence[tuple[float, float]]

MOST = 160
MOST_POWERS = 6


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


class Scale:
    """Maps `low … high` to `start … end`; its ends and its ticks are round numbers."""

    def __init__(self, low: float, high: float, ticks: list[float], start: float, end: float, *, log: bool) -> None:
        self.low, self.high, self._ticks = low, high, ticks
        self.start, self.end, self._log = start, end, log

    @classmethod
    def linear(cls, values: Sequence[float], start: float, end: float, *, steps: int = 5, exact: bool = False) -> Scale:
        """`exact`: the axis ends where the values do, as time does."""
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if high - low < 1e-12:
            low, high = min(low, 0.0), max(high, 0.0) or 1.0
        rough = (high - low) / steps
        scale = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= rough * 0.999)
        below, above = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        ticks = [step * i for i in range(below, above + 1)]
        if exact:
            ticks = [tick for tick in ticks if low - 1e-9 <= tick <= high + 1e-9]
            return cls(low, high, ticks, start, end, log=False)
        return cls(ticks[0], ticks[-1], ticks, start, end, log=False)

    @classmethod
    def logarithmic(cls, values: Sequence[float], start: float, end: float, *, room: float = 1.1) -> Scale:
        """Ticks at 1, 2 and 5 of each power of ten, or at 1 only where there are many; non-positive values are not
        seen."""
        seen = [value for value in values if value > 0] or [1.0, 10.0]
        low, high = min(seen) / room, max(seen) * room
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        factors = (1, 2, 5) if last - first <= 3 else (1,)
        powers = [power for power in range(first, last + 1) if power % -(-(last - first) // MOST_POWERS) == 0]
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        return cls(low, high, [tick for tick in ticks if low <= tick <= high], start, end, log=True)

    def __call__(self, value: float) -> float:
        if self._log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def marked(self, ticks: Sequence[float] | None) -> Scale:
        """With other ticks, where there are any: those of them that are inside."""
        if ticks is None:
            return self
        inside = [tick for tick in ticks if self.low <= tick <= self.high]
        return Scale(self.low, self.high, inside, self.start, self.end, log=self._log)

    def percent(self, value: float) -> float:
        """The place between start and end, held inside them: for elements laid out by a browser."""
        return min(100.0, max(0.0, 100 * (self(value) - self.start) / (self.end - self.start)))

    def ticks(self) -> list[float]:
        return self._ticks


def time_ticks(duration: float, most: int = 8) -> list[float]:
    """Round moments of a run of so many seconds."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
    step = next((step for step in steps if duration / step <= most), 86400 * math.ceil(duration / 86400 / most))
    return [float(step * i) for i in range(int(duration / step) + 1)]


def time_label(moment: float) -> str:
    """`40 s`, `3 min`, `3:20`, `2 h`, `2 h 15`."""
    if moment < 60:
        return f"{round(moment)} s" if round(moment, 1) else "0"
    minutes, seconds = divmod(round(moment), 60)
    if minutes < 60:
        return f"{minutes}:{seconds:02d}" if seconds else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d}" if minutes else f"{hours} h"
