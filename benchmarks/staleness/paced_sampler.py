"""A sampler whose decode steps take at least `STEP_MS`, as those of a larger model do, whatever they compute here.

The service itself, with its own engine and policy: a step advances all its rows by a token, then waits for the rest of
its time, in which the host's cores are free, as they are while a GPU decodes. `async-vs-sync` starts it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from services.runtime.nanny import run_service
from services.runtime.service import choose_run

STEP_MS = "STEP_MS"


def paced(tick: Callable[[], None], step_s: float) -> Callable[[], None]:
    """`tick`, which follows each step, no sooner than `step_s` after the last one; an idle engine owes nothing."""
    last = time.monotonic()

    def waiting() -> None:
        nonlocal last
        time.sleep(max(0.0, last + step_s - time.monotonic()))
        last = time.monotonic()
        tick()

    return waiting


async def main(stop: asyncio.Event) -> None:
    from kbrl_async.sampling.transformers import engine as transformers
    from services.sampler.__main__ import main as sample

    real = transformers.TransformersEngine

    def engine(*given: Any, tick: Callable[[], None], **named: Any) -> transformers.TransformersEngine:
        return real(*given, tick=paced(tick, float(os.environ[STEP_MS]) / 1e3), **named)

    transformers.TransformersEngine = engine  # type: ignore[assignment, misc]
    await sample(stop)


if __name__ == "__main__":
    run_service("sampler", main, choose_run)
