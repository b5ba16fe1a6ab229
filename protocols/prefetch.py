"""How many leases a worker holds so that it never waits for the line: more where it is long, few where it is not.

::

    a result leaves ─▶ broker ─▶ the next task comes ─▶ its artifact comes ─▶ it could begin      = the lead
    one runs ─────────▶ done, the next one runs ─▶ …                                              = the work

Whoever has `concurrency` places and works on each task for `work` seconds uses up `concurrency · lead / work` tasks
while a new one is on its way (Little's law); so many wait here beside those that run. The lead is measured as TCP does
its timeout (RFC 6298): a smoothed mean and four times the mean deviation, so that lost packets are in it. Pure.

Invariants
* At least one task waits here, and `credit` is between `concurrency + 1` and `most`, whatever was measured.
* What took longer than `LONGEST_S` says nothing about the line (a partition, a repeated result) and is left out.
"""

from __future__ import annotations

import math

LONGEST_S = 2.5
_SHORTEST_S = 1e-3
_GAIN, _DEVIATION_GAIN = 1 / 8, 1 / 4
PER_PLACE = 4
"""Most leases for each place and one more, by default: a prefetched task waits here while another worker may idle."""


class Smoothed:
    """A mean that follows, with its mean deviation."""

    def __init__(self) -> None:
        self.mean = self.deviation = 0.0
        self._is_first = True

    def add(self, value: float) -> None:
        if self._is_first:
            self.mean, self.deviation, self._is_first = value, value / 2, False
            return
        self.deviation += _DEVIATION_GAIN * (abs(value - self.mean) - self.deviation)
        self.mean += _GAIN * (value - self.mean)

    @property
    def high(self) -> float:
        return self.mean + 4 * self.deviation


class Prefetch:
    """Measures, and says how many leases to ask for.

    Example::

        prefetch = Prefetch(concurrency=1)
        prefetch.acked(0.1); prefetch.fetched(0.1); prefetch.worked(0.2)
        prefetch.credit                                 # 5: one runs, four are on their way or here
    """

    def __init__(self, concurrency: int, most: int | None = None) -> None:
        self.concurrency = concurrency
        self.least = concurrency + 1
        self.most = max(self.least, most if most is not None else PER_PLACE * (concurrency + 1))
        self._line, self._fetch, self._handing = Smoothed(), Smoothed(), Smoothed()
        self._work = Smoothed()

    def acked(self, seconds: float) -> None:
        """From a result to its Ack: a round trip, with the broker's commit."""
        _learn(self._line, seconds)

    def fetched(self, seconds: float) -> None:
        """What a task needed before it could begin has come."""
        _learn(self._fetch, seconds)

    def handed(self, seconds: float) -> None:
        """What belongs to a result is where it has to be before the result may leave."""
        _learn(self._handing, seconds)

    def worked(self, seconds: float) -> None:
        self._work.add(seconds)

    @property
    def lead_s(self) -> float:
        return self._line.high + self._fetch.high + self._handing.high

    @property
    def credit(self) -> int:
        waiting = math.ceil(self.concurrency * self.lead_s / max(self._work.mean, _SHORTEST_S))
        return min(self.most, self.concurrency + max(1, waiting))


def _learn(smoothed: Smoothed, seconds: float) -> None:
    if 0 <= seconds <= LONGEST_S:
        smoothed.add(seconds)
