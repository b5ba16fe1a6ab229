"""A stream proxy before the broker's socket files: it can be slow, and it can be cut. It knows nothing of ZeroMQ.

::

    worker ──▶ sockets/work ── Link: wait, delay ──▶ sockets/work.behind ◀── broker (told by KBRL_BROKER_BEHIND)

A peer is known by the pid that the kernel gives for its connection, so one service can be cut off and the others not.
What is cut is held back, not dropped: on a real network TCP would send it again once the cable is whole. Peers close
what has been silent for too long and come again; they find the cut as they left it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from kbrl_async.lab.chaos.processes import instance_of

CHUNK = 1 << 16
IN_FLIGHT = 64
"""Chunks that a slow link holds; then it reads no more, as a full window would."""
_CREDENTIALS = struct.Struct("3i")


class Link:
    """`with Link([(front, behind), …]) as link: link.delay("learner", 0.1); link.cut("sampler"); link.heal("sampler")`.

    Runs in a thread of its own. Instances are matched by service (`learner`) or whole name (`compile_farm.2`).
    """

    def __init__(self, sockets: Sequence[tuple[Path, Path]], name_of: Callable[[int], str] = instance_of) -> None:
        self._sockets = list(sockets)
        self._name_of = name_of
        self._delays: dict[str, float] = {}
        self._cuts: dict[str, asyncio.Event] = {}
        self.carried = 0
        """Bytes, both ways."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._ready: Future[None] = Future()

    def __enter__(self) -> Link:
        self._thread.start()
        self._ready.result(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        for front, _behind in self._sockets:
            front.unlink(missing_ok=True)

    def delay(self, target: str, seconds: float) -> None:
        self._delays[target] = seconds

    def quicken(self, target: str) -> None:
        self._delays.pop(target, None)

    def cut(self, target: str) -> None:
        self._loop.call_soon_threadsafe(self._cuts.setdefault, target, asyncio.Event())

    def heal(self, target: str) -> None:
        def open_again() -> None:
            gate = self._cuts.pop(target, None)
            if gate is not None:
                gate.set()

        self._loop.call_soon_threadsafe(open_again)

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            servers = self._loop.run_until_complete(self._listen())
        except OSError as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        self._loop.run_forever()
        for server in servers:
            server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _listen(self) -> list[asyncio.Server]:
        servers = []
        for front, behind in self._sockets:
            front.unlink(missing_ok=True)
            servers.append(await asyncio.start_unix_server(self._accept(behind), path=front))
            front.chmod(0o600)
        return servers

    def _accept(self, behind: Path) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            name = self._name_of(_peer(writer))
            try:
                back_reader, back_writer = await asyncio.open_unix_connection(str(behind))
            except OSError:
                writer.close()  # the broker is away; the peer comes again
                return
            pumps = [
                asyncio.ensure_future(self._pump(name, *ends))
                for ends in ((reader, back_writer), (back_reader, writer))
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                for end in (writer, back_writer):
                    end.close()

        return carry

    async def _pump(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(IN_FLIGHT)
        filling = asyncio.ensure_future(self._fill(name, reader, held))
        try:
            with contextlib.suppress(OSError):
                while True:
                    due, chunk = await held.get()
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    await self._open(name)
                    if not chunk:
                        return
                    writer.write(chunk)
                    await writer.drain()
                    self.carried += len(chunk)
        finally:
            filling.cancel()

    async def _fill(self, name: str, reader: asyncio.StreamReader, held: asyncio.Queue[tuple[float, bytes]]) -> None:
        chunk = b"-"
        while chunk:
            try:
                chunk = await reader.read(CHUNK)
            except OSError:
                chunk = b""
            delay = max((self._delays.get(key, 0.0) for key in _keys(name)), default=0.0)
            await held.put((time.monotonic() + delay, chunk))

    async def _open(self, name: str) -> None:
        while gates := [self._cuts[key] for key in _keys(name) if key in self._cuts]:
            await gates[0].wait()


def _keys(name: str) -> tuple[str, str]:
    """The instance and its service."""
    return name, name.rpartition(".")[0] or name


def _peer(writer: asyncio.StreamWriter) -> int:
    connection: socket.socket = writer.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid
