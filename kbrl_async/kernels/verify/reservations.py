"""Who plans with how much of one GPU's memory: verifiers of a host wait for each other instead of running out of it.

::

    A  ── holds 9 GB ───────── hold(2 GB) ──
    B  ── take(70 GB): None ─ gives back what it keeps ─ wait_for(70 GB) ·····┤ holds 70 GB ──
    C  ── take(5 GB) ·························································┤ behind B, though it would fit ──

A file for each, in one folder for each GPU: its name is its place in the queue, its content what it holds and what it
waits for. Its owner keeps it locked, so the kernel gives back what a dead one held. Nobody's word is more than a plan:
whoever takes more than it said, or says nothing, is met where memory really runs out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kbrl_async.errors import InfraError
from kbrl_async.kernels.stages import tell
from kbrl_async.kernels.verify.options import Tick

LIMIT_S = 600.0
_LOOK_S = 0.05
_SHARE = 15 / 16
"""Of a GPU that may be planned with: contexts of idle processes are in nobody's plan."""
CONTEXTS_BYTES = 5 << 30
"""What another verifier has beside all plans: contexts of its bench and of the processes that it keeps ready, .7 to .9
GB each. Four verifiers on 80 GB met "out of memory" in 7 of 60 problems of KernelBench without it, and with 4 GiB in 3
of 16 that plan with 32 to 48 GiB.
"""
LEAST_SHARE = 0.05
"""Of a GPU: with less nothing could be judged. Where a policy or other verifiers leave less, what does not fit waits or
fails by name, not by a plan of nothing."""
_SMALL = 1 << 30
"""Less than this is nobody's concern, and costs no look at the others."""
_AMOUNTS = struct.Struct("<qqq")  # bytes held, bytes waited for, the place in the queue of who waits


def even_share(total: int, count: int) -> float:
    """Of a GPU of `total` bytes, what each of so many verifiers may plan with, so that none has to wait for another.

    >>> [round(even_share(80 << 30, count), 3) for count in (1, 2, 4, 9)]
    [1.0, 0.438, 0.188, 0.05]
    """
    left = _SHARE - (count - 1) * CONTEXTS_BYTES / total
    return 1.0 if count == 1 else max(LEAST_SHARE, left / count)


class Other(msgspec.Struct, frozen=True):
    """Another verifier on the same GPU."""

    pid: int
    held: int
    wanted: int
    place: int


class Reservations:
    """One verifier's part of a GPU of `total` bytes, which `folder` stands for; used from one thread."""

    def __init__(self, folder: Path, total: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self.whole, self.total = folder, total, int(_SHARE * total)
        self._gate = os.open(folder / "gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.held = 0
        with self._locked():
            self._path = next(path for number in range(1 << 20) if not (path := self._named(number)).exists())
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._write(0, 0, 0)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._file)
        os.close(self._gate)

    def hold(self, size: int) -> None:
        """From now on it plans with no more than this. Less needs nobody's leave."""
        if size < self.held:
            self._write(size, 0, 0)

    def is_room_beside(self, wanted: int) -> bool:
        """Whether all verifiers' contexts have room beside `wanted`, and what any other has or waits for."""
        others = self.others
        largest = max(wanted, *(max(other.held, other.wanted) for other in others), 0)
        return min(largest, self.total) + (len(others) + 1) * CONTEXTS_BYTES <= self.whole

    @staticmethod
    def is_concern(size: int) -> bool:
        """Whether so many bytes are worth a look at the others."""
        return size > _SMALL

    def take(self, size: int) -> bool:
        """Whether `size` bytes in all may be planned with, now."""
        size = min(size, self.total)  # who waits for more is granted that
        if size <= self.held or not self.is_concern(size):
            return True
        with self._locked():
            others = self._others()
            if any(other.wanted for other in others) or not self._fits(size, others):
                return False
            self._write(size, 0, 0)
        return True

    def wait_for(self, size: int, tick: Tick, limit_s: float = LIMIT_S) -> None:
        """In the order of asking. Whoever waits should hold little: those before it may need that.

        :raises InfraError: the others still hold too much after `limit_s`.
        """
        size, end = min(size, self.total), time.monotonic() + limit_s
        with self._locked():
            place = 1 + max((other.place for other in self._others()), default=0)
            self._write(self.held, size, place)
        tell(f"waiting for {size / 2**30:.1f} GiB of the GPU, which other verifiers use")
        try:
            while not self._is_granted(size, place):
                if time.monotonic() > end:
                    raise InfraError(self._refusal(size), "End them, or give each a timing_bench.memory_share")
                tick()
                time.sleep(_LOOK_S)
        except BaseException:
            self._write(self.held, 0, 0)
            raise

    @property
    def others(self) -> list[Other]:
        """Who else has a part of this GPU."""
        with self._locked():
            return self._others()

    def _is_granted(self, size: int, place: int) -> bool:
        with self._locked():
            others = self._others()
            if any(0 < other.place < place for other in others) or not self._fits(size, others):
                return False
            self._write(size, 0, 0)
        return True

    def _fits(self, size: int, others: list[Other]) -> bool:
        """Where nobody else holds any it may have all: then what lies beside plans decides, and that does not wait."""
        held = sum(other.held for other in others)
        return not held or size + held + len(others) * CONTEXTS_BYTES <= self.total

    def _refusal(self, size: int) -> str:
        told = ", ".join(f"process {other.pid}: {other.held / 2**30:.1f} GiB" for other in self.others)
        return f"{size / 2**30:.1f} GiB of the GPU are needed, and other verifiers keep too much of it ({told})"

    def _others(self) -> list[Other]:
        others = (path for path in self._folder.glob("*-*") if path != self._path)
        return [other for path in others if (other := _read(path)) is not None]

    def _named(self, number: int) -> Path:
        return self._folder / f"{os.getpid()}-{number}"

    def _write(self, held: int, wanted: int, place: int) -> None:
        os.pwrite(self._file, _AMOUNTS.pack(held, wanted, place), 0)
        self.held = held

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)


def _read(path: Path) -> Other | None:
    """None where its owner is gone, or it is no such file; then it is taken away."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            return None
        content = os.pread(file, _AMOUNTS.size, 0)
    finally:
        os.close(file)
    pid = path.name.partition("-")[0]
    if len(content) < _AMOUNTS.size or not pid.isdecimal():
        return None
    return Other(int(pid), *_AMOUNTS.unpack(content))
