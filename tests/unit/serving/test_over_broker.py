"""What a service asks of the farms and benches of a broker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kbrl_async.errors import InfraError
from kbrl_async.serving.documents import Ask, Job
from protocols.records import Purpose
from protocols.rollout import Record
from services.verification.executors import OverBroker, ServedProblems
from tests.candidates import affine, elementwise


class Unreachable:
    """A broker that takes a task's frames and nothing more."""

    async def submit(self, task_id: str, stage: str, frames: list[bytes], *_: object) -> None:
        self.frames = frames
        raise InfraError("gone")


def test_who_asks_for_a_verdict_is_not_training() -> None:
    """There benches spare slow kernels most secret sets, and call one right that another verdict calls wrong."""
    broker: Any = Unreachable()
    ask = Ask(elementwise("2 * x[i] + 1"), reference=affine(), backend="c", response=False)
    with pytest.raises(InfraError):
        asyncio.run(OverBroker(broker, ServedProblems("", "cpu")).verify(Job("j1", "me", ask, 0.0)))
    assert Record.decode(broker.frames).request.purpose is Purpose.EVAL
