"""Every service process is a nanny over one child that may die.

The nanny imports nothing heavy and holds no socket. It starts the same module again as its child, passes signals on and
decides what an exit means::

    0            finished: the nanny ends with 0
    2, 3, 4      a KbrlError: somebody must act, starting again would not help; the nanny ends with the same code
                 (an `InfraError` is a crash: a sandbox that was killed at its start works the next time)
    75           no room on the disk: started again once there is some, for `FULL_WAIT_S`; then the nanny ends with 3
    else, signal a crash: started again, at once where it had lived for `STEADY_S` and else with back-off, until
                 `MAX_CRASHES` in `CRASH_WINDOW_S`

Asked to end, a child that has to be killed is a failure (1) only where it was at work: one that starts can't hear a
signal while it reads a large model, and holds nothing yet.

A child that shows no sign of life (`pulse`) is killed, which is a crash. The child dies with its nanny
(PR_SET_PDEATHSIG), so `kill -9` leaves no orphan. Where a launcher has started the nanny and says so
(`KBRL_LAUNCHER`), its death is a SIGTERM to the nanny; without one, nobody's death matters. The module of a service
must import its heavy parts inside `main`, or the nanny loads them too.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import functools
import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from kbrl_async.durable import wants_room
from kbrl_async.errors import HostError, InfraError, KbrlError
from kbrl_async.lineage import LAUNCHER, lives
from kbrl_async.runs.standing import process
from services.runtime.pulse import PULSE, Pulse, begin_pulse, failing

Main = Callable[[asyncio.Event], Awaitable[None]]

CHILD_MARK = "KBRL_NANNY_PID"
MAX_CRASHES = 5
CRASH_WINDOW_S = 60.0
STEADY_S = 5.0
"""A child that has lived for so long was at work: others wait for it, and it may well live as long again."""
FINAL_CODES = frozenset({0, 2, 3, 4})
CRASH_CODE = 1
FULL_CODE = os.EX_TEMPFAIL
FULL_WAIT_S = 900.0
"""How long a full disk is waited out. Nothing is lost by it: what was not on disk was not acknowledged."""
FULL_PAUSE_S = 1.0
ROOM_BYTES = 16 << 20
"""Free on the run's file system before a child that found it full is started again."""
STOP_GRACE_S = 4.0
"""From a signal to the cancellation of `main`; the nanny kills half a second later. Process runners kill after five."""
QUIET_THREADS = {"GOMP_SPINCOUNT": "10000"}
"""Idle OpenMP threads give their core back after microseconds: with others on it, spinning costs tenfold."""
LAUNCHER_LOOK_S = 1.0
_PR_SET_PDEATHSIG = 1


def run_service(name: str, main: Main, prepare: Callable[[], object] = lambda: None) -> NoReturn:
    """Run `main(stop)` under a nanny and exit; `stop` is set by SIGTERM and SIGINT.

    Called by the `__main__` of each service. `prepare` runs once in the nanny, before the first child.
    """
    if os.environ.get(CHILD_MARK) == str(os.getppid()):
        sys.exit(_run_child(main))
    try:
        prepare()
    except KbrlError as error:
        sys.exit(_report(error))
    nanny = Nanny(name, _own_command(), on_end=_restore_clocks)
    with _recorded(name) as ended:
        code = nanny.run()
        ended(code, nanny.was_asked)
    sys.exit(code)


def _recorded(name: str) -> contextlib.AbstractContextManager[Callable[[int, bool], None]]:
    """The record of this process in its run's folder, by which `kbrl runs` says how the run stands."""
    run_dir = os.environ.get("KBRL_RUN_DIR")
    if run_dir is None:
        return contextlib.nullcontext(lambda _code, _asked: None)
    return process(Path(run_dir), os.environ.get("HONCHO_PROCESS_NAME") or name)


def _restore_clocks() -> None:
    """A child that locked a GPU's clock and was killed has left a note in the run's folder."""
    folder = Path(os.environ.get("KBRL_RUN_DIR", ""), "locks")
    if "KBRL_RUN_DIR" not in os.environ or not any(folder.glob("locked-clock-*.json")):
        return
    from kbrl_async.kernels.timing.cuda.clocks import restore_notes  # rarely needed, and the nanny stays light

    try:
        restore_notes(folder)
    except KbrlError as error:
        _report(error)


def _own_command() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    target = [sys.argv[0]] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return [sys.executable, *target, *sys.argv[1:]]


# ── the child ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _run_child(main: Main) -> int:
    atexit.register(gc.freeze)  # Python's exit looks through all objects, with torch for a second: the run's end waits
    die_with_parent(int(os.environ[CHILD_MARK]))  # a nanny has seen to it; torchrun, which starts ranks itself, has not
    return _loop_runner()(_until_stopped(main))


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies. `parent`: its pid, where it may be gone already."""
    parent = parent or os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _loop_runner() -> Callable[[Awaitable[int]], int]:
    import uvloop  # the nanny itself does without

    runner: Callable[[Awaitable[int]], int] = uvloop.run
    return runner


async def _until_stopped(main: Main) -> int:
    """The exit code; what went wrong is said at once, because the loop's own end may be waited for in vain."""
    loop = asyncio.get_running_loop()
    begin_pulse(loop)
    stop = asyncio.Event()
    work = asyncio.ensure_future(main(stop))

    def on_signal() -> None:
        if not stop.is_set():
            stop.set()
            loop.call_later(STOP_GRACE_S, work.cancel)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await work
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    except BaseExceptionGroup as group:
        return _failed(_first_known(group) or group)
    except Exception as error:
        return _failed(error)
    return 0


def _failed(error: BaseException) -> int:
    code = _report(error)
    failing(code)
    return code


def _report(error: BaseException) -> int:
    """Says what went wrong, and returns the exit code that tells the nanny what to do about it."""
    if wants_room(error):
        why = str(error) if isinstance(error, KbrlError) else f"a file could not grow: {error}. Free some space"
        print(f"error: {why}", file=sys.stderr, flush=True)
        return FULL_CODE
    if isinstance(error, KbrlError):
        print(f"error: {error}", file=sys.stderr, flush=True)
        return CRASH_CODE if isinstance(error, InfraError) else error.exit_code
    traceback.print_exception(error)
    return 1


def free_bytes() -> int:
    """On the file system of the run."""
    status = os.statvfs(os.environ.get("KBRL_RUN_DIR", "."))
    return status.f_bavail * status.f_frsize


def _first_known(group: BaseExceptionGroup[BaseException]) -> KbrlError | None:
    for error in group.exceptions:
        found = _first_known(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, KbrlError):
            return found
    return None


# ── the nanny ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Nanny:
    """Supervises one child process; `run` returns the exit code of the whole."""

    def __init__(
        self,
        name: str,
        command: list[str],
        *,
        max_crashes: int = MAX_CRASHES,
        window_s: float = CRASH_WINDOW_S,
        first_wait_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[], object] = lambda: None,
        room: Callable[[], int] = free_bytes,
        full_wait_s: float = FULL_WAIT_S,
        launcher: str | None = None,
    ) -> None:
        """`launcher`: the `identity` of the process that started us, by default as it says in `KBRL_LAUNCHER`."""
        self._name = name
        self._command = command
        self._max_crashes = max_crashes
        self._window_s = window_s
        self._first_wait_s = first_wait_s
        self._clock = clock
        self._on_end = on_end
        self._room = room
        self._full_wait_s = full_wait_s
        self._full_since: float | None = None
        self._crashes: deque[float] = deque()
        self._early = 0
        """Crashes in a row of children that had hardly begun."""
        self._child: subprocess.Popen[bytes] | None = None
        self._stop_at: float | None = None
        self._was_starting = False
        """The child was asked to end when it was not at work yet: it held nothing, and may not have heard it."""
        self._began = clock()
        self._launcher = os.environ.get(LAUNCHER, "") if launcher is None else launcher
        self._looked_at = clock()

    @property
    def was_asked(self) -> bool:
        """Whether a signal has asked it to end."""
        return self._stop_at is not None

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        while True:
            code = self._run_once()
            self._on_end()
            if code in FINAL_CODES:
                return code
            if self._stop_at is not None:
                return 0 if code in (-signal.SIGTERM, FULL_CODE) or self._was_starting else 1
            given_up = self._wait_for_room() if code == FULL_CODE else self._wait_after_crash(code)
            if self._stop_at is not None:
                return 0
            if given_up:
                return given_up

    def _wait_after_crash(self, code: int) -> int:
        """The exit code with which to give up, or 0 when it is time to try again."""
        if not self._may_try_again():
            self._say(f"error: {self._name} crashed {self._max_crashes} times, last {_how(code)}. See its log above")
            return 1
        self._early = self._early + 1 if self._clock() - self._began < STEADY_S else 0
        wait_s = min(8.0, self._first_wait_s * 2 ** (self._early - 1)) if self._early else 0.0
        when = f"in {wait_s:.2g} s" if wait_s else "at once"
        self._say(f"{self._name} ended {_how(code)}; starting again {when}")
        self._sleep(wait_s)
        return 0

    def _wait_for_room(self) -> int:
        """The same for a disk that is full. A child that ran for a while has found room meanwhile."""
        now = self._clock()
        if self._full_since is None or now - self._began > self._full_wait_s / 10:
            self._full_since = now
        self._say(f"{self._name} waits for room on the disk, at most {self._full_wait_s:.0f} s; nothing is lost")
        self._sleep(FULL_PAUSE_S)
        while self._stop_at is None and self._room() < ROOM_BYTES:
            if self._clock() - self._full_since > self._full_wait_s:
                break
            self._sleep(FULL_PAUSE_S)
        if self._clock() - self._full_since <= self._full_wait_s:
            return 0
        self._say(f"error: {self._name} has found no room on the disk for {self._full_wait_s:.0f} s. Free some space")
        return HostError.exit_code

    def _run_once(self) -> int:
        self._began, self._was_starting = self._clock(), True
        with Pulse(self._clock) as pulse:
            mine = {CHILD_MARK: str(os.getpid()), PULSE: str(pulse.writer)}
            environment = {**QUIET_THREADS, **os.environ, **mine}
            # Before its first line: Python takes a while to start, and an orphan would take itself for a nanny.
            dies_with_us = functools.partial(die_with_parent, os.getpid())
            with subprocess.Popen(
                self._command, env=environment, pass_fds=[pulse.writer], preexec_fn=dies_with_us
            ) as child:
                self._child = child
                if self._stop_at is not None:
                    child.send_signal(signal.SIGTERM)
                return self._watch(child, pulse)

    def _watch(self, child: subprocess.Popen[bytes], pulse: Pulse) -> int:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return pulse.meant(child.wait(timeout=0.2))
            why = pulse.look(child.pid)
            if self._stop_at is None:
                self._was_starting = not pulse.has_served
            self._look_at_launcher()
            if self._stop_at is not None and self._clock() > self._stop_at + STOP_GRACE_S + 0.5:
                child.kill()
            elif why:
                self._say(f"{self._name} does nothing any more: {why}; it is killed")
                child.kill()

    def _may_try_again(self) -> bool:
        now = self._clock()
        self._crashes.append(now)
        while self._crashes and self._crashes[0] < now - self._window_s:
            self._crashes.popleft()
        return len(self._crashes) < self._max_crashes

    def _sleep(self, wait_s: float) -> None:
        until = self._clock() + wait_s
        while self._stop_at is None and self._clock() < until:
            time.sleep(min(0.1, wait_s))
            self._look_at_launcher()

    def _look_at_launcher(self) -> None:
        now = self._clock()
        if not self._launcher or self._stop_at is not None or now - self._looked_at < LAUNCHER_LOOK_S:
            return
        self._looked_at = now
        if not lives(self._launcher):
            self._say(f"{self._name} stops: the process that started it is gone")
            self._on_signal(signal.SIGTERM, None)

    def _on_signal(self, number: int, _: object) -> None:
        if self._stop_at is None:
            self._stop_at = self._clock()
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # whoever read our lines may be gone
            print(line, file=sys.stderr, flush=True)


def _how(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with code {code}"
