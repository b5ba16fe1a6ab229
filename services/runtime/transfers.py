"""Artifacts to and from the broker, on a worker's loop: `await transfers.fetch(address)`, `… .send(content)`.

The machines are in `protocols.transfer`; here are the waiting, the time limit and the sending.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kbrl_async.errors import InfraError
from protocols.messages import Chunk, Kept, Message
from protocols.transfer import Download, Upload

PATIENCE_S = 180.0
"""For one artifact; then the task is given back and tried elsewhere."""


class Transfers:
    """Driven by its worker: `handle` for what has come, `tick` several times a second."""

    def __init__(
        self, say: Callable[[Message, list[bytes]], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._clock = clock
        self._downloads: dict[str, tuple[Download, asyncio.Future[None]]] = {}
        self._uploads: dict[str, tuple[Upload, asyncio.Future[None]]] = {}

    async def fetch(self, address: str) -> bytes:
        """The artifact with this sha256. Raises `InfraError` where it can't be had."""
        download, done = self._downloads.get(address) or (Download(address), self._future())
        self._downloads[address] = download, done
        try:
            await self._wait(done, download)
        finally:
            self._downloads.pop(address, None)
        if download.content is None:
            raise InfraError(download.failure or "an artifact did not come in time", "It is built again")
        return download.content

    async def send(self, content: bytes) -> str:
        """Return the address once the broker has all of it. Raises `InfraError` where it does not take it."""
        upload = Upload(content)
        known = self._uploads.get(upload.address)
        upload, done = known or (upload, self._future())
        self._uploads[upload.address] = upload, done
        try:
            await self._wait(done, upload)
        finally:
            self._uploads.pop(upload.address, None)
        if not upload.ended:
            raise InfraError(upload.failure or "an artifact could not be handed over in time", "It is built elsewhere")
        return upload.address

    async def _wait(self, done: asyncio.Future[None], transfer: Download | Upload) -> None:
        self.tick()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.shield(done)
        except TimeoutError:
            return

    def handle(self, message: Message, payload: list[bytes]) -> None:
        if isinstance(message, Chunk) and message.address in self._downloads:
            self._downloads[message.address][0].handle(message, b"".join(payload))
        elif isinstance(message, Kept) and message.address in self._uploads:
            self._uploads[message.address][0].handle(message, self._clock())
        else:
            return
        self.tick()

    def tick(self) -> None:
        now = self._clock()
        for download, done in self._downloads.values():
            for want in download.tick(now):
                self._say(want, [])
            _resolve(done, download.ended)
        for upload, done in self._uploads.values():
            for offer, payload in upload.tick(now):
                self._say(offer, payload)
            _resolve(done, upload.ended or bool(upload.failure))

    def _future(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


def _resolve(done: asyncio.Future[None], ended: bool) -> None:
    if ended and not done.done():
        done.set_result(None)
