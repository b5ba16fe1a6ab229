"""The entry of a confined child that runs whatever Python the test sends it, and says how that ended."""

from __future__ import annotations

import contextlib
import socket

import msgspec

from kbrl_async.kernels.sandbox import Isolation


class Said(msgspec.Struct, frozen=True):
    """`text`: what the code put into `said`, or its exception."""

    isolation: Isolation
    text: str = ""


def run(channel: socket.socket, payload: bytes, fds: list[int], isolation: Isolation) -> None:
    channel.send(msgspec.msgpack.encode(Said(isolation)))
    scope: dict[str, object] = {"said": "nothing", "fds": fds}
    try:
        exec(payload.decode(), scope)
        text = str(scope["said"])
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        channel.send(msgspec.msgpack.encode(Said(isolation, text[:1000])))
