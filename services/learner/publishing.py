"""Versions on their way to the samplers, beside the next update.

::

    update ─ snapshot ─▶ begin ─▶ offered directly (`weights.direct`) ─▶ samplers
                              └─▶ [thread] files ─ then ─▶ collect the old ones, upload
    next update …             ◀─ free: written, and read by nobody any more

Invariants
* At most one version is on its way: the next snapshot waits for it, so that memory holds one copy.
* A version that can't be written ends the learner: samplers wait for it, and no batch would come any more.
"""

from __future__ import annotations

import asyncio
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

    def __init__(self, policies: Path, sender: Sender | None = None) -> None:
        self._sender = sender
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
        self._writing = self._pool.submit(self._write, pending, then)

    def free(self) -> None:
        """Waits for the version before; raises what has kept it from the disk."""
        if self._writing is not None:
            self._writing.result()
        if self._sender is not None:
            self._sender.idle()

    async def failed(self) -> None:
        """Raises as soon as a version can't be written; never returns."""
        await asyncio.wrap_future(self._failed)

    def close(self) -> None:
        """The last version is on disk."""
        self._pool.shutdown()  # first: other ranks' rows of it come by the sender's store
        if self._sender is not None:
            self._sender.close()

    def _write(self, pending: Pending, then: Callable[[], None]) -> None:
        try:
            pending.write()
            then()
        except BaseException as error:
            self._failed.set_exception(error)
            raise
