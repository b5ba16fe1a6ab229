"""A worker complains of a broker that does not answer, from when it has begun to ask."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protocols import messages as msg
from services.runtime import worker
from services.runtime.worker import HandlerOutcome, Worker


async def nothing(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
    return HandlerOutcome()


@pytest.mark.parametrize(("asked_s", "complains"), [(1.0, False), (30.0, True)])
def test_what_went_before_the_first_question_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_s: float, complains: bool
) -> None:
    told: list[str] = []
    monkeypatch.setattr(worker, "tell", lambda address, *_: told.append(address))
    now = [0.0]

    async def main() -> None:
        lonely = Worker(f"ipc://{tmp_path}/nobody", "sampler.1", ["generate"], 1, nothing, clock=lambda: now[0])
        now[0] += 240.0  # the policy is made
        stop = asyncio.Event()
        running = asyncio.create_task(lonely.run(stop))
        await asyncio.sleep(0.3)
        now[0] += asked_s
        await asyncio.sleep(0.3)
        stop.set()
        await asyncio.wait_for(running, 120)

    asyncio.run(main())
    assert bool(told) is complains
