"""Doing harm to a run, and undoing it. Thin: signals, limits and bytes; what is done when is the driver's business.

`begin(fault)` returns a `Wound`; `end(wound)` undoes what can be undone; the run may do anything meanwhile.
A target that is not there right now (a candidate lives for milliseconds) raises `Absent`: the driver tries again.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import secrets
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import zmq

from kbrl_async.errors import UserError
from kbrl_async.lab.chaos.faults import ARTIFACT, DISK, FRAMES, JOURNAL, RUN, FaultKind, PlannedFault
from kbrl_async.lab.chaos.link import Link
from kbrl_async.lab.chaos.processes import Process, ProcessRole, census, matching
from protocols.sockets import connect_dealer

TORN_BYTES = 300
"""Cut from the end of a write-ahead log: within its last frame, so its last commit is lost and nothing else is."""
_WAL_HEADER, _WAL_FRAME = 32, 24
"""Bytes before the frames, and before the page in each."""
GARBAGE_MESSAGES = 50
MOST_BALLAST = 1 << 30
"""A file system with more room than this is not filled: it is hardly the run's own."""
BALLAST = ".chaos-ballast"


class Absent(Exception):  # noqa: N818 - a state of the world, which the driver waits out
    """There is no such target at this moment."""


class Wound(msgspec.Struct):
    """What was done, as far as it matters for undoing and for the report."""

    fault: PlannedFault
    pids: list[int]
    note: str = ""
    stopped: dict[int, float] = msgspec.field(default_factory=dict)
    """pid and start time of processes to continue."""
    limited: list[int] = msgspec.field(default_factory=list)
    """Processes of which no file may grow."""


class Injuries:
    """Knows one run. `link` is there only where the run was started behind it."""

    def __init__(self, run_dir: Path, sockets: Mapping[str, str], rng: random.Random, link: Link | None = None) -> None:
        """`sockets`: addresses `submit` and `work` of the broker."""
        self._run_dir, self._sockets, self._rng, self._link = run_dir.resolve(), dict(sockets), rng, link
        self._wedged: set[tuple[int, float]] = set()
        """pid and start time of what nobody but its nanny may end, least of all a stop that comes on top."""
        self._unlimited: dict[int, tuple[int, int]] = {}
        """The limit that a process had before: faults that overlap would restore each other's."""
        self._full: Counter[int] = Counter()
        self._acts: Mapping[FaultKind, Callable[[PlannedFault], Wound]] = {
            FaultKind.KILL: self._kill,
            FaultKind.STOP: self._stop,
            FaultKind.WEDGE: self._stop,
            FaultKind.DELAY: self._delay,
            FaultKind.PARTITION: self._partition,
            FaultKind.CORRUPT: self._corrupt,
            FaultKind.DISK_FULL: self._fill_disk,
        }

    def begin(self, fault: PlannedFault) -> Wound:
        """:raises Absent: its target is not there now."""
        return self._acts[fault.kind](fault)

    def end(self, wound: Wound) -> None:
        """Undo it. Processes that have died meanwhile are left alone, whoever has their pid now."""
        if wound.fault.kind is not FaultKind.WEDGE:
            for pid, born in wound.stopped.items():
                if _born(pid) == born and (pid, born) not in self._wedged:
                    _signal(pid, signal.SIGCONT)
        for pid in wound.limited:
            self._full[pid] -= 1
            if not self._full[pid]:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, self._unlimited.pop(pid))
        if wound.fault.kind is FaultKind.DELAY:
            self._linked().quicken(wound.fault.target)
        elif wound.fault.kind is FaultKind.PARTITION:
            self._linked().heal(wound.fault.target)
        if wound.fault.target == DISK:
            (self._run_dir / BALLAST).unlink(missing_ok=True)

    def is_over(self, wound: Wound) -> bool:
        """Whether a wedge has been noticed: every process that stood still is gone."""
        return all(_born(pid) != born for pid, born in wound.stopped.items())

    def release(self, wound: Wound) -> None:
        """Let go of what nobody else has replaced; the last resort for a wedge."""
        self._wedged -= wound.stopped.items()
        for pid, born in wound.stopped.items():
            if _born(pid) == born:
                _signal(pid, signal.SIGCONT)

    # ── processes ───────────────────────────────────────────────────────────────────────────────────────────────

    def _victims(self, fault: PlannedFault) -> list[Process]:
        found = matching(census(self._run_dir), fault.target)
        if not found:
            raise Absent(fault.target)
        return found if fault.target == RUN else [self._rng.choice(found)]

    def _kill(self, fault: PlannedFault) -> Wound:
        victims = self._victims(fault)
        for victim in sorted(victims, key=lambda process: process.role is not ProcessRole.NANNY):
            _signal(victim.pid, signal.SIGKILL)  # nannies first: they would start their children again
        return Wound(fault, [victim.pid for victim in victims])

    def _stop(self, fault: PlannedFault) -> Wound:
        victims = self._victims(fault)
        wound = Wound(fault, [victim.pid for victim in victims])
        for victim in victims:
            if (born := _born(victim.pid)) is not None:
                wound.stopped[victim.pid] = born
                if fault.kind is FaultKind.WEDGE:
                    self._wedged.add((victim.pid, born))
                _signal(victim.pid, signal.SIGSTOP)
        return wound

    # ── the link ────────────────────────────────────────────────────────────────────────────────────────────────

    def _delay(self, fault: PlannedFault) -> Wound:
        self._linked().delay(fault.target, fault.delay_ms / 1e3)
        return Wound(fault, [], f"{fault.delay_ms:.0f} ms each way")

    def _partition(self, fault: PlannedFault) -> Wound:
        self._linked().cut(fault.target)
        return Wound(fault, [])

    def _linked(self) -> Link:
        if self._link is None:
            raise UserError("there is no proxy between the broker and its workers", "Let kbrl chaos start the run")
        return self._link

    # ── bytes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _corrupt(self, fault: PlannedFault) -> Wound:
        if fault.target == FRAMES:
            return self._garbage(fault)
        if fault.target == JOURNAL:
            return self._tear(fault)
        part = "objects" if fault.target == ARTIFACT else "keys"
        files = sorted((self._run_dir / "artifacts" / part).glob("*/[!.]*"))
        if not files:
            raise Absent(fault.target)
        path = self._rng.choice(files)
        try:
            place = flip_byte(path, self._rng)
        except FileNotFoundError:
            raise Absent(fault.target) from None  # evicted just now
        return Wound(fault, [], f"byte {place} of {path.name[:12]}…")

    def _garbage(self, fault: PlannedFault) -> Wound:
        """Messages that are none, from a proper peer, and bytes that are not even ZeroMQ."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            for address in self._sockets.values():
                peer = connect_dealer(context, address, secrets.token_hex(8).encode())
                with contextlib.suppress(zmq.Again):
                    for _ in range(GARBAGE_MESSAGES):
                        frames = [self._rng.randbytes(self._rng.randrange(64)) for _ in range(self._rng.randint(1, 4))]
                        peer.send_multipart(frames, zmq.NOBLOCK)
                peer.close()
        finally:
            context.term()
        for address in self._sockets.values():
            if address.startswith("ipc://"):
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as raw:
                    raw.settimeout(1.0)
                    raw.connect(address.removeprefix("ipc://"))
                    raw.sendall(self._rng.randbytes(256))
        return Wound(fault, [], f"{GARBAGE_MESSAGES} messages to each socket")

    def _tear(self, fault: PlannedFault) -> Wound:
        """As after a power cut: the broker is down, and the end of its write-ahead log never reached the disk."""
        broker = matching(census(self._run_dir), "broker")
        nanny = matching(census(self._run_dir), "nanny:broker")
        log = self._run_dir / "broker.sqlite-wal"
        if not broker or not nanny:
            raise Absent(fault.target)
        _signal(nanny[0].pid, signal.SIGSTOP)
        try:
            _signal(broker[0].pid, signal.SIGKILL)
            _await_death(broker[0].pid)
            size = tear(log)
        finally:
            _signal(nanny[0].pid, signal.SIGCONT)
        return Wound(fault, [broker[0].pid], f"the last of {size} bytes of its write-ahead log torn off")

    # ── room ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fill_disk(self, fault: PlannedFault) -> Wound:
        if fault.target == DISK:
            return self._ballast(fault)
        victims = matching(census(self._run_dir), fault.target)
        if not victims:
            raise Absent(fault.target)
        names = {victim.instance for victim in victims}
        # Its nanny too: a child that is started again meanwhile inherits the limit.
        victims += [p for p in census(self._run_dir) if p.role is ProcessRole.NANNY and p.instance in names]
        wound = Wound(fault, [victim.pid for victim in victims], "no file may grow (EFBIG)")
        for pid in {victim.pid for victim in victims}:
            with contextlib.suppress(ProcessLookupError):
                limit = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                if not self._full[pid]:
                    self._unlimited[pid] = limit
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limit[1]))
                self._full[pid] += 1
                wound.limited.append(pid)
        return wound

    def _ballast(self, fault: PlannedFault) -> Wound:
        free = shutil.disk_usage(self._run_dir).free
        if free > MOST_BALLAST:
            raise UserError(
                f"the disk of {self._run_dir} has {free >> 20} MiB of room: it is not filled",
                f"Put the run on a file system with less than {MOST_BALLAST >> 20} MiB, such as a small tmpfs",
            )
        with (self._run_dir / BALLAST).open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while file.write(b"\0" * size):
                        pass
        return Wound(fault, [], f"{free >> 20} MiB of ballast (ENOSPC)")


def tear(log: Path) -> int:
    """Cut a write-ahead log within its last frame, so that its last commit is lost; how long it was.

    What lies behind the last frame is of an earlier round, and would be passed over anyway (sqlite.org/walformat.html).
    """
    with contextlib.suppress(FileNotFoundError), log.open("r+b") as file:
        header = file.read(_WAL_HEADER)
        size, frame_size = len(header), _WAL_FRAME + int.from_bytes(header[8:12], "big")
        while len(header) == _WAL_HEADER:
            file.seek(size)
            if file.read(_WAL_FRAME)[8:16] != header[16:24]:
                break
            size += frame_size
        if size > _WAL_HEADER:
            file.truncate(size - TORN_BYTES)
            return size
    return 0


def flip_byte(path: Path, rng: random.Random) -> int:
    """One bit of one byte; where. The file keeps its length and its times, as after a fault of the disk."""
    with path.open("r+b") as file:
        times = os.fstat(file.fileno())
        size = times.st_size
        place = rng.randrange(size) if size else 0
        file.seek(place)
        old = file.read(1) or b"\0"
        file.seek(place)
        file.write(bytes([old[0] ^ (1 << rng.randrange(8))]))
        file.flush()
        os.utime(file.fileno(), ns=(times.st_atime_ns, times.st_mtime_ns))
    return place


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _born(pid: int) -> float | None:
    """The start time of a process, which tells it from a later one with its pid; None where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else float(fields[19])


def _await_death(pid: int, within_s: float = 5.0) -> None:
    until = time.monotonic() + within_s
    while _born(pid) is not None and time.monotonic() < until:
        time.sleep(0.005)
