"""Counters of the processor over calls in another process, by Linux's perf events; what a host lacks is left out.

A virtual machine often has no hardware counters, and a container may forbid all (`perf_event_paranoid` above 2, or a
filter on system calls). Page faults are software's, and tell of output that is allocated anew in each call.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from collections.abc import Callable, Iterator, Mapping

_HARDWARE, _SOFTWARE = 0, 1
EVENTS: Mapping[str, tuple[int, int]] = {
    "cycles": (_HARDWARE, 0),
    "instructions": (_HARDWARE, 1),
    "cache_references": (_HARDWARE, 2),
    "cache_misses": (_HARDWARE, 3),
    "branch_misses": (_HARDWARE, 5),
    "page_faults": (_SOFTWARE, 2),
}
"""perf's type and number of each."""
_NUMBERS = {"x86_64": 298, "aarch64": 241}
"""Of the system call."""
_ATTRIBUTES = struct.Struct("IIQQQQQII")
_FLAGS = (1 << 1) | (1 << 5) | (1 << 6)
"""Of the event: inherited by threads, neither kernel nor hypervisor."""
CALLS = 5

Open = Callable[[int, int, int], int]
"""(type, number, pid) → a file descriptor.

:raises OSError: this host has no such event, or does not allow it.
"""


def perf_event(kind: int, number: int, pid: int) -> int:
    """Open one event over the thread `pid` and all that it starts from now on."""
    call = _NUMBERS.get(platform.machine())
    if call is None:
        raise OSError(f"no perf events on {platform.machine()}")
    attributes = bytearray(128)
    _ATTRIBUTES.pack_into(attributes, 0, kind, len(attributes), number, 0, 0, 0, _FLAGS, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_char * len(attributes)).from_buffer(attributes)
    opened = libc.syscall(call, buffer, pid, -1, -1, 8)
    if opened < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(opened)


def count(pid: int, call: Callable[[], object], calls: int = CALLS, open_: Open = perf_event) -> dict[str, float]:
    """Each event's count in one call, the mean of `calls`; without those that this host does not have."""
    with _opened(pid, open_) as events:
        before = {name: _read(file) for name, file in events.items()}
        for _ in range(calls if events else 0):
            call()
        return {name: (_read(file) - before[name]) / calls for name, file in events.items()}


class Counts:
    """What was counted of one candidate: a `Watch`, see `Bench.evaluate`."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}

    def __call__(self, pid: int, call: Callable[[], object]) -> None:
        self.counts = count(pid, call)


@contextlib.contextmanager
def _opened(pid: int, open_: Open) -> Iterator[dict[str, int]]:
    with contextlib.ExitStack() as stack:
        events: dict[str, int] = {}
        for name, (kind, number) in EVENTS.items():
            with contextlib.suppress(OSError):
                events[name] = open_(kind, number, pid)
                stack.callback(os.close, events[name])
        yield events


def _read(file: int) -> int:
    return int.from_bytes(os.read(file, 8), "little")


def text(counts: Mapping[str, float]) -> str:
    """One line; empty where nothing was counted."""
    parts = []
    if cycles := counts.get("cycles"):
        instructions = counts.get("instructions", 0.0)
        parts.append(f"{_short(instructions)} instructions, {instructions / cycles:.2f} a cycle")
    if references := counts.get("cache_references"):
        misses = counts.get("cache_misses", 0.0)
        parts.append(f"{_short(misses)} of {_short(references)} accesses to the last cache missed")
    if "branch_misses" in counts:
        parts.append(f"{_short(counts['branch_misses'])} branches foretold wrongly")
    if "page_faults" in counts:
        parts.append(f"{_short(counts['page_faults'])} page faults")
    return "; ".join(parts)


def _short(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"
