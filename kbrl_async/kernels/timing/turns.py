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
from collections.abc import Iterator
from pathlib import Path


class Turns:
    """Of one process, on the device that `path` stands for; the file is made where it is missing."""

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
        try:
            yield
        finally:
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
