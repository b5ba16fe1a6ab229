"""Artifacts to and from the broker, on a worker's loop: `await transfers.fetch(address)`, `… .send(content)`.

The machines are in `protocols.transfer`; here are the waiting, the time limit and the sending.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kbrl_async.errors import InfraError
from protocols.messages import Chunk, Kept, Message
from protocols.transfer import Download, Upload

PATIENCE_S = 180.0
"""For one artifact; then the task is given back and tried elsewhere."""


T = TypeVar("T", Download, Upload)


class _Shared(Generic[T]):
    """One transfer and those who wait for it: twins of a group want the same artifact at the same time."""

    def __init__(self, transfer: T) -> None:
        self.transfer: T = transfer
        self.waiters = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Transfers:
    """Driven by its worker: `handle` for what has come, `tick` several times a second."""

    def __init__(
        self, say: Callable[[Message, list[bytes]], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._clock = clock
        self._downloads: dict[str, _Shared[Download]] = {}
        self._uploads: dict[str, _Shared[Upload]] = {}

    async def fetch(self, address: str) -> bytes:
        """The artifact with this sha256. Raises `InfraError` where it can't be had."""
        if address not in self._downloads:
            self._downloads[address] = _Shared(Download(address))
        download = await self._wait(self._downloads, address)
        if download.content is None:
            raise InfraError(download.failure or "an artifact did not come in time", "It is built again")
        return download.content

    async def send(self, content: bytes) -> str:
        """Return the address once the broker has all of it. Raises `InfraError` where it does not take it."""
        offered = Upload(content)
        if offered.address not in self._uploads:
            self._uploads[offered.address] = _Shared(offered)
        upload = await self._wait(self._uploads, offered.address)
        if not upload.ended:
            raise InfraError(upload.failure or "an artifact could not be handed over in time", "It is built elsewhere")
        return upload.address

    async def _wait(self, transfers: dict[str, _Shared[T]], address: str) -> T:
        """The transfer, ended or out of time. It goes on until nobody waits for it any more."""
        shared = transfers[address]
        shared.waiters += 1
        self.tick()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await asyncio.shield(shared.done)
        finally:
            shared.waiters -= 1
            if shared.waiters == 0:
                del transfers[address]
        return shared.transfer

    def handle(self, message: Message, payload: list[bytes]) -> None:
        if isinstance(message, Chunk) and message.address in self._downloads:
            self._downloads[message.address].transfer.handle(message, b"".join(payload))
        elif isinstance(message, Kept) and message.address in self._uploads:
            self._uploads[message.address].transfer.handle(message, self._clock())
        else:
            return
        self.tick()

    def tick(self) -> None:
        now = self._clock()
        for down in self._downloads.values():
            for want in down.transfer.tick(now):
                self._say(want, [])
            _resolve(down.done, down.transfer.ended)
        for up in self._uploads.values():
            for offer, payload in up.transfer.tick(now):
                self._say(offer, payload)
            _resolve(up.done, up.transfer.ended or bool(up.transfer.failure))


def _resolve(done: asyncio.Future[None], ended: bool) -> None:
    if ended and not done.done():
        done.set_result(None)
