"""How many rollouts a sampler has under way at once: as many as its KV cache and the slowest stage behind it can use.

::

    signals (once a second) ─▶ Controller.observe ─▶ limit ─▶ credit of the sampler's beats ─▶ leases

    what falls                                          what rises
    KV full or preempted: × `shrink`, then `hold_s`     all places taken, KV below `comfortable`: + `grow` of it
    a queue behind, longer than `queue_s` of its own    that queue down to half of it: the bound is lifted
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


class ConcurrencyOptions(msgspec.Struct, frozen=True):
    most: int
    least: int = 1
    comfortable: float = 0.8
    """KV usage below which more are taken."""
    full: float = 0.95
    """KV usage above which fewer are."""
    shrink: float = 0.7
    grow: float = 0.1
    hold_s: float = 5.0
    """After a decrease, before the next change: what was admitted before has to end first."""
    queue_s: float = 10.0
    """Work that may wait in front of the slowest stage; it must never idle for want of work either."""
    margin: float = 1.25
    """More than Little's law says, because answers vary in length."""


class Controller:
    """See the module.

    Example::

        controller = Controller(ConcurrencyOptions(most=256))
        limit = controller.observe(Signals(now=1.0, active=256, kv_usage=0.97))   # 179
    """

    def __init__(self, options: ConcurrencyOptions) -> None:
        self._options = options
        self._by_memory = options.most
        self._by_queue = options.most
        self._held_until = -math.inf
        self._last: Signals | None = None
        self._latency_s: float | None = None
        self.reason = ""
        """What bounds the limit now: `memory`, `queue`, or nothing."""

    @property
    def limit(self) -> int:
        return max(self._options.least, min(self._options.most, self._by_memory, self._by_queue))

    def observe(self, seen: Signals) -> int:
        """The limit from now on."""
        last, self._last = self._last, seen
        if last is not None:
            self._measure(last, seen)
        self._follow_memory(seen, seen.preemptions > last.preemptions if last is not None else False)
        self._follow_queue(seen)
        bounds = {"memory": self._by_memory, "queue": self._by_queue}
        tightest = min(bounds, key=lambda name: bounds[name])
        self.reason = tightest if bounds[tightest] < self._options.most else ""
        return self.limit

    def _measure(self, last: Signals, seen: Signals) -> None:
        """Mean time of a generation, by Little's law from what was under way and what ended."""
        ended, elapsed = seen.finished - last.finished, seen.now - last.now
        if ended <= 0 or elapsed <= 0:
            return
        latency = elapsed * (last.active + seen.active) / 2 / ended
        self._latency_s = latency if self._latency_s is None else 0.8 * self._latency_s + 0.2 * latency

    def _follow_memory(self, seen: Signals, was_preempted: bool) -> None:
        o = self._options
        if seen.now < self._held_until:
            return
        if was_preempted or seen.kv_usage > o.full:
            self._by_memory = max(o.least, int(o.shrink * min(self._by_memory, max(seen.active, o.least))))
            self._held_until = seen.now + o.hold_s
        elif seen.kv_usage < o.comfortable and seen.active >= 0.9 * self.limit:
            self._by_memory = min(o.most, self._by_memory + max(1, math.ceil(o.grow * self._by_memory)))

    def _follow_queue(self, seen: Signals) -> None:
        o = self._options
        if seen.queued_behind is None or not seen.rate_behind:
            self._by_queue = o.most
            return
        wait_s = seen.queued_behind / seen.rate_behind
        if wait_s > o.queue_s and self._latency_s is not None:
            needed = o.margin * seen.rate_behind * self._latency_s / max(1, seen.samplers)
            # the longer the queue, the less: at twice the bound nothing but the least
            excess = min(1.0, (wait_s - o.queue_s) / o.queue_s)
            self._by_queue = max(o.least, math.ceil(needed * (1.0 - excess)))
        elif wait_s < 0.5 * o.queue_s:
            # fast, unlike memory: a stage that runs dry costs more than a queue that grows for a moment
            self._by_queue = min(o.most, 2 * self._by_queue)
