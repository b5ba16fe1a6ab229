"""Versions on their way to the samplers, beside the next update.

::

    update ─ snapshot ─▶ begin ─▶ offered directly (`weights.direct`) ─▶ samplers
                              └─▶ [thread] files ─ then ─▶ collect the old ones, upload
    next update …             ◀─ free: written, and read by nobody any more

Invariants
* At most one version is on its way: the next snapshot waits for it, so that memory holds one copy. But where samplers
  get versions directly (`skips`), the next one only waits for who reads the last: what is not begun to be written when
  a newer version comes is never written, memory holds two copies, and the newest is always on disk in the end.
* A version that can't be written ends the learner: samplers wait for it, and no batch would come any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from kbrl_async.durable import write_bytes
from kbrl_async.learning.policies.versions import Pending
from kbrl_async.weights import MEETING
from kbrl_async.weights.direct import Sender


class Publisher:
    """One thread that writes versions; `sender` offers them before."""

    def __init__(self, policies: Path, sender: Sender | None = None, *, skips: bool = False) -> None:
        """`skips`: with a sender, a version need not be on disk before the next one comes."""
        self._sender, self._skips = sender, skips and sender is not None
        self._lock = threading.Lock()
        self._next: tuple[Pending, Callable[[], None]] | None = None
        self._written = -1
        self._pool = ThreadPoolExecutor(1, "publisher")
        self._writing: Future[None] | None = None
        self._failed: Future[None] = Future()
        meeting = policies / MEETING
        if sender is None:
            meeting.unlink(missing_ok=True)  # of a process before this one
        else:
            policies.mkdir(parents=True, exist_ok=True)
            write_bytes(meeting, msgspec.json.encode(sender.meeting))

    def begin(self, pending: Pending, then: Callable[[], None]) -> None:
        """After `free`. `then` is called when the version is on disk, in the thread."""
        if self._sender is not None and pending.weights is not None:
            self._sender.offer(pending.manifest, pending.weights, pending.index)
        with self._lock:
            self._next = pending, then
        self._writing = self._pool.submit(self._write_newest)

    def free(self) -> frozenset[int]:
        """Waits until the memory of versions before can be used again, but for that of those which it returns: they are
        being written. Raises what has kept one from the disk. A version follows."""
        if self._failed.done():
            self._failed.result()
        if self._writing is not None and not self._skips:
            self._writing.result()
        if self._sender is not None:
            self._sender.idle()
        with self._lock:
            self._next = None
            return frozenset({self._written} - {-1})

    @property
    def is_done(self) -> bool:
        """The last version that was begun is on disk, or its writing has failed."""
        return self._writing is None or self._writing.done()

    async def failed(self) -> None:
        """Raises as soon as a version can't be written; never returns."""
        await asyncio.wrap_future(self._failed)

    def finish(self) -> None:
        """Returns when the last version is on disk: until then other ranks must give their rows of it."""
        self._pool.shutdown()

    def close(self) -> None:
        """The last version is on disk, and nobody is sent any more."""
        self.finish()
        if self._sender is not None:
            self._sender.close()

    def _write_newest(self) -> None:
        """The version that waits, if a newer one has not taken its place."""
        with self._lock:
            if self._next is None:
                return
            (pending, then), self._next = self._next, None
            self._written = pending.manifest.version
        try:
            pending.write()
            then()
            with self._lock:
                self._written = -1
        except BaseException as error:
            self._failed.set_exception(error)
            raise
