"""What the broker tells viewers: a ROUTER of its own that answers `StatusRequest` and understands nothing else.

::

    viewer ─ StatusRequest ─▶ status ROUTER ─ StatusDesk ─▶ StatusReport          (no way to ledger, journal or workers)

Invariants
* A viewer changes nothing: whatever else arrives at this socket is counted and dropped, and the ledger is only read.
* Viewers can't slow the broker down: however many ask, a report is made at most every `FRESH_S`, and a reply that
  can't leave at once is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec
import zmq

from kbrl_async.runs.telemetry import live
from protocols import events as ev
from protocols import framing
from protocols import messages as msg
from protocols.ledger import Ledger
from protocols.sockets import Socket
from services.runtime.channel import drain, readable, send_frames

FRESH_S = 0.2
WINDOW_S = 30.0
LEAST_S = 1.0
BATCH = 64
"""Requests that are answered before the broker's own work gets its turn again."""
KEPT_TROUBLES = 20
MAX_TROUBLE_CHARS = 300
_COUNTED = {
    "expired": "a lease ran out: no heartbeat came any more",
    "poisoned": "a task was given up: it lost its worker too often",
    "unserved": "a task ended because no worker can do what it needs",
}
"""Counters of the ledger whose growth is a trouble, in words."""


class Troubles:
    """The last things that went wrong; the same one again only counts up."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._now = wall_clock
        self._last: deque[msg.TroubleReport] = deque(maxlen=KEPT_TROUBLES)
        self._what, self._repeats = "", 0
        """The last one, without its count, and its count."""
        self._counters: dict[str, int] = {}

    def add(self, who: str, what: str, times: int = 1) -> None:
        what = " ".join(what.split())[:MAX_TROUBLE_CHARS]
        last = self._last[-1] if self._last else None
        if last is not None and (last.who, self._what) == (who, what):
            self._last.pop()
            times += self._repeats
        self._what, self._repeats = what, times
        told = what if times == 1 else f"{what} (×{times})"
        self._last.append(msg.TroubleReport(round(self._now(), 3), who, told))

    def saw(self, event: ev.Event, ledger: Ledger) -> None:
        """Look at an event before the ledger handles it."""
        if isinstance(event, ev.FromWorker) and isinstance(event.message, msg.Nack):
            worker = ledger.pool.by_route.get(event.route)
            self.add(worker.worker_id if worker else "a stranger", f"gave a task back: {event.message.reason}")
        elif isinstance(event, ev.PeerLost):
            worker = ledger.pool.by_route.get(event.route)
            if worker is not None:
                self.add(worker.worker_id, f"is gone without a word; it held {len(worker.leases)} leases")

    def counted(self, counters: Mapping[str, int]) -> None:
        """Look at the ledger's counters now and then."""
        for name, words in _COUNTED.items():
            gained = counters.get(name, 0) - self._counters.get(name, counters.get(name, 0))
            if gained > 0:
                self.add("broker", words, gained)
            self._counters[name] = counters.get(name, 0)

    def listed(self) -> list[msg.TroubleReport]:
        return list(self._last)


class RecentRates:
    """Rates over the last `WINDOW_S`, from reports that were made on the way."""

    def __init__(self) -> None:
        self.reports: deque[msg.StatusReport] = deque()

    def add(self, report: msg.StatusReport) -> None:
        self.reports.append(report)
        while live.elapsed_s(self.reports[0], report) > WINDOW_S:
            self.reports.popleft()

    def of(self, report: msg.StatusReport) -> dict[str, float]:
        """Empty while there is too little to compare with."""
        if not self.reports or live.elapsed_s(self.reports[0], report) < LEAST_S:
            return {}
        return msgspec.structs.asdict(live.rates(self.reports[0], report))


class StatusDesk:
    """Answers viewers. `report` makes a fresh report; its token is filled in here."""

    def __init__(
        self, socket: Socket, report: Callable[[], msg.StatusReport], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._socket = socket
        self._report = report
        self._clock = clock
        self._made = msg.StatusReport()
        self._made_at = float("-inf")
        self.refused = 0
        """Messages that were anything but a request; dropped."""

    def serve(self) -> bool:
        """Answer what is there; True where more waits."""
        for frames in drain(self._socket, BATCH):
            try:
                message, _ = framing.decode(frames[1:])
            except framing.FrameError:
                self.refused += 1
                continue
            if isinstance(message, msg.StatusRequest):
                self._reply(frames[0], message.token)
            else:
                self.refused += 1
        return readable(self._socket)

    def _reply(self, route: bytes, token: str) -> None:
        now = self._clock()
        if now - self._made_at >= FRESH_S:
            self._made, self._made_at = self._report(), now
        answer = msgspec.structs.replace(self._made, token=token)
        try:
            send_frames(self._socket, [route, *framing.encode(answer)])
        except zmq.ZMQError as error:
            # the viewer has gone or does not read: its loss
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
