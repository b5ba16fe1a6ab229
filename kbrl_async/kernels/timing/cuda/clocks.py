"""The GPU's clock: observed always, locked only where the user says so, and restored whatever happens.

::

    lock:  note on disk ─▶ guard process (waits for our end) ─▶ sustained clock under load ─▶ lock ─▶ verify under load
    end:   unlock ─▶ note away ─▶ guard ends       kill -9: our pipe closes ─▶ guard unlocks; so does a service's nanny

Invariants
* The note stands on disk before a clock is locked, and goes only after it is unlocked: whoever finds one restores.
* `observe` never calls anything that changes a device.
* A clock is only locked if the GPU holds it under load; else the timing would be of a clock that nobody asked for.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from kbrl_async.errors import ConfigError, HostError
from kbrl_async.kernels.timing.cuda.nvml import DRIVER, Nvml, opened, throttle_names
from kbrl_async.lineage import identity, lives

FLOOR = 0.75
"""A sample whose clock was under this share of the expected one is thrown away."""
_HELD = 0.98
_TRIES = 4
_SAMPLES = 8
_GUARD_S = 10.0


def is_slow(mhz: float | None, expected_mhz: float | None, floor: float = FLOOR) -> bool:
    """Whether a sample must go; an unknown clock is no reason."""
    return mhz is not None and expected_mhz is not None and mhz < floor * expected_mhz


# ── observing ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Observation(msgspec.Struct, frozen=True):
    """For `Timing.clock_mhz` and `Timing.throttle`."""

    mhz: float
    bits: int

    @property
    def throttle(self) -> list[str]:
        return throttle_names(self.bits)


def observe(nvml: Nvml) -> Observation:
    return Observation(float(nvml.sm_mhz()), nvml.throttle_bits())


def under_load(nvml: Nvml, work: Callable[[], None], samples: int = _SAMPLES) -> int:
    """The clock that the GPU holds: the lowest seen while `work` (some 20 ms of kernels, not awaited) is running."""
    seen = []
    for _ in range(samples):
        work()
        seen.append(nvml.sm_mhz())
    return min(seen)


def sustainable(supported: Iterable[int], sustained: int) -> int | None:
    """The highest clock that can be locked and is no higher than what the GPU sustained by itself."""
    return max((mhz for mhz in supported if mhz <= sustained), default=None)


# ── locking ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Note(msgspec.Struct, frozen=True):
    """The wish to restore, on disk while a clock is locked."""

    index: int
    uuid: str
    pid: int
    mhz: int = 0
    owner: str = ""
    """`lineage.identity` of that pid, which in a container that was started again is another process."""


class ClockLock:
    """Locks one GPU's clock while the block runs::

        with ClockLock(index, folder, work) as locked:
            ...                                     # locked.mhz

    `folder` holds the note: the run's folder, so that its nanny finds it. `HostError` where we have no right to, or
    where no clock is held under load; nothing is changed then.
    """

    def __init__(
        self,
        index: int,
        folder: Path,
        work: Callable[[], None],
        *,
        factory: str = DRIVER,
        wanted_mhz: int | None = None,
    ) -> None:
        self._index, self._folder, self._work, self._factory = index, folder, work, factory
        self._wanted = wanted_mhz
        self._guard: subprocess.Popen[bytes] | None = None
        self.mhz = 0

    def __enter__(self) -> ClockLock:
        restore_notes(self._folder, self._factory, self._index)
        self._nvml = opened(self._factory, self._index)
        self._path = note_path(self._folder, self._index)
        if self._path.exists():
            raise HostError(f"GPU {self._index}'s clock is locked by another bench", "Give each bench a GPU of its own")
        self._write(0)
        try:
            self._guard = _start_guard(self._path, self._factory)
            self.mhz = self._lock()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _lock(self) -> int:
        supported = self._nvml.supported_sm_mhz()
        choice = sustainable(supported, self._wanted or under_load(self._nvml, self._work))
        for _ in range(_TRIES):
            if choice is None:
                break
            self._write(choice)
            try:
                self._nvml.lock(choice)
            except HostError:
                self._write(0)  # refused: there is nothing to restore
                raise
            held = under_load(self._nvml, self._work)
            if held >= _HELD * choice:
                return choice
            choice = sustainable(supported, held)
        cause = "the GPU holds none of its clocks under load, as its power or heat limits it"
        raise HostError(cause, "Set timing_bench.clocks=observe, or cool the GPU")

    def _write(self, mhz: int) -> None:
        note = Note(self._index, self._nvml.uuid(), os.getpid(), mhz, identity())
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        with part.open("wb") as file:
            file.write(msgspec.json.encode(note))
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._path)

    def _restore(self) -> None:
        try:
            if self._nvml_was_changed():
                self._nvml.unlock()
            self._path.unlink(missing_ok=True)
        finally:
            if self._guard is not None:
                _end_guard(self._guard)
                self._guard = None

    def _nvml_was_changed(self) -> bool:
        note = _read(self._path)
        return note is not None and note.mhz > 0


@contextlib.contextmanager
def held(mode: str, device: str, folder: Path, *, factory: str = DRIVER) -> Iterator[int | None]:
    """See `TimedDevice.held_clocks`."""
    if mode != "lock":
        yield None
        return
    # NVML counts the GPUs of the host, CUDA those that are visible.
    with ClockLock(physical_index(device, os.environ), folder, torch_work(device), factory=factory) as lock:
        yield lock.mhz


def physical_index(device: str, env: Mapping[str, str]) -> int:
    """The driver's number of `"cuda:N"`. `ConfigError` where CUDA_VISIBLE_DEVICES names GPUs by UUID."""
    number = int(device.partition(":")[2] or 0)
    visible = [word.strip() for word in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    if not visible:
        return number
    if number >= len(visible) or not visible[number].isdigit():
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={env['CUDA_VISIBLE_DEVICES']} has no number for {device}", "Use numbers"
        )
    return int(visible[number])


def torch_work(device: str) -> Callable[[], None]:
    """Some 20 ms of matrix products on the GPU, queued and not awaited."""
    import torch

    side = 8192
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(12):
            a @ a

    return work


def note_path(folder: Path, index: int) -> Path:
    return folder / f"locked-clock-{index}.json"


def restore_notes(folder: Path, factory: str = DRIVER, index: int | None = None) -> list[int]:
    """Unlock every GPU that a note in `folder` names and whose owner is gone; their indices. Idempotent."""
    restored = []
    for path in sorted(folder.glob("locked-clock-*.json")):
        note = _read(path)
        if note is None or (index is not None and note.index != index) or _is_held(note):
            continue
        if note.mhz > 0:
            opened(factory, note.index).unlock()
            restored.append(note.index)
        path.unlink(missing_ok=True)
    return restored


def _read(path: Path) -> Note | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=Note)
    return None


def _is_held(note: Note) -> bool:
    if not note.owner:  # of a release that did not write it, or where it could not be told
        return _lives(note.pid)
    return note.pid != os.getpid() and lives(note.owner)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and pid != os.getpid()


# ── the guard: `python -m kbrl_async.kernels.timing.cuda.clocks NOTE FACTORY`, with our pipe as its stdin


def _start_guard(path: Path, factory: str) -> subprocess.Popen[bytes]:
    """A session of its own: what kills our process group does not kill it."""
    command = [sys.executable, "-m", "kbrl_async.kernels.timing.cuda.clocks", str(path), factory]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert guard.stdout is not None
    if guard.stdout.readline() != b"ready\n":
        raise HostError("the process that would restore the clock did not start", "Its own message is on stderr")
    return guard


def _end_guard(guard: subprocess.Popen[bytes]) -> None:
    for pipe in (guard.stdin, guard.stdout):
        if pipe is not None:
            pipe.close()
    try:
        guard.wait(_GUARD_S)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def guard(path: Path, factory: str) -> None:
    """Waits for the end of who started it, then restores what its note asks for."""
    print("ready", flush=True)
    while sys.stdin.buffer.read(1):
        pass
    end = time.monotonic() + _GUARD_S
    while (note := _read(path)) is not None and time.monotonic() < end:
        if not _is_held(note):
            if note.mhz > 0:
                opened(factory, note.index).unlock()
            path.unlink(missing_ok=True)
            return
        time.sleep(0.02)  # the pipe closes a moment before the process is gone


if __name__ == "__main__":
    guard(Path(sys.argv[1]), sys.argv[2])
