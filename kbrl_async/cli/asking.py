"""A worker's first question, before it is one: what must it do like all others of this run?

It says Hello as somebody who wants no work, hears the Welcome, and leaves.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import zmq

from kbrl_async.errors import HostError, UserError
from protocols import framing
from protocols import messages as msg
from protocols.names import unresolved
from protocols.sockets import AddressError, ClientKeys, Socket, connect_dealer

REPEAT_S = 1.0
LONELY_S = 20.0


def welcome(address: str, keys: ClientKeys | None, worker_id: str, say: Callable[[str], object] = print) -> msg.Welcome:
    """The broker's Welcome; waits for a broker that is not there yet, and says so now and then.

    :raises UserError: the address can't be used.
    :raises HostError: the broker refuses this key.
    """
    context: zmq.Context[Socket] = zmq.Context()
    try:
        socket = connect_dealer(context, address, secrets.token_hex(8).encode(), keys)
    except AddressError as error:
        context.term()
        raise UserError(error.cause, error.cure) from None
    try:
        return _ask(socket, msg.Hello(worker_id, secrets.token_hex(8), [], 0, credit=0), address, say)
    finally:
        socket.close()
        context.term()


def _ask(socket: Socket, hello: msg.Hello, address: str, say: Callable[[str], object]) -> msg.Welcome:
    said_at = time.monotonic()
    while True:
        _send(socket, hello)
        if socket.poll(int(REPEAT_S * 1000)) and (answer := _answer(socket.recv_multipart())) is not None:
            _send(socket, msg.Bye("asked for the settings"))
            return answer
        if time.monotonic() - said_at >= LONELY_S:
            said_at = time.monotonic()
            why = unresolved(address) or "does it run, and is this key on its allow-list?"
            say(f"no answer from the broker at {address} yet: {why}")


def _send(socket: Socket, message: msg.Message) -> None:
    try:
        socket.send_multipart(framing.encode(message), zmq.NOBLOCK)
    except zmq.Again:
        return


def _answer(frames: list[bytes]) -> msg.Welcome | None:
    try:
        message, _ = framing.decode(frames)
    except framing.FrameError:
        return None
    if isinstance(message, msg.Drain) and message.reason.startswith("refused"):
        raise HostError(f"the broker has refused this worker: {message.reason}", "See kbrl keys list on its host")
    return message if isinstance(message, msg.Welcome) else None
