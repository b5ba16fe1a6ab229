"""A live index: the verified kernels of the run that is going on, beside the index on disk.

::

    verified kernel ─▶ LiveIndex.add ─ better than its problem's? ─▶ version + 1 ─▶ snapshot() ─▶ Retriever.retrieve

Invariants
* At most `capacity` entries (I10). When it is full, the problem that was improved longest ago leaves.
* Of one problem it holds the best kernel only.
* A snapshot never changes; its version tells which additions a prompt was made with. Version 0 is empty.
* The leak rules judge live entries like all others.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from kbrl_async.kernels.syntax import ReferenceFacts
from kbrl_async.rollouts.retrieval.choosing import worth
from kbrl_async.rollouts.retrieval.embedders import Vectors
from kbrl_async.rollouts.retrieval.entries import Entry, Skip, checked
from kbrl_async.rollouts.retrieval.store import FACT, Facts, fact_of


class LiveEntries(msgspec.Struct, frozen=True):
    """The live entries at one version: row i of each field belongs to entry i."""

    version: int
    entries: tuple[Entry, ...]
    facts: Facts
    vectors: Vectors


NO_ADDITIONS = LiveEntries(0, (), np.zeros(0, FACT), np.zeros((0, 0), np.float32))


class _Kept(msgspec.Struct, frozen=True):
    entry: Entry
    reading: ReferenceFacts
    vector: NDArray[np.float32]


class LiveIndex:
    """Bounded and versioned; used by one thread."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a live index holds at least one entry")
        self.capacity = capacity
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._snapshot = NO_ADDITIONS

    def add(self, entry: Entry, reading: ReferenceFacts, vector: NDArray[np.float32]) -> bool:
        """Takes in a verified kernel; False where it is none, is unfit, or its problem has a better one."""
        try:
            entry = checked(entry)
        except Skip:
            return False
        before = self._kept.get(entry.problem_id)
        if not entry.verified or not entry.problem_id or (before and worth(before.entry) >= worth(entry)):
            return False
        self._kept[entry.problem_id] = _Kept(entry, reading, vector)
        self._kept.move_to_end(entry.problem_id)
        while len(self._kept) > self.capacity:
            self._kept.popitem(last=False)
        self._renew()
        return True

    def evict(self, problem_id: str) -> bool:
        """Takes a problem's kernel out, such as one that was found to cheat later."""
        if self._kept.pop(problem_id, None) is None:
            return False
        self._renew()
        return True

    def snapshot(self) -> LiveEntries:
        return self._snapshot

    def __len__(self) -> int:
        return len(self._kept)

    def _renew(self) -> None:
        kept = list(self._kept.values())
        self._snapshot = LiveEntries(
            self._snapshot.version + 1,
            tuple(item.entry for item in kept),
            np.array([fact_of(item.entry, item.reading) for item in kept], FACT),
            np.stack([item.vector for item in kept]) if kept else NO_ADDITIONS.vectors,
        )
