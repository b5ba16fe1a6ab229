"""An OpenAI-compatible server that misbehaves on demand, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec


class Reply(msgspec.Struct, frozen=True):
    status: int = 200
    body: Any = None
    headers: dict[str, str] = {}
    hangs: bool = False
    """Say nothing until the client hangs up."""


class Seen(msgspec.Struct):
    """One request."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


def chat(text: str = "hello", **choice: Any) -> Reply:
    given = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop", **choice}
    return Reply(body={"choices": [given], "usage": {"prompt_tokens": 100, "completion_tokens": 20}})


def error(status: int, message: str = "no", code: str = "", **headers: str) -> Reply:
    return Reply(status, {"error": {"message": message, "code": code}}, headers)


class FakeEndpoint:
    """`replies` are given in turn, the last one for ever; `models` is what GET /models lists."""

    def __init__(self) -> None:
        self.replies: list[Reply] = [chat()]
        self.models: Reply = Reply(body={"data": [{"id": "m"}]})
        self.seen: list[Seen] = []
        self.hung_up = asyncio.Event()
        """A client has left before its answer."""
        self.most_at_once = 0
        self._now = 0
        self._answered = 0
        self.hold: Callable[[], Any] | None = None
        self.base_url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = head[0].split()
        if method == "GET":
            await self._write(writer, self.models)
            return True
        self.seen.append(Seen(path, headers, json.loads(content)))
        reply = self.replies[min(self._answered, len(self.replies) - 1)]
        self._answered += 1
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            if self.hold is not None:
                await self.hold()
            if reply.hangs:
                if not await reader.read(1):
                    self.hung_up.set()
                return False
            await self._write(writer, reply)
        finally:
            self._now -= 1
        return True

    async def _write(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        lines = [f"HTTP/1.1 {reply.status} X", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in reply.headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()


@contextlib.asynccontextmanager
async def fake_endpoint() -> AsyncIterator[FakeEndpoint]:
    fake, connections = FakeEndpoint(), set[asyncio.Task[None]]()
    server = await asyncio.start_server(lambda *streams: connections.add(accept(fake, *streams)), "127.0.0.1", 0)
    fake.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield fake
    finally:
        server.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


def accept(fake: FakeEndpoint, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> asyncio.Task[None]:
    # a task of our own: the one that asyncio would make complains when it is cancelled
    return asyncio.get_running_loop().create_task(fake.serve(reader, writer))
