"""Whose turn it is among many clients, and who asks too often. Pure: time is given.

Invariants
* Of clients that wait, the one that has used the least time is served next; a new one starts level with the others.
  So a client whose jobs hang, or who sends thousands, slows itself and nobody else.
* Within a client: priority first, then the order in which jobs came.
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

RANK = {"high": 0, "normal": 1, "low": 2}


class FairQueue(Generic[ItemT]):
    """`used` is charged when work ends, and while it runs with what it has taken so far at the least `CHARGE_S`."""

    CHARGE_S = 0.05

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[int, int, ItemT]]] = {}
        self.used: dict[str, float] = {}
        self._running: dict[str, int] = {}
        self._number = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def of(self, client: str) -> int:
        """How many of its jobs wait."""
        return len(self._waiting.get(client, ()))

    def add(self, client: str, item: ItemT, priority: str = "normal") -> None:
        if client not in self.used:
            self.used[client] = self._level()
        elif client not in self._waiting and not self._running.get(client):
            self.used[client] = max(self.used[client], self._level())  # what it did not ask for is not owed to it
        self._number += 1
        heapq.heappush(self._waiting.setdefault(client, []), (RANK[priority], self._number, item))

    def take(self) -> tuple[str, ItemT] | None:
        """The next one; say `ended` when its work has."""
        if not self._waiting:
            return None
        client = min(self._waiting, key=lambda name: (self.used[name] + self._charge(name), self._waiting[name][0][1]))
        lane = self._waiting[client]
        *_, item = heapq.heappop(lane)
        if not lane:
            del self._waiting[client]
        self._running[client] = self._running.get(client, 0) + 1
        return client, item

    def ended(self, client: str, seconds: float) -> None:
        """`seconds` of work are charged. Clients with nothing to do are forgotten once others are ahead."""
        self.used[client] = self.used.get(client, 0.0) + max(seconds, self.CHARGE_S)
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        busy = self._busy()
        level = min(busy.values(), default=math.inf)
        for name in [name for name, used in self.used.items() if name not in busy and used <= level]:
            del self.used[name]

    def _charge(self, client: str) -> float:
        return self.CHARGE_S * self._running.get(client, 0)

    def _level(self) -> float:
        """Of the least served client that has something to do."""
        return min(self._busy().values(), default=0.0)

    def _busy(self) -> dict[str, float]:
        return {name: used for name, used in self.used.items() if name in self._waiting or name in self._running}


class RequestRates:
    """So many requests a minute and client, with as many at once; 0: no limit."""

    CLIENTS = 10_000

    def __init__(self, per_minute: float) -> None:
        self._per_s = per_minute / 60
        self._most = max(1.0, per_minute)
        self.left: dict[str, tuple[float, float]] = {}

    def wait_s(self, client: str, now: float, cost: float = 1.0) -> float:
        """0, and the request is counted; or how long to wait for it."""
        if not self._per_s:
            return 0.0
        left, since = self.left.get(client, (self._most, now))
        left = min(self._most, left + (now - since) * self._per_s)
        if left < min(cost, self._most):
            return (min(cost, self._most) - left) / self._per_s
        self.left.pop(client, None)  # the newest stand last
        self.left[client] = (left - cost, now)
        if len(self.left) > self.CLIENTS:
            del self.left[next(iter(self.left))]
        return 0.0
