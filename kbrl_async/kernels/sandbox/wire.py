"""What a trusted process and its zygote say to each other: msgspec bytes and file descriptors, never pickle."""

from __future__ import annotations

import array
import socket
from typing import Literal

import msgspec

MAX_MESSAGE = 4 << 20
Level = Literal["full", "reduced", "none"]


class Limits(msgspec.Struct, frozen=True):
    """What one child may use up."""

    cpu_s: int = 30
    memory_bytes: int = 4 << 30
    """Address space beyond what the zygote has mapped already."""
    file_bytes: int = 16 << 20
    files: int = 64
    scratch_bytes: int = 16 << 20
    threads: int = 1
    """1: the child can create no thread at all, so nothing can go on behind a call."""
    processes: int = 320
    """Processes and threads that a tool and all its children may have at a time."""
    nice: int = 0
    cores: tuple[int, ...] = ()
    """Pinned to these; the child can't change it. Empty: wherever the zygote may run."""


class Access(msgspec.Struct, frozen=True):
    """Files beyond the interpreter's own that one child may see."""

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    """Folders. A child has a small private `/tmp`-like folder besides, where the host lets us mount one."""


class Isolation(msgspec.Struct, frozen=True):
    """Which layers hold. `full`: all of them; `none`: neither namespaces, Landlock nor seccomp."""

    level: Level
    missing: tuple[str, ...] = ()


class Options(msgspec.Struct, frozen=True):
    """Fixed for a zygote's life. `profile`: `"kernel"` (no exec, no processes) or `"tool"` (a compiler and
    its children).
    """

    profile: str
    preload: tuple[str, ...]
    read: tuple[str, ...]
    scratch: str
    threads: int = 1
    is_enclosed: bool = False
    """Bubblewrap has made the namespaces already."""


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    entry: str
    """`"module:function"`, called as `function(socket, payload, fds)`; the module is among the preloaded ones."""
    payload: bytes
    limits: Limits
    access: Access


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    pid: int


class Spawned(msgspec.Struct, frozen=True, tag="spawned"):
    pid: int
    """In the zygote's namespace; only the zygote can use it."""


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    status: int
    """Exit code, or minus the signal."""


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The zygote's first word, after its imports."""

    missing: tuple[str, ...]


Message = Spawn | Wait | Spawned | Exited | Started
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def send(channel: socket.socket, message: Message, fds: list[int] | None = None) -> None:
    data = _encoder.encode(message)
    if fds:
        socket.send_fds(channel, [data], fds)
    else:
        channel.send(data)


def receive(channel: socket.socket, max_fds: int = 8) -> tuple[Message, list[int]]:
    """The next message and its file descriptors. `EOFError` where the other end is gone."""
    space = socket.CMSG_SPACE(max_fds * array.array("i").itemsize)
    data, ancillary, _, _ = channel.recvmsg(MAX_MESSAGE, space)
    fds = array.array("i")
    for level, kind, body in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
    if not data:
        raise EOFError("the other end is closed")
    return _decoder.decode(data), list(fds)
