"""Starting every process of a run and waiting for its end, on honcho's Manager.

One process that ends takes all down: the reward aggregator ends when the summary is written; any other that ends
has given up. Each is its own session, gets SIGTERM, and SIGKILL after `GRACE_S`. Each knows who we are
(`KBRL_LAUNCHER`) and leaves by itself where we are killed without a word.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

import msgspec
from honcho.manager import SYSTEM_PRINTER_NAME, Manager
from honcho.printer import Message, Printer

from kbrl_async.errors import RunError
from kbrl_async.lineage import LAUNCHER, identity

GRACE_S = 8.0
START_POLL_S = 0.05
INTERRUPTED = (130, 143)
ERROR = "error: "
"""How a service begins the one line that says why it gives up."""
_STOPPED = re.compile(r"(\S+) stopped \(rc=(-?\d+)\)")


class Ended(msgspec.Struct, frozen=True):
    """How the processes ended."""

    first: str
    """The process that ended first; empty if we were told to stop."""
    code: int
    """Its exit code, or 130 (Ctrl-C) or 143 (SIGTERM)."""
    reason: str = ""
    """What it said last about an error: its cause and cure."""

    @property
    def interrupted(self) -> bool:
        return not self.first and self.code in INTERRUPTED


def gave_up(ended: Ended, goal: str, cure: str) -> RunError:
    """The error that says which process ended before the `goal` was reached, with that process's exit code."""
    who = ended.first or "a process"
    if ended.reason:
        error = RunError(f"{who} gave up: {ended.reason}")
    else:
        error = RunError(f"{who} ended with exit code {ended.code} before the {goal} did", cure)
    error.exit_code = ended.code or RunError.exit_code
    return error


class RunPrinter(Printer):  # type: ignore[misc] # honcho has no types
    """Prints the processes' lines; of honcho's own only what a person needs, and remembers who stopped first."""

    def __init__(self, output: TextIO) -> None:
        super().__init__(output)
        self.first_stopped = ""
        self.reasons: dict[str, str] = {}
        self.unread: Callable[[], None] = lambda: None
        """Called when whoever read our lines is gone."""
        self._killed: set[str] = set()
        self._stopping = False

    def write(self, message: Message) -> None:
        line = message.data.decode("utf-8", "replace") if isinstance(message.data, bytes) else str(message.data)
        if message.name == SYSTEM_PRINTER_NAME:
            self._system(line.strip(), message)
            return
        if line.startswith(ERROR):
            self.reasons[message.name] = line.removeprefix(ERROR).strip()
        self._show(message)

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
        try:
            super().write(message)
        except BrokenPipeError:
            self._stopping = True
            self.output = open(os.devnull, "w")  # noqa: SIM115 - until the end
            self.unread()


class RunManager(Manager):  # type: ignore[misc] # honcho has no types
    """A Manager that also kills what ignores a SIGTERM when nothing at all has stopped."""

    def __init__(self, printer: RunPrinter) -> None:
        super().__init__(printer)
        printer.unread = self._unread
        self._last_resort = threading.Timer(GRACE_S, self.kill)
        self._last_resort.daemon = True

    def _unread(self) -> None:
        """`| head`, or a `tee` that was killed: a run that nobody sees, and that no Ctrl-C reaches, must not go on."""
        self.returncode = 143
        self.terminate()

    def terminate(self) -> None:
        if self._terminating:
            return
        if not self._all_started():
            # Ctrl-C in the first moment: honcho can't signal a process whose pid it has not been told yet.
            threading.Timer(START_POLL_S, self.terminate).start()
            return
        super().terminate()
        self._last_resort.start()

    def loop(self) -> None:
        super().loop()
        self._last_resort.cancel()


def python_service(name: str) -> str:
    """The shell command of a service; `exec` makes the shell the service, so that signals reach it."""
    return f"exec {shlex.quote(sys.executable)} -m services.{name}"


def start_and_wait(
    run_dir: Path,
    counts: Mapping[str, int],
    *,
    command: Callable[[str], str] = python_service,
    output: TextIO | None = None,
) -> Ended:
    """Start `counts` processes of each service on this run, show their lines, wait until all have ended."""
    output = output or sys.stdout
    printer = RunPrinter(output)
    manager = RunManager(printer)
    for name, count in counts.items():
        for number in range(1, count + 1):
            instance = f"{name}.{number}"
            shown = instance if count > 1 else name
            manager.add_process(shown, command(name), env=_environment(run_dir, instance, output))
    manager.loop()
    first = printer.first_stopped
    return Ended(first=first, code=_exit_code(manager.returncode), reason=printer.reasons.get(first, ""))


def _environment(run_dir: Path, instance: str, output: TextIO) -> dict[str, str]:
    ours = {
        "KBRL_RUN_DIR": str(run_dir.resolve()),
        "PYTHONUNBUFFERED": "1",
        "HONCHO_PROCESS_NAME": instance,
        LAUNCHER: identity(),
    }
    colour = {"FORCE_COLOR": "1"} if output.isatty() and not os.environ.get("NO_COLOR") else {}
    return {**os.environ, **colour, **ours}


def _exit_code(code: int | None) -> int:
    """As a shell counts: 128 + signal for a process that was killed."""
    if code is None:
        return 1
    return 128 - code if code < 0 else code
