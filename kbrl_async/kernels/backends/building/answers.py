"""How a confined Python child hands back what it built: one short message, and a bundle of files in its folder.

Both are untrusted and read as such: the message by its schema, the bundle by size and format, never through a link.
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

from kbrl_async.kernels.backends.building.context import MAX_ENTRIES, isolation_of
from kbrl_async.kernels.backends.launch import bundle
from kbrl_async.kernels.sandbox import Child, Isolation, is_over

_BUNDLE = "bundle"
_MAX_MESSAGE = 1 << 16
_STATUS_S = 1.0
Message = TypeVar("Message")


def begin(channel: socket.socket, isolation: Isolation, folder: str) -> None:
    """In the child, before anything else: say how confined it is, fall silent, work in `folder`."""
    channel.send(msgspec.msgpack.encode(isolation))
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.chdir(folder)


def hand_in(channel: socket.socket, message: msgspec.Struct, files: dict[str, bytes]) -> None:
    """In the child: the last thing it does."""
    Path(_BUNDLE).write_bytes(bundle.pack(files))
    channel.send(msgspec.msgpack.encode(message)[:_MAX_MESSAGE])


class Collected(msgspec.Struct, frozen=True):
    isolation: str
    data: bytes
    """The message's bytes; empty where none came."""
    is_late: bool
    files: dict[str, bytes]


def collect(child: Child, folder: Path, deadline_s: float) -> Collected:
    """On the trusted side: wait for the child, and end it. Raises `InfraError` where the host is to blame."""
    try:
        isolation = isolation_of(child)
        message = child.receive(_MAX_MESSAGE, deadline_s, lambda: is_over(folder, bundle.MAX_BYTES * 2, MAX_ENTRIES))
        data, is_late = message or b"", message is None
        if message == b"":
            child.result(_STATUS_S)  # raises where its zygote died under it, which is no fault of the candidate's
    finally:
        child.close()
    return Collected(isolation.level, data, is_late, files_of(folder) if data else {})


def refuse_unreadable(value: Message) -> None:
    """:raises ValidationError: in the child: the trusted side could not read this, and would call it forged."""
    msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))


def read(data: bytes, kind: type[Message]) -> Message | None:
    """None where the child sent nothing, or something else. Total: no bytes raise."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except Exception:  # the decoder, too, raises what it likes: RecursionError, UnicodeDecodeError
        return None


def files_of(folder: Path) -> dict[str, bytes]:
    """What a child left that may be a link, a device or gigabytes is nothing."""
    try:
        fd = os.open(folder / _BUNDLE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        status = os.fstat(fd)
        is_plain = stat.S_ISREG(status.st_mode) and status.st_size <= bundle.MAX_BYTES
        data = os.read(fd, status.st_size) if is_plain else b""
    finally:
        os.close(fd)
    try:
        return bundle.unpack(data)
    except ValueError:
        return {}
