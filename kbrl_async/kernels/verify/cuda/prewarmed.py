"""A GPU child that waits for its work: its CUDA context is made while another candidate is being checked.

::

    take ─▶ the waiting child, or a new one        refill ─▶ start the next one (returns at once)
    settle ─▶ wait until it has its context: nothing may disturb a measurement

A child is still used once: it waits before any candidate code, confined already. What it gets to read comes as sealed
files in memory, because its file rules were fixed before its candidate was known.
"""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path

from kbrl_async.errors import InfraError
from kbrl_async.kernels.sandbox import Child, Limits, Zygote
from kbrl_async.kernels.verify.cuda.dying import Dying
from kbrl_async.kernels.verify.memory import memory_file, seal

ENTRY = "kbrl_async.kernels.verify.cuda.runner:main"
_SETTLE_S = 10.0


class Spares:
    def __init__(self, zygote: Zygote, limits: Limits, device: str, entry: str = ENTRY) -> None:
        self._zygote, self._limits, self._device, self._entry = zygote, limits, device, entry
        self._child: Child | None = None
        self._generation = -1
        self.dying = Dying()

    def take(self) -> Child:
        self._forget_the_dead()
        child, self._child = self._child, None
        return child or self._spawn()

    def refill(self) -> None:
        self._forget_the_dead()
        if self._child is None:
            with contextlib.suppress(InfraError):  # whoever needs a child next will meet it again
                self._child = self._spawn()
                self._generation = self._zygote.generation

    def settle(self) -> None:
        if self._child is not None:
            select.select([self._child.channel], [], [], _SETTLE_S)

    def close(self) -> None:
        self._drop()
        self.dying.close()

    def _drop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _forget_the_dead(self) -> None:
        """It dies with its zygote, too."""
        if self._child is not None and (self._generation != self._zygote.generation or self._child.has_ended()):
            self._drop()

    def _spawn(self) -> Child:
        return self._zygote.spawn(self._entry, self._device.encode(), (), self._limits)


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
