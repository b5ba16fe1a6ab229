"""GPU children that wait for their work: a CUDA context is made while another candidate is being checked.

::

    take ─▶ the child that waits longest, or a new one      refill ─▶ start what is missing (returns at once)
    settle ─▶ wait until all have their contexts: nothing may disturb a measurement

A child is still used once: it waits before any candidate code, confined already. What it gets to read comes as sealed
files in memory, because its file rules were fixed before its candidate was known.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections import deque
from pathlib import Path

from kbrl_async.errors import InfraError
from kbrl_async.sandbox import Child, Limits, Zygote
from kbrl_async.verifying.memory import memory_file, seal

ENTRY = "kbrl_async.verifying.cuda_runner:main"
BYTES_ONLY = ("triton:", "cubin:")
"""Artifacts that a launcher reads as bytes; others are loaded by path and need a child of their own."""
_SETTLE_S = 10.0
COUNT = 1
"""Children that wait, of one bench."""


class Spares:
    """:param count: children that wait."""

    def __init__(self, zygote: Zygote, limits: Limits, device: str, count: int = COUNT) -> None:
        self._zygote, self._limits, self._device, self._count = zygote, limits, device, count
        self._waiting: deque[Child] = deque()
        self._generation = -1

    def take(self) -> Child:
        self._forget_the_dead()
        return self._waiting.popleft() if self._waiting else self._spawn()

    def refill(self) -> None:
        self._forget_the_dead()
        with contextlib.suppress(InfraError):  # whoever needs a child next will meet it again
            while len(self._waiting) < self._count:
                self._waiting.append(self._spawn())
                self._generation = self._zygote.generation

    def settle(self) -> None:
        for child in self._waiting:
            select.select([child.channel], [], [], _SETTLE_S)

    def close(self) -> None:
        while self._waiting:
            self._waiting.pop().close()

    def _forget_the_dead(self) -> None:
        """They die with their zygote, too."""
        is_new = self._generation != self._zygote.generation
        for child in [child for child in self._waiting if is_new or child.has_ended()]:
            self._waiting.remove(child)
            child.close()

    def _spawn(self) -> Child:
        return self._zygote.spawn(ENTRY, self._device.encode(), (), self._limits)


def as_files(artifacts: dict[str, str]) -> list[int]:
    """Sealed copies in memory, in the order of the artifacts."""
    fds = []
    for path in artifacts.values():
        fd = memory_file("artifact")
        content = memoryview(Path(path).read_bytes())
        while content:
            content = content[os.write(fd, content) :]
        seal(fd)
        fds.append(fd)
    return fds
