"""What an actor has under way to the broker and the archive while it goes on; no failure of it goes unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class Submissions:
    """A failure sets `wake`, so that the pump that waits for it comes to `check` at once."""

    def __init__(self, wake: asyncio.Event) -> None:
        self._wake = wake
        self._running: set[asyncio.Task[object]] = set()
        self._failure: BaseException | None = None

    def begin(self, submission: Coroutine[None, None, object]) -> None:
        task = asyncio.create_task(submission)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def check(self) -> None:
        """Raises what a submission raised."""
        if self._failure is not None:
            raise self._failure

    async def finish(self) -> None:
        """Until all are through. Raises what one of them raised."""
        await asyncio.gather(*self._running)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._wake.set()
