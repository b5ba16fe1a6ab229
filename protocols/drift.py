"""Do benches agree on speed? Where a candidate was timed twice (`broker.check_share`), its two speedups are compared.

A speedup is a ratio taken in one session, so benches on equal hardware should find the same. A bench that is off by the
same share again and again is no liar, but its group is paid differently: that is told, once a pair.

Pure; bounded by `KEPT` comparisons of a pair and `PAIRS` pairs.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque

from protocols.records import Timing

KEPT = 64
PAIRS = 256
ENOUGH = 8
"""Comparisons before a pair is said to drift."""
TOLD_AT = 0.02
"""Median difference that is told, as a share."""


class Drift:
    """Differences between benches, by pair.

    >>> drift = Drift()
    >>> drift.add("a", "b", Timing(9, 1.02, 1.0, 1.04, 1.0, 1.0), Timing(9, 1.0, 0.98, 1.02, 1.0, 1.0))
    >>> drift.stats()
    {'a/b': {'compared': 1, 'median': 0.0198, 'apart': 0.0}}
    """

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[str, str], deque[tuple[float, bool]]] = OrderedDict()
        """By names in order: logarithm of the first's speedup over the second's, and whether the intervals missed."""
        self._told: set[tuple[str, str]] = set()

    def add(self, first: str, second: str, timing: Timing, other: Timing) -> None:
        """Ignored where either speedup is no positive number."""
        if not (0 < timing.speedup < math.inf and 0 < other.speedup < math.inf) or first == second:
            return
        if second < first:
            first, second, timing, other = second, first, other, timing
        found = self._pairs.setdefault((first, second), deque(maxlen=KEPT))
        found.append((math.log(timing.speedup / other.speedup), timing.lo > other.hi or other.lo > timing.hi))
        self._pairs.move_to_end((first, second))
        while len(self._pairs) > PAIRS:
            self._told.discard(self._pairs.popitem(last=False)[0])

    def news(self) -> list[tuple[str, str]]:
        """Pairs that have begun to drift since this was asked last: their names, and how far apart they are."""
        fresh = []
        for pair, found in self._pairs.items():
            median = statistics.median(ratio for ratio, _ in found)
            if len(found) >= ENOUGH and abs(median) >= TOLD_AT:
                if pair not in self._told:
                    self._told.add(pair)
                    ahead, behind = pair if median > 0 else pair[::-1]
                    text = f"finds speedups {100 * math.expm1(abs(median)):.1f} % above those of {behind}"
                    fresh.append((ahead, f"{text}, in the median of {len(found)}"))
            else:
                self._told.discard(pair)
        return fresh

    def stats(self) -> dict[str, dict[str, object]]:
        """As written to `metrics/system.jsonl`. `apart`: share of the comparisons whose intervals missed each other."""
        return {
            "/".join(pair): {
                "compared": len(found),
                "median": round(statistics.median(ratio for ratio, _ in found), 4),
                "apart": round(statistics.fmean(missed for _, missed in found), 3),
            }
            for pair, found in self._pairs.items()
        }
