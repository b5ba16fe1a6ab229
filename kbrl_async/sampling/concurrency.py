"""How many rollouts a sampler has under way at once: as many as its KV cache and the slowest stage behind it can use.

::

    signals (once a second) ─▶ Controller.observe ─▶ limit ─▶ credit of the sampler's beats ─▶ leases

    what falls                                          what rises
    KV full or preempted: × `SHRINK`, then `HOLD_S`     all places taken, KV below `COMFORTABLE`: + `GROW` of it
    a queue behind, longer than `QUEUE_S` of its own    that queue down to half of it: the bound is lifted
      work: to what keeps that stage busy

Where nothing presses the limit is `most`, as if there were no controller. In the other direction it follows Little's
law: a stage that ends `rate` rollouts a second is kept busy by `rate · latency` that are being generated. More would
only wait there, grow old, and be written by an older policy than need be. Pure: the clock comes with the signals.

Invariants
* least ≤ limit ≤ most, whatever was measured; so nothing ever stops, and memory is bounded by `most`.
* Rollouts under way are never taken back: a lower limit only takes no new ones.
"""

from __future__ import annotations

import math

import msgspec

LEAST = 1
COMFORTABLE = 0.8
"""KV usage below which more are taken."""
FULL = 0.95
"""KV usage above which fewer are."""
SHRINK = 0.7
GROW = 0.1
HOLD_S = 5.0
"""After a decrease, before the next change: what was admitted before has to end first."""
QUEUE_S = 10.0
"""Work that may wait in front of the slowest stage; it must never idle for want of work either."""
MARGIN = 1.25
"""More than Little's law says, because answers vary in length."""


class Signals(msgspec.Struct, frozen=True):
    """What a sampler sees at `now` (seconds of any clock)."""

    now: float
    active: int
    """Rollouts that it holds."""
    finished: int = 0
    """Rollouts that it has generated since its start."""
    kv_usage: float = 0.0
    preemptions: int = 0
    """Since its start: sequences that lost their KV for want of memory."""
    queued_behind: int | None = None
    """Rollouts that wait at the later stage with the longest queue; None where nobody says."""
    rate_behind: float | None = None
    """Rollouts a second that this stage ends, all samplers' together."""
    samplers: int = 1
    """That feed it: each takes its share."""


class Controller:
    """See the module.

    Example::

        controller = Controller(most=256)
        limit = controller.observe(Signals(now=1.0, active=256, kv_usage=0.97))   # 179
    """

    def __init__(self, most: int, least: int = LEAST) -> None:
        self._most, self._least = most, least
        self._by_memory = self._by_queue = most
        self._held_until = -math.inf
        self._last: Signals | None = None
        self._latency_s: float | None = None
        self.reason = ""
        """What bounds the limit now: `memory`, `queue`, or nothing."""

    @property
    def limit(self) -> int:
        return max(self._least, min(self._most, self._by_memory, self._by_queue))

    def observe(self, seen: Signals) -> int:
        """The limit from now on."""
        last, self._last = self._last, seen
        if last is not None:
            self._measure(last, seen)
        self._follow_memory(seen, seen.preemptions > last.preemptions if last is not None else False)
        self._follow_queue(seen)
        bounds = {"memory": self._by_memory, "queue": self._by_queue}
        tightest = min(bounds, key=lambda name: bounds[name])
        self.reason = tightest if bounds[tightest] < self._most else ""
        return self.limit

    def _measure(self, last: Signals, seen: Signals) -> None:
        """Mean time of a generation, by Little's law from what was under way and what ended."""
        ended, elapsed = seen.finished - last.finished, seen.now - last.now
        if ended <= 0 or elapsed <= 0:
            return
        latency = elapsed * (last.active + seen.active) / 2 / ended
        self._latency_s = latency if self._latency_s is None else 0.8 * self._latency_s + 0.2 * latency

    def _follow_memory(self, seen: Signals, was_preempted: bool) -> None:
        if seen.now < self._held_until:
            return
        if was_preempted or seen.kv_usage > FULL:
            self._by_memory = max(self._least, int(SHRINK * min(self._by_memory, max(seen.active, self._least))))
            self._held_until = seen.now + HOLD_S
        elif seen.kv_usage < COMFORTABLE and seen.active >= 0.9 * self.limit:
            self._by_memory = min(self._most, self._by_memory + max(1, math.ceil(GROW * self._by_memory)))

    def _follow_queue(self, seen: Signals) -> None:
        if seen.queued_behind is None or not seen.rate_behind:
            self._by_queue = self._most
            return
        wait_s = seen.queued_behind / seen.rate_behind
        if wait_s > QUEUE_S and self._latency_s is not None:
            needed = MARGIN * seen.rate_behind * self._latency_s / max(1, seen.samplers)
            # the longer the queue, the less: at twice the bound nothing but the least
            excess = min(1.0, (wait_s - QUEUE_S) / QUEUE_S)
            self._by_queue = max(self._least, math.ceil(needed * (1.0 - excess)))
        elif wait_s < 0.5 * QUEUE_S:
            # fast, unlike memory: a stage that runs dry costs more than a queue that grows for a moment
            self._by_queue = min(self._most, 2 * self._by_queue)
