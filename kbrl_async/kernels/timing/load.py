"""Other load on the host: found out, waited out for a bounded time, and reported with the timing.

::

    /proc/stat (busy, steal per core) · /proc/schedstat (waiting per core) · /proc/pressure/cpu · /proc/loadavg
          └─▶ Snapshot ─ two of them ─▶ Load ─▶ quiet? measure : wait, at most `patience_s`, then measure and say so

Invariants
* What a kernel does not tell is None, never 0; a host that tells nothing is taken as quiet and said to be unknown.
* Waiting is bounded: a bench on a loaded host measures later, never not at all.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class CpuCounters(msgspec.Struct, frozen=True):
    """Counters since boot, in seconds, of the cores that were asked for."""

    at: float
    busy_s: float | None = None
    steal_s: float | None = None
    waiting_s: float | None = None
    """Tasks that were runnable and had to wait for one of these cores."""
    pressure_s: float | None = None
    """Wall time in which some task of the host waited for a core."""
    runnable: int | None = None
    own_s: float = 0.0
    """What this bench itself used."""


class HostLoad(msgspec.Struct, frozen=True):
    """Between two snapshots; shares of the wall time of one core."""

    seconds: float
    others: float | None = None
    steal: float | None = None
    waiting: float | None = None
    pressure: float | None = None
    runnable: int | None = None

    @property
    def share(self) -> float | None:
        """One number for a timing: the core time that others had, the hypervisor's neighbours included."""
        if self.others is None and self.steal is None:
            return None
        return (self.others or 0.0) + (self.steal or 0.0)

    def is_quiet(self, limit: float) -> bool:
        """Nothing that is known is above the limit. Waiting tells of load that a full core hides."""
        known = [value for value in (self.share, self.waiting) if value is not None]
        return all(value <= limit for value in known)


def snapshot(
    cores: tuple[int, ...] = (),
    *,
    proc: Path = PROC,
    own_s: Callable[[], float] = time.process_time,
    clock: Callable[[], float] = time.monotonic,
) -> CpuCounters:
    """Counters of these cores, or of all where none is named."""
    busy, steal = _stat(proc, cores)
    return CpuCounters(clock(), busy, steal, _schedstat(proc, cores), _pressure(proc), _runnable(proc), own_s())


def between(before: CpuCounters, after: CpuCounters, cores: int = 1) -> HostLoad:
    """`cores`: how many the snapshots cover."""
    seconds = max(after.at - before.at, 1e-9)

    def share(first: float | None, second: float | None, taken: float = 0.0) -> float | None:
        if first is None or second is None:
            return None
        return max(0.0, second - first - taken) / seconds / cores

    return HostLoad(
        seconds,
        share(before.busy_s, after.busy_s, after.own_s - before.own_s),
        share(before.steal_s, after.steal_s),
        share(before.waiting_s, after.waiting_s),
        share(before.pressure_s, after.pressure_s),
        after.runnable,
    )


def wait_until_quiet(
    look: Callable[[], CpuCounters],
    *,
    limit: float = 0.1,
    patience_s: float = 1.0,
    slice_s: float = 0.05,
    cores: int = 1,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[HostLoad, float]:
    """Sleep in slices until one was quiet or patience ends: the last slice's load, and the seconds that were waited.

    A slice in which this bench sleeps shows others alone. A first look is free where patience is 0.
    """
    first = before = look()
    while True:
        sleep(slice_s)
        after = look()
        load = between(before, after, cores)
        waited = after.at - first.at
        if load.is_quiet(limit) or waited >= patience_s:
            return load, waited
        before = after


def _stat(proc: Path, cores: tuple[int, ...]) -> tuple[float | None, float | None]:
    names = {f"cpu{core}" for core in cores} or {"cpu"}
    busy = steal = 0.0
    found = False
    for line in _lines(proc / "stat"):
        name, *fields = line.split()
        if name in names and len(fields) >= 8:
            user, nice, system, _idle, _iowait, irq, softirq, stolen = (int(field) / _TICKS for field in fields[:8])
            busy += user + nice + system + irq + softirq
            steal += stolen
            found = True
    return (busy, steal) if found else (None, None)


def _schedstat(proc: Path, cores: tuple[int, ...]) -> float | None:
    names = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in _lines(proc / "schedstat") if line.startswith("cpu")]
    # Field 8 of a cpu line, after its name: nanoseconds that tasks spent waiting to run there.
    waits = [int(fields[8]) for fields in lines if len(fields) > 8 and (not names or fields[0] in names)]
    return sum(waits) / 1e9 if waits else None


def _pressure(proc: Path) -> float | None:
    for line in _lines(proc / "pressure" / "cpu"):
        if line.startswith("some") and "total=" in line:
            return int(line.rpartition("total=")[2]) / 1e6
    return None


def _runnable(proc: Path) -> int | None:
    for line in _lines(proc / "loadavg"):
        with contextlib.suppress(IndexError, ValueError):
            return int(line.split()[3].partition("/")[0])
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not this kernel, or turned off, as pressure may be
        return []


class LoadWatch:
    """Load over one measurement, and the waiting that disturbed pairs cause::

    watch = Watch(cores, own_s, patience_s=0.25)
    watch.pair(was_polluted)      # after each pair; sleeps while others have the core
    watch.clock()                 # wall time less what was waited: others' load does not eat our cap
    watch.load()                  # since it was made
    """

    def __init__(
        self,
        look: Callable[[], CpuCounters],
        *,
        cores: int = 1,
        limit: float = 0.1,
        patience_s: float = 0.25,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._look, self._cores, self._limit, self._sleep = look, cores, limit, sleep
        self._patience_s = patience_s
        self._begin = look()
        self.waited_s = 0.0

    def pair(self, was_polluted: bool) -> None:
        left = self._patience_s - self.waited_s
        if was_polluted and left > 0:
            slice_s = min(0.02, left)
            _, waited = wait_until_quiet(
                self._look, limit=self._limit, patience_s=left, slice_s=slice_s, cores=self._cores, sleep=self._sleep
            )
            self.waited_s += waited

    def clock(self) -> float:
        return time.monotonic() - self.waited_s

    def load(self) -> HostLoad:
        return between(self._begin, self._look(), self._cores)
