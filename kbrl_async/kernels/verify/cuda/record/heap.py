"""Which bytes of the arena are given out: an allocator that keeps its books outside of the memory. Pure.

::

    begin(start, end) ─▶ take, give … ─▶ settle (the device is idle) ─▶ live(): what lasts from call to call
                         └ enter(pool) … enter(None): memory of a graph of the candidate's own

In Python and not in C: a host that benches needs no compiler for it, nothing is timed where it runs, and one call costs
two microseconds.

Invariants
* Two live blocks never overlap, and none reaches outside of `begin`'s stretch.
* What was given back on one stream is taken again on that stream only, until `settle`: work that was submitted on it
  may still read the block.
* What was taken for a pool is taken again for that pool only: a graph that was captured over it uses it in each replay.
"""

from __future__ import annotations

import bisect

ALIGNMENT = 512
_LARGE, _LARGE_ALIGNMENT = 1 << 20, 2 << 20
"""Large blocks begin with a page of the device, as the driver's own do: kernels are some percent slower elsewhere."""
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
        self.trail: list[tuple[int, int]] = []
        """(address, bytes asked for) of all that was taken since `part`."""
        self._kept: dict[int, int] = {}
        self._pool: int | None = None
        self._owners: dict[tuple[int, int], int] = {}
        """(pool, stream) → what stands for it where a stream would."""
        self._pooled: list[_Free] = []
        self.used = 0
        """End of the highest block since `begin`."""
        self.log: list[tuple[int, int]] | None = None
        """(address, bytes asked for) of each block taken, while somebody wants to know."""
        self.lacked = 0
        """Bytes of the largest block that there was no room for since `begin`, as its user says."""

    def begin(self, start: int, end: int) -> None:
        """All is free but what is still alive, which somebody else has left behind.

        :raises ValueError: that lies outside of the stretch.
        """
        self._left = frozenset(self._live)
        if any(address < start or stop > end for address, (stop, _) in self._live.items()):
            raise ValueError("memory that an earlier candidate holds lies where the next one's inputs go")
        self._stretch, self.used, self.log, self.lacked = (start, end), start, None, 0
        self._pool, self._owners, self._pooled = None, {}, []
        self.settle()

    def enter(self, pool: int | None) -> None:
        """What is taken from now on is that pool's; None: nobody's."""
        self._pool = pool

    @property
    def is_pooled(self) -> bool:
        """Whether a graph of the candidate's own is being captured."""
        return self._pool is not None

    def forget(self) -> None:
        """Whatever is alive is nobody's any more: its memory goes."""
        self._live.clear()
        self._held.clear()

    @property
    def left_bytes(self) -> int:
        """What candidates left behind, once the last one is done with."""
        return sum(end - address for address, (end, _) in self._live.items())

    def take(self, size: int, stream: int) -> int:
        """Address of a new block; 0 where there is no room, and for no bytes."""
        if size <= 0:
            return 0
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        is_kept = self._kept.get(len(self.trail)) == size
        if self._pool is not None:
            stream = self._owners.setdefault((self._pool, stream), _ANY - 1 - len(self._owners))
        begin = self._cut(rounded, stream, self._untouched() if is_kept else self._free)
        if not begin:
            return 0
        if self._pool is not None and not any(at <= begin < end for at, end, _ in self._pooled):
            self._pooled.append((begin, begin + rounded, stream))
        self._live[begin] = (begin + rounded, stream)
        self._touched.append((begin, begin + rounded))
        self.trail.append((begin, size))
        self.used = max(self.used, begin + rounded)
        if self.log is not None:
            self.log.append((begin, size))
        return begin

    def _cut(self, rounded: int, stream: int, free: list[_Free]) -> int:
        """The begin of the best of these free stretches that `rounded` bytes fit into, cut out of what is free; or
        0."""
        step = _LARGE_ALIGNMENT if rounded >= _LARGE else ALIGNMENT
        fits = [
            (owner == _ANY, end - begin, -(-begin // step) * step, begin, end, owner)
            for begin, end, owner in free
            if owner in (_ANY, stream) and end - -(-begin // step) * step >= rounded
        ]
        if not fits:
            return 0
        _, _, at, begin, end, owner = min(fits)
        whole = next(block for block in self._free if block[0] <= begin and end <= block[1] and block[2] == owner)
        self._free.remove(whole)
        self._add((whole[0], at, owner))
        self._add((at + rounded, whole[1], owner))
        return at

    def _untouched(self) -> list[_Free]:
        """What is free and was not taken since `settle`."""
        taken = [*((address, found[0]) for address, found in self._live.items()), *self._touched]
        return [
            (max(begin, start), min(end, stop), owner)
            for begin, end in _between(taken, *self._stretch)
            for start, stop, owner in self._free
            if max(begin, start) < min(end, stop)
        ]

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
        self._kept, self.trail = {}, []
        self._free_all_but([])

    def part(self, kept: dict[int, int] | None = None) -> None:
        """Between two forwards, which are done again in any order: what one of them only uses for a while may not lie
        where another's output does, and lies where the other's does that, as it would if they were called.

        `kept`: by their number in `trail`, the sizes of what is taken for outputs; None where nobody knows: then
        nothing that was taken since `settle` is taken again.
        """
        self._free_all_but(self._touched if kept is None else [])
        self._kept = kept or {}
        self.trail = []

    def _free_all_but(self, more: list[tuple[int, int]]) -> None:
        """What is alive isn't free either."""
        self._free = []
        live = [(address, found[0]) for address, found in self._live.items()]
        pooled = [(begin, end) for begin, end, _ in self._pooled]
        for begin, end in _between([*live, *more, *pooled], *self._stretch):
            self._add((begin, end, _ANY))
        for begin, end, owner in self._pooled:
            for part in _between([*live, *more], begin, end):
                self._add((*part, owner))

    @property
    def free(self) -> list[tuple[int, int]]:
        """Begin and end of what is free, as far as anything was used so far."""
        return [(begin, min(end, self.used)) for begin, end, _ in self._free if begin < self.used]

    @property
    def empty(self) -> list[tuple[int, int]]:
        """Begin and end of all that is free, used before or not."""
        return [(begin, end) for begin, end, _ in self._free]

    def passing(self, log: list[tuple[int, int]], results: set[int]) -> list[tuple[int, int]]:
        """Of what an operator has taken: its results, and what it has given back. What else it keeps is a library's, as
        its workspace is for a stream that it had not seen.
        """
        return [(address, size) for address, size in log if address in results or address not in self._live]

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


def _between(taken: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The stretches from `begin` to `end` that none of these covers.

    >>> _between([(2, 4), (6, 9)], 3, 8)
    [(4, 6)]
    """
    left, at = [], begin
    for start, stop in sorted(taken):
        if start > at:
            left.append((at, min(start, end)))
        at = max(at, stop)
        if at >= end:
            return left
    return [*left, (at, end)]
