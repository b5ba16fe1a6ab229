"""An actor that takes results and hands out work: its worker and its pump run side by side until one of them ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path

from kbrl_async.learning.policies import manifests
from services.runtime.worker import Worker


async def until_policy(policies: Path, stop: asyncio.Event) -> bool:
    """Waits for the first published policy; False where `stop` came first."""
    while manifests.newest(policies) is None:
        if stop.is_set():
            return False
        await asyncio.sleep(0.2)
    return True


async def run_beside(worker: Worker, pump: Coroutine[None, None, None], stop: asyncio.Event) -> bool:
    """True when the pump has ended by itself: all is done. Raises what either of them raised."""
    leaving = asyncio.Event()
    working = asyncio.create_task(worker.run(leaving))
    pumping = asyncio.create_task(pump)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({working, pumping, stopping}, return_when=asyncio.FIRST_COMPLETED)
    leaving.set()
    stopping.cancel()
    if not pumping.done():
        pumping.cancel()
    await working
    if not pumping.done() or pumping.cancelled():
        return False
    pumping.result()
    return True


async def watched(work: asyncio.Task[None], helpers: list[asyncio.Task[None]]) -> None:
    """Until `work` ends; what a helper raises ends it early. All of them are over then.

    So a worker has left before its engine closes: it says Bye for what it holds, and no task loses an attempt.
    """
    waiting = {work, *helpers}
    try:
        while not work.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in (work, *helpers):
            task.cancel()
        await asyncio.gather(work, *helpers, return_exceptions=True)
