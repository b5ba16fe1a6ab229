"""Who is on a device of this host: many processes that work, or one that times.

::

    lane A  ── working ──┐ breathe ─▶ stands still ─┐           ┌── working ──
    lane B  ── working ──┘      alone() ────────────┴─ timing ──┘

Two locked files, because a lock alone would let a stream of workers keep whoever wants to time waiting for ever: who
wants to be alone shuts the gate first, then waits until those inside have left.

Invariants
* The kernel gives back what a killed process held.
* Nobody waits for its own process: one object a process, used from one thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

_LOOK_S = 0.002


class Stands(Protocol):
    """A child that can be stopped and go on."""

    def freeze(self) -> bool: ...
    def thaw(self) -> None: ...


class DeviceTurns:
    """Of one process, on the device that `path` stands for; the file is made where it is missing."""

    _at_work: list[DeviceTurns] = []  # noqa: RUF012 - of the process: whoever waits in it for a child looks here

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._gate = os.open(path.with_suffix(".gate"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._inside = os.open(path.with_suffix(".inside"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._is_inside = False

    def close(self) -> None:
        os.close(self._gate)
        os.close(self._inside)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Around work that disturbs whoever times."""
        self._enter()
        self._at_work.append(self)
        try:
            yield
        finally:
            self._at_work.remove(self)
            self._leave()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits to be alone, or is."""
        try:
            fcntl.flock(self._gate, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        return False

    def breathe(self) -> None:
        """Between two steps of work: stand still while another process times."""
        if self._is_inside and self.is_wanted:
            self._leave()
            self._enter()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else works meanwhile. From within `working`, which goes on afterwards, or from without."""
        was_inside = self._is_inside
        self._leave()
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        fcntl.flock(self._inside, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if was_inside:  # others may come in, too, and nobody else may time before this one is where it was
                fcntl.flock(self._inside, fcntl.LOCK_SH)
                self._is_inside = True
            else:
                fcntl.flock(self._inside, fcntl.LOCK_UN)
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    @classmethod
    def answers(cls, channel: socket.socket, deadline_s: float, child: Stands | None) -> bool:
        """Whether there is something to read within this time, which stands still with `child` while another process
        times. `child` None: what it does disturbs nobody.
        """
        end = time.monotonic() + deadline_s
        while (left := end - time.monotonic()) > 0:
            inside = [turns for turns in cls._at_work if turns._is_inside]
            if not inside:
                return bool(select.select([channel], [], [], left)[0])
            if select.select([channel], [], [], min(left, _LOOK_S))[0]:
                return True
            if inside[0].is_wanted:
                end += inside[0]._stand_aside(child)
        return bool(select.select([channel], [], [], 0)[0])

    def _stand_aside(self, child: Stands | None) -> float:
        """Seconds that it took."""
        begun = time.monotonic()
        is_frozen = child is not None and child.freeze()
        self._leave()
        self._enter()
        if child is not None and is_frozen:
            child.thaw()
        return time.monotonic() - begun

    def _enter(self) -> None:
        if not self._is_inside:
            fcntl.flock(self._gate, fcntl.LOCK_SH)
            fcntl.flock(self._inside, fcntl.LOCK_SH)
            fcntl.flock(self._gate, fcntl.LOCK_UN)
            self._is_inside = True

    def _leave(self) -> None:
        if self._is_inside:
            fcntl.flock(self._inside, fcntl.LOCK_UN)
            self._is_inside = False
