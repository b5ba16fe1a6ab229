"""Quiet windows: a bench that shares a GPU (or cores) with a sampler or a learner asks them to stand still a while.

One window on one resource, in the broker::

               QuietRequest               all Paused, or answer_s is over           QuietDone, or its length is over
    (queued) ───────────────▶ asking ──────────────────────────────────▶ granted ──────────────────────────▶ resting
        ▲  first come, first served │ Pause to every holder   QuietGrant │ to the bench       Resume to the holders │
        └───────────────────────────┴────────────────────────────────────┴──── until max_share is kept again ◀──────┘

Holders are workers whose `Hello.caps` name the resource under `SHARES`; benches of one GPU may be holders for each
other, so that one checks its next candidate until another one times. `QuietDesk` is the broker's side and `Pauses` a
holder's; both are pure: events and the time in, messages out.

Invariants
* One window at a time on a resource, also where nobody holds it: one timing at a time per GPU.
* Bounded: a window ends after its length, a holder resumes by its own clock, and windows take at most `max_share` of
  the wall time from the holders of a resource that are no benches. No lost message holds anybody longer than that.
* A window in which all of those had nothing to do (`Paused.is_idle`) takes nothing from them: the next one may follow
  at once. If somebody has work by then, the time of both is owed.
* Who waits for a window of its own stands still: nobody waits for its answer.
* Fair: first come, first served, and one request per bench, so a bench that asks again stands behind the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from protocols import messages as msg
from protocols.messages import SHARES

Sends = list[tuple[str, msg.Message]]
"""Worker id and what is said to it."""


class QuietOptions(msgspec.Struct, frozen=True):
    answer_s: float = 5.0
    """How long holders get to finish their step; then the window is granted, and the grant names who is missing."""
    max_length_s: float = 10.0
    max_share: float = 0.5
    """Largest share of the wall time, asking included, that windows take of a resource that somebody holds."""


class _Window(msgspec.Struct):
    request: msg.QuietRequest
    worker_id: str
    asked_at: float
    """When the bench asked."""
    opened_at: float = 0.0
    """When the holders were asked."""
    granted_at: float | None = None
    awaited: set[str] = msgspec.field(default_factory=set)
    missing: list[str] = msgspec.field(default_factory=list)
    paused: set[str] = msgspec.field(default_factory=set)
    """Holders that were told to pause and must be told to resume."""
    idle: set[str] = msgspec.field(default_factory=set)
    """Holders that had nothing to do."""


class QuietCost(msgspec.Struct):
    """What windows have cost on one resource so far."""

    first_at: float
    windows: int = 0
    incomplete: int = 0
    """Granted although some holder had not answered."""
    expired: int = 0
    """Ended by their length, not by the bench."""
    held_s: float = 0.0
    """Wall time in which holders with work stood still or were asked to."""
    waited_s: float = 0.0
    """What the benches waited for their grants, all together."""
    held_s_by_bench: dict[str, float] = msgspec.field(default_factory=dict)


class _Resource:
    def __init__(self, now: float) -> None:
        self.queue: OrderedDict[str, _Window] = OrderedDict()
        """By bench."""
        self.window: _Window | None = None
        self.benches: set[str] = set()
        """Workers that have asked for a window."""
        self.rest_until = now
        self.owed_s: dict[str, float] = {}
        """By bench, a window that took nothing from anybody, as far as is known."""
        self.cost = QuietCost(now)

    def charge(self) -> float:
        """What is owed is counted as cost; how much it was."""
        owed_s, self.owed_s = self.owed_s, {}
        by_bench = self.cost.held_s_by_bench
        for bench, held_s in owed_s.items():
            self.cost.held_s += held_s
            by_bench[bench] = by_bench.get(bench, 0.0) + held_s
        return sum(owed_s.values())


def resources_of(caps: Mapping[str, str]) -> frozenset[str]:
    """The resources that a worker names in its Hello."""
    return frozenset(name.strip() for name in caps.get(SHARES, "").split(",") if name.strip())


class QuietDesk:
    """The broker's side; see the module's docstring.

    Example::

        desk = QuietDesk()
        desk.hello("learner", {"shares": "gpu0"}, now=0.0)
        desk.request("bench", QuietRequest("w1", "gpu0", 2.0), now=1.0)   # [("learner", Pause("w1", "gpu0", 7.0))]
        desk.paused("learner", Paused("w1"), now=1.2)                     # [("bench", QuietGrant("w1", …))]
        desk.done("bench", QuietDone("w1"), now=2.0)                      # [("learner", Resume("w1"))]
    """

    def __init__(self, options: QuietOptions | None = None) -> None:
        self.options = options or QuietOptions()
        self._holders: dict[str, frozenset[str]] = {}
        self._resources: dict[str, _Resource] = {}

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────────

    def hello(self, worker_id: str, caps: Mapping[str, str], now: float) -> Sends:
        """A worker has come, or come again: a holder that comes into an open window joins it."""
        named = resources_of(caps)
        if named:
            self._holders[worker_id] = named
        else:
            self._holders.pop(worker_id, None)
        out: Sends = []
        for name in sorted(named):
            resource = self._resources.get(name)
            if resource is not None and resource.window is not None and resource.window.worker_id != worker_id:
                resource.window.paused.add(worker_id)
                out.append((worker_id, self._pause(resource.window, now)))
        return out

    def gone(self, worker_id: str, now: float) -> Sends:
        """A worker has left: nobody waits for it any more, and its windows end."""
        self._holders.pop(worker_id, None)
        out: Sends = []
        for resource in self._resources.values():
            resource.queue.pop(worker_id, None)
            resource.benches.discard(worker_id)
            window = resource.window
            if window is None:
                continue
            window.paused.discard(worker_id)
            window.awaited.discard(worker_id)
            if window.worker_id == worker_id:
                out += self._close(resource, now)
        return [*out, *self.tick(now)]

    def request(self, worker_id: str, request: msg.QuietRequest, now: float) -> Sends:
        """A bench asks, or asks again because nothing came."""
        resource = self._resources.setdefault(request.resource, _Resource(now))
        window = resource.window
        if window is not None and window.worker_id == worker_id:
            if window.request.request_id == request.request_id:
                return [] if window.granted_at is None else [(worker_id, self._grant(window, now))]
            out = self._close(resource, now)  # the end of the former one was lost
        else:
            out = []
        known = resource.queue.get(worker_id)
        asked_at = known.asked_at if known is not None else now
        resource.queue[worker_id] = _Window(request, worker_id, asked_at)
        resource.benches.add(worker_id)
        if resource.window is not None:
            resource.window.awaited.discard(worker_id)
        return [*out, *self.tick(now)]

    def paused(self, worker_id: str, paused: msg.Paused, now: float) -> Sends:
        for resource in self._resources.values():
            if resource.window is not None and resource.window.request.request_id == paused.window_id:
                resource.window.awaited.discard(worker_id)
                if paused.is_idle:
                    resource.window.idle.add(worker_id)
        return self.tick(now)

    def done(self, worker_id: str, done: msg.QuietDone, now: float) -> Sends:
        """A bench has what it needs, or does not want to wait any longer."""
        out: Sends = []
        for resource in self._resources.values():
            waiting = resource.queue.get(worker_id)
            if waiting is not None and waiting.request.request_id == done.request_id:
                del resource.queue[worker_id]
            window = resource.window
            if window is not None and (window.worker_id, window.request.request_id) == (worker_id, done.request_id):
                out += self._close(resource, now)
        return [*out, *self.tick(now)]

    def tick(self, now: float) -> Sends:
        """What is due by now."""
        out: Sends = []
        for name, resource in self._resources.items():
            out += self._expire(resource, now)
            if resource.window is None and resource.queue and now >= resource.rest_until:
                out += self._open(name, resource, now)
            window = resource.window
            if window is None or window.granted_at is not None:
                continue
            if not window.awaited or now >= window.opened_at + self.options.answer_s:
                out += self._granted(resource, window, now)
        return out

    def due(self) -> float | None:
        """When `tick` has something to do next, if nobody says anything; None: nothing then either."""
        return min(
            (at for resource in self._resources.values() if (at := self._due_of(resource)) is not None), default=None
        )

    def _due_of(self, resource: _Resource) -> float | None:
        window = resource.window
        if window is None:
            return resource.rest_until if resource.queue else None
        if window.granted_at is None:
            return window.opened_at + self.options.answer_s
        return window.granted_at + self._length_s(window)

    def drain(self, now: float) -> Sends:
        """The broker stops: everybody goes on."""
        return [send for resource in self._resources.values() for send in self._close(resource, now)]

    # ── the ways of a window ──────────────────────────────────────────────────────────────────────────────────

    def _open(self, name: str, resource: _Resource, now: float) -> Sends:
        worker_id, window = resource.queue.popitem(last=False)
        holders = {holder for holder, held in self._holders.items() if name in held and holder != worker_id}
        window.opened_at, window.awaited, window.paused = now, holders - resource.queue.keys(), set(holders)
        resource.window = window
        return [(holder, self._pause(window, now)) for holder in sorted(holders)]

    def _granted(self, resource: _Resource, window: _Window, now: float) -> Sends:
        window.granted_at = now
        window.missing = sorted(window.awaited)
        resource.cost.windows += 1
        resource.cost.incomplete += bool(window.missing)
        resource.cost.waited_s += now - window.asked_at
        return [(window.worker_id, self._grant(window, now))]

    def _expire(self, resource: _Resource, now: float) -> Sends:
        window = resource.window
        if window is None or window.granted_at is None or now < window.granted_at + self._length_s(window):
            return []
        resource.cost.expired += 1
        return self._close(resource, now)

    def _close(self, resource: _Resource, now: float) -> Sends:
        window, resource.window = resource.window, None
        if window is None:
            return []
        holders = window.paused - resource.benches
        at_work = holders - window.idle
        if not at_work:
            resource.owed_s.clear()
        if holders:
            before_s = resource.owed_s.get(window.worker_id, 0.0)
            resource.owed_s[window.worker_id] = before_s + now - window.opened_at
        if at_work:
            resource.rest_until = now + resource.charge() * (1 / self.options.max_share - 1)
        return [(holder, msg.Resume(window.request.request_id)) for holder in sorted(window.paused)]

    def _length_s(self, window: _Window) -> float:
        return min(window.request.length_s, self.options.max_length_s)

    def _pause(self, window: _Window, now: float) -> msg.Pause:
        """Holders resume by themselves after the longest time that the window may take from now on."""
        latest = (
            window.opened_at + self.options.answer_s if window.granted_at is None else window.granted_at
        ) + self._length_s(window)
        return msg.Pause(window.request.request_id, window.request.resource, max(0.0, latest - now))

    def _grant(self, window: _Window, now: float) -> msg.QuietGrant:
        assert window.granted_at is not None
        left_s = max(0.0, window.granted_at + self._length_s(window) - now)
        waited_s = window.granted_at - window.asked_at
        return msg.QuietGrant(window.request.request_id, window.request.resource, left_s, waited_s, window.missing)

    # ── what it knows of itself ───────────────────────────────────────────────────────────────────────────────

    def costs(self) -> dict[str, QuietCost]:
        """By resource, windows that have ended."""
        return {name: resource.cost for name, resource in self._resources.items()}

    def stats(self, now: float) -> dict[str, dict[str, object]]:
        """As written to `metrics/system.jsonl`; `share` is the share of wall time since the first request."""
        out: dict[str, dict[str, object]] = {}
        for name, resource in self._resources.items():
            elapsed_s = now - resource.cost.first_at
            share = resource.cost.held_s / elapsed_s if elapsed_s > 0 else 0.0
            counted: dict[str, object] = msgspec.to_builtins(resource.cost)
            out[name] = {**counted, "share": round(share, 4), "waiting": len(resource.queue)}
        return out


class Pauses:
    """A holder's side: which windows it stands still for, each with an end by its own clock.

    `pause` and `resume` take what the broker said; the owner asks `is_open` before each step and `to_answer` when it
    stands still.
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._unanswered: dict[str, None] = {}

    def pause(self, pause: msg.Pause, now: float) -> None:
        self._until[pause.window_id] = now + pause.length_s
        self._unanswered[pause.window_id] = None

    def resume(self, window_id: str) -> None:
        self._until.pop(window_id, None)
        self._unanswered.pop(window_id, None)

    def is_open(self, now: float) -> bool:
        """Whether a step may begin."""
        for window_id in [window_id for window_id, until in self._until.items() if until <= now]:
            self.resume(window_id)
        return not self._until

    def left_s(self, now: float) -> float:
        """Until it is open again at the latest."""
        return max((until - now for until in self._until.values()), default=0.0)

    def to_answer(self, is_idle: bool = False) -> list[msg.Paused]:
        """Once for each window: what is to be said now that nothing runs. `is_idle`: nothing would, either."""
        answers = [msg.Paused(window_id, is_idle) for window_id in self._unanswered]
        self._unanswered.clear()
        return answers
