"""Every service process is a nanny over one child that may die.

The nanny imports nothing heavy and holds no socket. It starts the same module again as its child, passes signals on and
decides what an exit means::

    0            finished: the nanny ends with 0
    2, 3, 4      a KbrlError: somebody must act, starting again would not help; the nanny ends with the same code
    else, signal a crash: started again with back-off, until `MAX_CRASHES` in `CRASH_WINDOW_S`

The child dies with its nanny (PR_SET_PDEATHSIG), so `kill -9` leaves no orphan. The module of a service must import its
heavy parts inside `main`, or the nanny loads them too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
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

from kbrl_async.errors import KbrlError

Main = Callable[[asyncio.Event], Awaitable[None]]

CHILD_MARK = "KBRL_NANNY_PID"
MAX_CRASHES = 5
CRASH_WINDOW_S = 60.0
FINAL_CODES = frozenset({0, 2, 3, 4})
STOP_GRACE_S = 4.0
"""From a signal to the cancellation of `main`; the nanny kills half a second later. Process runners kill after five."""
QUIET_THREADS = {"GOMP_SPINCOUNT": "10000"}
"""Idle OpenMP threads give their core back after microseconds: with others on it, spinning costs tenfold."""
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
    sys.exit(Nanny(name, _own_command(), on_end=_restore_clocks).run())


def _restore_clocks() -> None:
    """A child that locked a GPU's clock and was killed has left a note in the run's folder."""
    folder = Path(os.environ.get("KBRL_RUN_DIR", ""), "locks")
    if "KBRL_RUN_DIR" not in os.environ or not any(folder.glob("locked-clock-*.json")):
        return
    from kbrl_async.timing.clocks import restore_notes  # rarely needed, and the nanny stays light

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
    die_with_parent()
    try:
        _loop_runner()(_until_stopped(main))
    except KbrlError as error:
        return _report(error)
    except BaseExceptionGroup as group:
        known = _first_known(group)
        if known is not None:
            return _report(known)
        traceback.print_exc()
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _loop_runner() -> Callable[[Awaitable[None]], None]:
    import uvloop  # the nanny itself does without

    runner: Callable[[Awaitable[None]], None] = uvloop.run
    return runner


async def _until_stopped(main: Main) -> None:
    loop = asyncio.get_running_loop()
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


def _report(error: KbrlError) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return error.exit_code


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
    ) -> None:
        self._name = name
        self._command = command
        self._max_crashes = max_crashes
        self._window_s = window_s
        self._first_wait_s = first_wait_s
        self._clock = clock
        self._on_end = on_end
        self._crashes: deque[float] = deque()
        self._child: subprocess.Popen[bytes] | None = None
        self._stop_at: float | None = None

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        while True:
            code = self._run_once()
            self._on_end()
            if code in FINAL_CODES:
                return code
            if self._stop_at is not None:
                return 0 if code == -signal.SIGTERM else 1
            if not self._may_try_again():
                self._say(
                    f"error: {self._name} crashed {self._max_crashes} times, last {_how(code)}. See its log above"
                )
                return 1
            wait_s = min(8.0, self._first_wait_s * 2 ** (len(self._crashes) - 1))
            self._say(f"{self._name} ended {_how(code)}; starting again in {wait_s:.2g} s")
            self._sleep(wait_s)
            if self._stop_at is not None:
                return 0

    def _run_once(self) -> int:
        environment = {**QUIET_THREADS, **os.environ, CHILD_MARK: str(os.getpid())}
        with subprocess.Popen(self._command, env=environment) as child:
            self._child = child
            if self._stop_at is not None:
                child.send_signal(signal.SIGTERM)
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(timeout=0.2)
                if self._stop_at is not None and self._clock() > self._stop_at + STOP_GRACE_S + 0.5:
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

    def _on_signal(self, number: int, _: object) -> None:
        if self._stop_at is None:
            self._stop_at = self._clock()
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _how(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with code {code}"
