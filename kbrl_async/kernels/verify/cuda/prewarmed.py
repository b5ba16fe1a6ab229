"""A GPU child that waits for its work: its CUDA context is made while another candidate is being checked.

::

    take ─▶ the waiting child, or a new one        refill ─▶ start the next one (returns at once)
    give ─▶ one that only ran what is trusted waits again
    settle ─▶ wait until it has its context: nothing may disturb a measurement

A child of candidates is used once: it waits before any candidate code, confined already. What it gets to read comes as
sealed files in memory, because its file rules were fixed before its candidate was known. One that ran a reference
serves the next reference, and no candidate ever: it might find there what is expected of it.
"""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path

from kbrl_async.errors import InfraError
from kbrl_async.kernels.sandbox import Child, Limits, Zygote
from kbrl_async.kernels.stages import tally
from kbrl_async.kernels.verify.cuda.dying import Dying
from kbrl_async.kernels.verify.memory import memory_file, seal

ENTRY = "kbrl_async.kernels.verify.cuda.runner:main"
_SETTLE_S = 10.0
_MOST_RESTED = 2
LIFE_S = 24 * 3600
"""CPU seconds of a process that serves many in turn."""


class PrewarmedChildren:
    """`count`: so many wait, as far as `refill` is called."""

    def __init__(self, zygote: Zygote, limits: Limits, device: str, entry: str = ENTRY, count: int = 1) -> None:
        self._zygote, self._limits, self._device, self._entry = zygote, limits, device, entry
        self._count = count
        self._waiting: list[Child] = []
        self._resting: list[Child] = []
        """Of those that wait, who may not have given its memory back yet."""
        self._generation = -1
        self.dying = Dying()

    def take(self) -> Child:
        """The one that rested last, else the one that waits for longest."""
        self._forget_the_dead()
        return self._waiting.pop() if self._waiting else self._spawn()

    def give(self, child: Child) -> None:
        """Told to rest, it is ready for other work soon."""
        self._forget_the_dead()
        self._waiting.append(child)
        self._resting.append(child)
        while len(self._waiting) > _MOST_RESTED:
            self.dying.add(self._waiting.pop(0))

    def refill(self) -> None:
        """Returns at once."""
        self._forget_the_dead()
        with contextlib.suppress(InfraError):  # whoever needs a child next will meet it again
            while len(self._waiting) < self._count:
                self._waiting.insert(0, self._spawn())

    def settle(self) -> None:
        """Returns when all that wait have their context, and those that rest have given their memory back."""
        self._resting.clear()
        for child in self._waiting:
            select.select([child.channel], [], [], _SETTLE_S)

    def clear(self) -> None:
        """Returns when all those that rest, or were killed, have given their memory back. Who is only starting has
        none, and nobody waits for it.
        """
        resting, self._resting = self._resting, []
        for child in resting:
            if child in self._waiting:
                select.select([child.channel], [], [], _SETTLE_S)
        self.dying.close()

    def close(self) -> None:
        while self._waiting:
            self._waiting.pop().close()
        self.dying.close()

    def _forget_the_dead(self) -> None:
        """They die with their zygote, too."""
        is_gone = self._generation != self._zygote.generation
        for child in [child for child in self._waiting if is_gone or child.has_ended()]:
            self._waiting.remove(child)
            child.close()

    def _spawn(self) -> Child:
        tally("contexts made")
        child = self._zygote.spawn(self._entry, self._device.encode(), (), self._limits)
        self._generation = self._zygote.generation
        return child


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
