"""The asyncio shell of a producer: submissions that are awaited until the broker has journaled them.

It survives restarts of the broker: what has no answer yet is sent again, with back-off. Cancelling `submit` or `retire`
stops the repetition; the task may have been accepted all the same.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable

from protocols.messages import Message, Stage, Submit
from protocols.session import Emit, ProducerEffect, ProducerSession, Submitted
from protocols.sockets import ClientKeys
from services.runtime.channel import Channel

TICK_S = 0.05


class Producer:
    """Use as `async with Producer(address) as producer: await producer.submit(...)`."""

    def __init__(
        self,
        address: str,
        *,
        silence_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        self._address = address
        self._keys = keys
        self._clock = clock
        self._session = ProducerSession(rng or random.Random(), silence_s)
        self._channel: Channel | None = None
        self._waiting: dict[tuple[str, str], asyncio.Future[bool]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pending(self) -> int:
        """Submissions and retirements without an answer."""
        return self._session.pending

    async def __aenter__(self) -> Producer:
        self._channel = Channel(self._address, secrets.token_hex(8).encode(), self._received, self._keys)
        self._tick()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for future in self._waiting.values():
            future.cancel()
        if self._channel is not None:
            self._channel.close()

    async def submit(
        self,
        task_id: str,
        stage: str,
        frames: list[bytes],
        group_id: str = "",
        max_staleness: int = -1,
        needs: str = "",
    ) -> bool:
        """Return when the task is in the broker's journal: True if it is new, False if it was known already."""
        submit = Submit(task_id, Stage(stage), group_id, max_staleness, needs)
        future = self._expect(("submit", task_id))
        try:
            self._perform(self._session.submit(submit, frames, self._clock()))
            return await asyncio.shield(future)
        finally:
            if not future.done():
                self._session.cancel(task_id)

    async def retire(self, group_id: str) -> None:
        """Return when the broker has forgotten the group and revoked what ran of it."""
        future = self._expect(("retire", group_id))
        self._perform(self._session.retire(group_id, self._clock()))
        await asyncio.shield(future)

    def _expect(self, key: tuple[str, str]) -> asyncio.Future[bool]:
        future = self._waiting.get(key)
        if future is None or future.done():
            future = self._waiting[key] = asyncio.get_running_loop().create_future()
        return future

    def _received(self, message: Message, _: list[bytes]) -> None:
        self._perform(self._session.handle(message, self._clock()))

    def _perform(self, effects: list[ProducerEffect]) -> None:
        assert self._channel is not None, "enter the producer first"
        for effect in effects:
            if isinstance(effect, Emit):
                self._channel.send(effect.message, effect.payload)
            elif isinstance(effect, Submitted):
                self._resolve(("submit", effect.task_id), not effect.duplicate)
            else:
                self._resolve(("retire", effect.group_id), True)

    def _resolve(self, key: tuple[str, str], value: bool) -> None:
        future = self._waiting.pop(key, None)
        if future is not None and not future.done():
            future.set_result(value)

    def _tick(self) -> None:
        assert self._channel is not None
        self._channel.poll()
        self._perform(self._session.tick(self._clock()))
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
