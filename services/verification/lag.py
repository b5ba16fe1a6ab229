"""How late the event loop comes to what is due: what every question may wait for, before and after its work.

Told apart is what it computed itself meanwhile: the rest is the host's, which had no core for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque


def go_first() -> None:
    """Where the host allows it (root, CAP_SYS_NICE, a limit on `rtprio`) the calling thread need not wait for a core.

    Threads and processes that it starts do as before, and those do the work: an event loop computes for a millisecond
    an answer. On a host with five others for each core this took its latest answers from 130 ms to 3.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


class Lag:
    """Of the last minute; `watch` measures until it is cancelled."""

    EVERY_S = 0.02

    def __init__(self) -> None:
        self._late_ms: deque[tuple[float, float]] = deque(maxlen=round(60 / self.EVERY_S))

    async def watch(self) -> None:
        while True:
            due, computed_s = time.perf_counter() + self.EVERY_S, time.thread_time()
            await asyncio.sleep(self.EVERY_S)
            late_s = max(0.0, time.perf_counter() - due)
            self._late_ms.append((1000 * late_s, 1000 * min(late_s, time.thread_time() - computed_s)))

    def percentiles(self) -> dict[str, float]:
        """Milliseconds; empty before there is anything."""
        if not self._late_ms:
            return {}
        late, own = (sorted(of) for of in zip(*self._late_ms, strict=True))
        at = len(late) * 99 // 100
        return {"p50": round(late[len(late) // 2], 3), "p99": round(late[at], 3), "own_p99": round(own[at], 3)}
