"""Which hardware a group's timings come from: rewards of one group are compared with each other, so one kind for all.

A group is pinned when its first task is leased at `bench`, by the hardware that this bench declares. Where no such
bench is left, the pin is lifted after a bounded wait if nothing was timed yet; else what waits ends as `no_worker`.

Invariant: a group's results come from one kind of hardware. Benches that declare none pin nothing and get no pinned
task.
"""

from __future__ import annotations

from collections import OrderedDict


class HardwarePins:
    """Pins by group, bounded: the oldest are forgotten first."""

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._pins: OrderedDict[str, str] = OrderedDict()
        self._timed: set[str] = set()

    def of(self, group_id: str) -> str:
        """The hardware that the group is pinned to; empty: none yet."""
        return self._pins.get(group_id, "")

    def pin(self, group_id: str, hardware: str) -> bool:
        """True where this has pinned the group just now."""
        if not group_id or not hardware or group_id in self._pins:
            return False
        self._pins[group_id] = hardware
        while len(self._pins) > self._limit:
            self._timed.discard(self._pins.popitem(last=False)[0])
        return True

    def timed(self, group_id: str) -> None:
        """A result has come from that hardware: the pin stays."""
        if group_id in self._pins:
            self._timed.add(group_id)

    def lift(self, group_id: str) -> bool:
        """Undo a pin that nothing was timed under; False where it has to stay."""
        if group_id in self._timed:
            return False
        return self._pins.pop(group_id, None) is not None

    def drop(self, group_id: str) -> None:
        self._pins.pop(group_id, None)
        self._timed.discard(group_id)

    def __len__(self) -> int:
        return len(self._pins)
