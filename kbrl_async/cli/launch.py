"""Starting every process of a run and waiting for its end, on honcho's Manager.

One process that ends takes all down: the reward aggregator ends when the summary is written; any other that ends
has given up. Each is its own session, gets SIGTERM, and SIGKILL after `GRACE_S`. Each knows who we are
(`KBRL_LAUNCHER`) and leaves by itself where we are killed without a word.

Invariants
* A line that can't be shown is lost, and nothing else: only a reader who has gone ends the run.
* Whatever is raised, nothing is left that we would wait for at our exit.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import msgspec
from honcho.manager import SYSTEM_PRINTER_NAME, Manager
from honcho.printer import Message, Printer

from kbrl_async import durable
from kbrl_async.errors import RunError
from kbrl_async.lineage import LAUNCHER, identity
from kbrl_async.runs.telemetry import progress
from kbrl_async.runs.telemetry.logs import OF_THE_RUN, STATUS_LINE
from kbrl_async.runs.telemetry.screen import bar, duration

GRACE_S = 8.0
LOCK = ".launcher"
"""In a run's folder."""
START_POLL_S = 0.05
REFRESH_S = 0.5
ERASE = "\r\x1b[2K"
START_S = 30.0
"""How long we wait, once all shall end, for processes to say that they have started."""
INTERRUPTED = (129, 130, 143)
ERROR = "error: "
"""How a service begins the one line that says why it gives up."""
_STOPPED = re.compile(r"(\S+) stopped \(rc=(-?\d+)\)")


class ProcessesEnded(msgspec.Struct, frozen=True):
    """How the processes ended."""

    first: str
    """The process that ended first; empty if we were told to stop."""
    code: int
    """Its exit code, or 129 (SIGHUP), 130 (Ctrl-C) or 143 (SIGTERM)."""
    reason: str = ""
    """What it said last about an error: its cause and cure."""

    @property
    def interrupted(self) -> bool:
        return not self.first and self.code in INTERRUPTED


def gave_up(ended: ProcessesEnded, goal: str, cure: str) -> RunError:
    """The error that says which process ended before the `goal` was reached, with that process's exit code."""
    who = ended.first or "a process"
    if ended.reason:
        error = RunError(f"{who} gave up: {ended.reason}")
    else:
        error = RunError(f"{who} ended with exit code {ended.code} before the {goal} did", cure)
    # 1 is Python's own for a crash, and says of a candidate that it is wrong
    error.exit_code = ended.code if ended.code > 1 else RunError.exit_code
    return error


class RunPrinter(Printer):  # type: ignore[misc] # honcho has no types
    """Prints the processes' lines; of honcho's own only what a person needs, and remembers who stopped first."""

    def __init__(self, output: TextIO, unread: Callable[[], None] = lambda: None) -> None:
        """`unread` is called when whoever read our lines is gone."""
        super().__init__(output)
        self.output: TextIO = output
        self.first_stopped = ""
        self.reasons: dict[str, str] = {}
        self._unread = unread
        self.status: Callable[[int], str] = lambda _width: ""
        """What the last line of a terminal says, in so many characters; drawn again below each line, see `refresh`."""
        self._drawn_at = 0.0
        self._is_drawn = False
        self.lost = False
        """Whether a line could not be written: a full disk, a terminal that is gone, a pipe that would block."""
        self._killed: set[str] = set()
        self._stopping = False

    def write(self, message: Message) -> None:
        line = message.data.decode("utf-8", "replace") if isinstance(message.data, bytes) else str(message.data)
        if message.name == SYSTEM_PRINTER_NAME:
            self._system(line.strip(), message)
            return
        if line.startswith(ERROR):
            self.reasons[message.name] = line.removeprefix(ERROR).strip()
        self._show(message._replace(data=line))

    def _system(self, line: str, message: Message) -> None:
        if line.endswith("received"):
            self._stopping = True
            self._show(message._replace(data="stopping all processes …\n"))
        elif (stopped := _STOPPED.match(line)) and not self._stopping:
            self._stopping = True
            self.first_stopped = stopped[1]
            self._show(message)
        elif "SIGKILL" in line and line not in self._killed:  # honcho repeats it until the process is gone
            self._killed.add(line)
            self._show(message)

    def _show(self, message: Message) -> None:
        line = message._replace(data=self._encodable(message.data))
        with self._writing():
            self._clear()
            if line.data.startswith(OF_THE_RUN):
                print(f"{line.time:{self.time_format}} {line.data.removeprefix(OF_THE_RUN).strip()}", file=self.output)
            else:
                super().write(line)
            self._draw()

    def refresh(self) -> None:
        """The status line again, where it is due."""
        if not self._stopping and time.monotonic() - self._drawn_at >= REFRESH_S:
            with self._writing():
                self._clear()
                self._draw()

    def _encodable(self, text: str) -> str:
        encoding = getattr(self.output, "encoding", None) or "utf-8"
        return text.encode(encoding, "replace").decode(encoding)

    def _clear(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self.output.write(ERASE)

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        if not self._stopping and (text := self.status(_columns(self.output) - 1)):
            self.output.write(self._encodable(text))
            self.output.flush()
            self._is_drawn = True

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._stopping = True
            self.output = open(os.devnull, "w")  # noqa: SIM115 - until the end
            self._unread()
        except (OSError, ValueError, RuntimeError):  # the last: a signal's line in the middle of another's
            self.lost = True

    def close(self) -> None:
        """Drop what still can't be written, else Python would try again at exit and fail in place of the run."""
        with self._writing():
            self._clear()
        if not self.lost:
            return
        try:
            self.output.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self.output.fileno())


class RunManager(Manager):  # type: ignore[misc] # honcho has no types
    """A Manager that also kills what ignores a SIGTERM when nothing at all has stopped."""

    def __init__(self, output: TextIO) -> None:
        self.printer = RunPrinter(output, self._unread)
        super().__init__(self.printer)
        self._last_resort = threading.Timer(GRACE_S, self.kill)
        self._last_resort.daemon = True
        self._launcher = os.getpid()
        self._end_asked: float | None = None

    def _unread(self) -> None:
        """`| head`, or a `tee` that was killed: a run that nobody sees, and that no Ctrl-C reaches, must not go on."""
        self.returncode = 143
        self.terminate()

    def _hung_up(self, *_: object) -> None:
        """The terminal is closed: as with SIGTERM, all end in order, and the same command goes on."""
        self._system_print("SIGHUP received\n")
        self.returncode = 128 + signal.SIGHUP
        self.terminate()

    def terminate(self) -> None:
        if self._terminating or os.getpid() != self._launcher:  # a relay that was just forked has our handlers
            return
        if not super()._all_started():
            # Ctrl-C in the first moment: honcho can't signal a process whose pid it has not been told yet.
            self._end_asked = self._end_asked or time.monotonic()
            if not self._is_overdue():  # else the loop sees to it
                again = threading.Timer(START_POLL_S, self.terminate)
                again.daemon = True
                again.start()
            return
        super().terminate()
        self._last_resort.start()

    def loop(self) -> None:
        signal.signal(signal.SIGHUP, self._hung_up)
        try:
            super().loop()
        except BaseException:
            self._abandon()
            raise
        finally:
            self._last_resort.cancel()

    def _all_started(self) -> bool:
        """Honcho's loop asks in each round, and would wait for ever for a process that could not be started. So it is
        also where the status line is kept up to date.

        :raises RunError: there is one.
        """
        self.printer.refresh()
        started: bool = super()._all_started()
        if not started:
            late = self._is_overdue()
            for name, process in self._processes.items():
                if "pid" not in process and (late or process["process"].exitcode):
                    raise RunError(f"{name} could not be started", "Its own message is above; free memory or processes")
        return started

    def _is_overdue(self) -> bool:
        return self._end_asked is not None and time.monotonic() - self._end_asked > START_S

    def _abandon(self) -> None:
        """Terminate, then kill, what runs: Python's exit waits for the relays, and these for their services."""
        self._terminating = True  # from now on honcho's handlers do nothing
        began = time.monotonic()
        told: set[str] = set()
        while relays := self._relays():
            with contextlib.suppress(Exception):  # a queue that can't be read may be why we are here
                self._hear()
            late_s = time.monotonic() - began
            for name, process in self._processes.items():
                if "pid" not in process or "returncode" in process:
                    continue
                if late_s > GRACE_S:
                    self._procmgr.kill(process["pid"])
                elif name not in told:
                    self._procmgr.terminate(process["pid"])
                told.add(name)
            for relay in relays if late_s > GRACE_S + START_S else []:
                relay.kill()  # it never named its service, which leaves when it sees that we are gone
            relays[0].join(START_POLL_S)

    def _relays(self) -> list[BaseProcess]:
        relays = (process.get("process") for process in self._processes.values())
        return [relay for relay in relays if relay is not None and relay.is_alive()]

    def _hear(self) -> None:
        """What the relays have said meanwhile: who has started, and who has ended."""
        while not self.events.empty():
            event = self.events.get(timeout=START_POLL_S)
            if event.type != "line":
                self._processes[event.name].update(event.data)


def python_service(name: str) -> str:
    """The shell command of a service."""
    return python_module(f"services.{name}")


@contextlib.contextmanager
def undone_at_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end us as Ctrl-C does: by an exception, so that what is open is undone."""

    def leave(number: int, _frame: object) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)  # a second one must not end the undoing
        print("stopped", file=sys.stderr)
        raise SystemExit(128 + number)

    found = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}  # nohup stays so
    try:
        for number in before:
            signal.signal(number, leave)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def python_module(name: str) -> str:
    """The shell command of a module; `exec` makes the shell the module's process, so that signals reach it."""
    return f"exec {shlex.quote(sys.executable)} -m {name}"


def start_and_wait(
    run_dir: Path,
    counts: Mapping[str, int],
    *,
    command: Callable[[str], str] = python_service,
    output: TextIO | None = None,
) -> ProcessesEnded:
    """Start `counts` processes of each service on this run, show their lines, wait until all have ended."""
    with _alone(run_dir):
        progress.forget(run_dir)
        return _wait(run_dir, counts, command, output or sys.stdout)


def _alone(run_dir: Path) -> AbstractContextManager[None]:
    """Two launchers of one run would start two of each process. The lock is held until all that was started is gone.

    :raises AddressTaken: another one has it.
    """
    cure = "Watch it with 'kbrl top', or stop that process first"
    return durable.alone(run_dir / LOCK, why="its run is going on", cure=cure)


def _wait(run_dir: Path, counts: Mapping[str, int], command: Callable[[str], str], output: TextIO) -> ProcessesEnded:
    manager = RunManager(output)
    if _has_status_line(output):
        manager.printer.status = StatusLine(run_dir)
    for name, count in counts.items():
        for number in range(1, count + 1):
            instance = f"{name}.{number}"
            shown = instance if count > 1 else name
            manager.add_process(shown, command(name), env=_environment(run_dir, instance, output))
    try:
        manager.loop()
    finally:
        manager.printer.close()
    first = manager.printer.first_stopped
    return ProcessesEnded(
        first=first, code=_exit_code(manager.returncode), reason=manager.printer.reasons.get(first, "")
    )


def _environment(run_dir: Path, instance: str, output: TextIO) -> dict[str, str]:
    ours = {
        "KBRL_RUN_DIR": str(run_dir.resolve()),
        "PYTHONUNBUFFERED": "1",
        "HONCHO_PROCESS_NAME": instance,
        LAUNCHER: identity(),
    }
    colour = {"FORCE_COLOR": "1"} if output.isatty() and not os.environ.get("NO_COLOR") else {}
    brief = {STATUS_LINE: "1"} if _has_status_line(output) else {}
    return {**os.environ, **colour, **brief, **ours}


def _has_status_line(output: TextIO) -> bool:
    return output.isatty() and os.environ.get("TERM") != "dumb"


def _columns(output: TextIO) -> int:
    try:
        return os.get_terminal_size(output.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


class StatusLine:
    """How far a run is, in one line: `training  update 5 of 14  ━━━━──────  2m 10s left`."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self._run_dir, self._clock, self._began = run_dir, clock, clock()

    def __call__(self, width: int) -> str:
        now = self._clock()
        seen = progress.read(self._run_dir)
        if seen is None:
            return f"starting the processes  {duration(now - self._began)}"[:width]
        left = seen.left_s(now)
        parts = [seen.phase, seen.note, bar(seen.share)[0], f"{duration(left)} left" if left is not None else ""]
        return "  ".join(part for part in parts if part)[:width]


def _exit_code(code: int | None) -> int:
    """As a shell counts: 128 + signal for a process that was killed."""
    if code is None:
        return 1
    return 128 - code if code < 0 else code
