"""A plain ZeroMQ socket on an asyncio loop: drained in batches without an await per message.

The descriptor of a ZeroMQ socket is edge-triggered and any call on the socket may swallow the edge. So whoever sends or
stops draining early looks at `EVENTS` again, and a timer calls `poll` as the last resort.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from protocols import framing
from protocols.messages import Message
from protocols.sockets import ClientKeys, Socket, connect_dealer

BATCH = 256
# Plain integers: combining pyzmq's enum flags costs more than the send itself.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)


def drain(socket: Socket, limit: int = BATCH) -> list[list[bytes]]:
    """What has arrived, at most `limit` messages."""
    batch: list[list[bytes]] = []
    receive = socket.recv_multipart
    try:
        while len(batch) < limit:
            batch.append(receive(_NOBLOCK))
    except zmq.Again:
        pass
    return batch


def send_frames(socket: Socket, frames: list[bytes]) -> None:
    """Send one message without waiting; raises `zmq.Again` before the first frame or not at all."""
    send = socket.send
    for frame in frames[:-1]:
        send(frame, _NOBLOCK_MORE)
    send(frames[-1], _NOBLOCK)


def readable(socket: Socket) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class Channel:
    """A connected DEALER whose messages go to `on_message`; frames that are none are counted and dropped."""

    def __init__(
        self,
        address: str,
        route: bytes,
        on_message: Callable[[Message, list[bytes]], None],
        keys: ClientKeys | None = None,
    ) -> None:
        self.malformed = 0
        self._on_message = on_message
        self._context: zmq.Context[Socket] = zmq.Context()
        try:
            self._socket = connect_dealer(self._context, address, route, keys)
        except ValueError:
            self._context.term()
            raise
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._closed = False
        self._loop.add_reader(self._socket.fileno(), self._drain)

    def send(self, message: Message, payload: list[bytes]) -> bool:
        """False where the socket can't take more now; the sessions send again what matters."""
        if self._closed:
            return False
        try:
            send_frames(self._socket, framing.encode(message, payload))
        except zmq.Again:
            return False
        self._look_again()
        return True

    def poll(self) -> None:
        if not self._closed and readable(self._socket):
            self._drain()

    def close(self) -> None:
        """Close after what was sent has left, at most the sockets' linger time."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._context.term()

    def _look_again(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        batch = drain(self._socket)
        if batch:
            self._look_again()
        for frames in batch:
            try:
                message, payload = framing.decode(frames)
            except framing.FrameError:
                self.malformed += 1
            else:
                self._on_message(message, payload)
