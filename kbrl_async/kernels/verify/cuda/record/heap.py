"""Which bytes of the arena are given out: an allocator that keeps its books outside of the memory. Pure.

::

    begin(start, end) ─▶ take, give … ─▶ settle (the device is idle) ─▶ live(): what lasts from call to call

In Python and not in C: a host that benches needs no compiler for it, nothing is timed where it runs, and one call costs
two microseconds.

Invariants
* Two live blocks never overlap, and none reaches outside of `begin`'s stretch.
* What was given back on one stream is taken again on that stream only, until `settle`: work that was submitted on it
  may still read the block.
"""

from __future__ import annotations

import bisect

ALIGNMENT = 512
_ANY = -1
_Free = tuple[int, int, int]
"""Begin, end, stream."""


class Heap:
    """Addresses from `start` to `end`."""

    def __init__(self) -> None:
        self._free: list[_Free] = []
        self._live: dict[int, tuple[int, int]] = {}
        """Address → end and stream."""
        self._held: set[int] = set()
        self._left: frozenset[int] = frozenset()
        self._stretch = (0, 0)
        self._touched: list[tuple[int, int]] = []
        """Begin and end of all that was taken since `settle`."""
        self.used = 0
        """End of the highest block since `begin`."""
        self.log: list[tuple[int, int]] | None = None
        """(address, bytes asked for) of each block taken, while somebody wants to know."""

    def begin(self, start: int, end: int) -> None:
        """All is free but what is still alive, which somebody else has left behind.

        :raises ValueError: that lies outside of the stretch.
        """
        self._left = frozenset(self._live)
        if any(address < start or stop > end for address, (stop, _) in self._live.items()):
            raise ValueError("memory that an earlier candidate holds lies where the next one's inputs go")
        self._stretch, self.used, self.log = (start, end), start, None
        self.settle()

    @property
    def left_bytes(self) -> int:
        """What earlier candidates left behind."""
        return sum(self._live[address][0] - address for address in self._left & self._live.keys())

    def take(self, size: int, stream: int) -> int:
        """Address of a new block; 0 where there is no room, and for no bytes."""
        if size <= 0:
            return 0
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        fits = [block for block in self._free if block[1] - block[0] >= rounded and block[2] in (_ANY, stream)]
        if not fits:
            return 0
        begin, end, owner = min(fits, key=lambda block: (block[2] == _ANY, block[1] - block[0], block[0]))
        self._free.remove((begin, end, owner))
        self._add((begin + rounded, end, owner))
        self._live[begin] = (begin + rounded, stream)
        self._touched.append((begin, begin + rounded))
        self.used = max(self.used, begin + rounded)
        if self.log is not None:
            self.log.append((begin, size))
        return begin

    def give(self, address: int) -> None:
        """Back again; an address that was never given out is nobody's."""
        found = self._live.pop(address, None)
        if found is not None and address not in self._held:
            self._add((address, *found))

    def hold(self, address: int) -> None:
        """Another stream uses the block: it is free again only when the device has been idle."""
        if address in self._live:
            self._held.add(address)

    def settle(self) -> None:
        """Call when the device is idle: whatever was given back may be taken on any stream."""
        self._held.clear()
        self._touched.clear()
        self._free_all_but([])

    def fence(self) -> None:
        """Nothing that was taken since `settle` is taken again before the next one. Between two forwards: they are done
        again in any order, so what one of them only uses for a while may not lie where another's output does.
        """
        self._free_all_but(self._touched)

    def _free_all_but(self, more: list[tuple[int, int]]) -> None:
        """What is alive isn't free either."""
        self._free, (at, end) = [], self._stretch
        for begin, stop in sorted([*((address, found[0]) for address, found in self._live.items()), *more]):
            self._add((at, begin, _ANY))
            at = max(at, stop)
        self._add((at, end, _ANY))

    def live(self, but: frozenset[int] = frozenset()) -> list[tuple[int, int]]:
        """Begin and end of what was taken since `begin` and is alive, joined where blocks touch; without `but`."""
        stretches: list[tuple[int, int]] = []
        for address in sorted(self._live.keys() - self._left - but):
            end = self._live[address][0]
            if stretches and stretches[-1][1] == address:
                stretches[-1] = (stretches[-1][0], end)
            else:
                stretches.append((address, end))
        return stretches

    def _add(self, block: _Free) -> None:
        """Joined with free neighbours of the same stream."""
        begin, end, stream = block
        if begin >= end:
            return
        place = bisect.bisect(self._free, block)
        if place < len(self._free) and self._free[place][0] == end and self._free[place][2] == stream:
            end = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == begin and self._free[place - 1][2] == stream:
            place -= 1
            begin = self._free.pop(place)[0]
        self._free.insert(place, (begin, end, stream))
