"""The entry of a confined tool: change folder, send its words to a file, become the tool."""

from __future__ import annotations

import os
import socket

import msgspec

from kbrl_async.kernels.sandbox.wire import Isolation


class ToolCommand(msgspec.Struct, frozen=True):
    argv: list[str]
    folder: str
    environment: dict[str, str]
    output: str = "output.txt"
    """Relative to `folder`; stdout and stderr."""


def run(channel: socket.socket, payload: bytes, fds: list[int], isolation: Isolation) -> None:
    """Never returns: the process becomes the tool. The isolation is said first, on the channel."""
    command = msgspec.msgpack.decode(payload, type=ToolCommand)
    channel.send(msgspec.msgpack.encode(isolation))
    channel.close()
    os.chdir(command.folder)
    null = os.open("/dev/null", os.O_RDONLY)
    words = os.open(command.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for source, target in ((null, 0), (words, 1), (words, 2)):
        os.dup2(source, target)
    os.execve(command.argv[0], command.argv, command.environment)  # noqa: S606 - no shell is wanted
