"""A child's sign of life to its nanny: bytes in a pipe, written by the loop that does the work.

::

    child: loop ── "." every PULSE_S, "!" once it serves ──▶ pipe ──▶ Pulse.look: why the child must go, or nothing
                   "x" and its exit code when it has failed

A process that is stopped, or whose loop hangs in something that will never come, uses no processor time. So a silent
child is let live while it computes, such as an import that takes long, but not for ever (`STUCK_S`). Time is counted
in looks of the nanny: what stops both, a debugger or a suspended machine, is not held against the child.

A child that has failed says so before it ends: a thread, an exit handler or a destructor may wait for a rank that is
gone, for good and busily.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

PULSE = "KBRL_NANNY_PULSE"
WEDGED = "KBRL_WEDGED_S"
PULSE_S = 0.5
WEDGED_S = 30.0
"""Silent and idle for so long, a child that has served is taken to be wedged."""
STARTING_S = 900.0
"""The same for one that has not: it may wait for a process that it has started, such as the engine of a large model."""
STUCK_S = 900.0
"""Silent for so long, whatever it computes."""
EXIT_GRACE_S = 10.0
"""Of a child that has failed, until it is gone."""
_FAILED = ord("x")
_MOST_STEP_S = 1.0

_serving = False
_writer = -1


def serving() -> None:
    """This process is at work now, and its loop is not held up any more. Told at once: it may stand still before its
    next beat, and would be given the time of one that starts."""
    global _serving
    _serving = True
    _beat()


def failing(code: int) -> None:
    """This process has failed and ends with `code`, by itself or by its nanny."""
    _tell(bytes((_FAILED, code)))


def _beat() -> None:
    _tell(b"!" if _serving else b".")


def _tell(what: bytes) -> None:
    if _writer >= 0:
        with contextlib.suppress(OSError):  # a nanny that does not read has time
            os.write(_writer, what)


def begin_pulse(loop: asyncio.AbstractEventLoop) -> None:
    """Beat until the process ends. Nothing where no nanny listens."""
    global _writer
    if PULSE not in os.environ:
        return
    _writer = int(os.environ[PULSE])
    with contextlib.suppress(OSError):
        os.set_inheritable(_writer, False)
        os.set_blocking(_writer, False)

    def beat() -> None:
        _beat()
        loop.call_later(PULSE_S, beat)

    beat()


class Pulse:
    """The nanny's end, for one child. Use as `with Pulse(…) as pulse`, with `pulse.writer` for the child."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, wedged_s: float | None = None) -> None:
        """`wedged_s`: default `KBRL_WEDGED_S`, else `WEDGED_S`; 0: the child may do what it likes."""
        self._clock = clock
        self._limit_s = float(os.environ.get(WEDGED, WEDGED_S)) if wedged_s is None else wedged_s
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.has_served = False
        """As of the last look."""
        self._silent_s = self._idle_s = self._failed_s = 0.0
        self._code: int | None = None
        self._used: int | None = None
        self._looked_at = clock()

    def __enter__(self) -> Pulse:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._reader)
        os.close(self.writer)

    def look(self, pid: int) -> str:
        """Why the child must go, or an empty string. Called several times a second."""
        now = self._clock()
        passed_s, self._looked_at = min(now - self._looked_at, _MOST_STEP_S), now
        answered = self._answered()
        if self._code is not None:
            self._failed_s += passed_s
            return f"it failed and did not end in {EXIT_GRACE_S:g} s" if self._failed_s >= EXIT_GRACE_S else ""
        if answered:
            self._silent_s = self._idle_s = 0.0
            return ""
        used = cpu_ticks(pid)
        self._silent_s += passed_s
        self._idle_s = self._idle_s + passed_s if used == self._used else 0.0
        self._used = used
        if not self._limit_s:
            return ""
        limit_s = self._limit_s if self.has_served else max(self._limit_s, STARTING_S)
        if self._idle_s >= limit_s:
            return f"no sign of life for {self._silent_s:.0f} s"
        return f"its loop has not turned for {self._silent_s:.0f} s" if self._silent_s >= STUCK_S else ""

    def meant(self, code: int) -> int:
        """The exit code that the child told of, where it had to be killed for not coming to it."""
        return self._code if self._code is not None and code < 0 else code

    def _answered(self) -> bool:
        try:
            beats = os.read(self._reader, 4096)
        except BlockingIOError:
            return False
        beats, told, code = beats.partition(bytes((_FAILED,)))
        if code and self._code is None:
            self._code = code[0]
        self.has_served |= b"!" in beats
        return bool(beats or told)


def cpu_ticks(pid: int) -> int | None:
    """Processor time that a process has used, all threads together; None where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])
