"""How a run stands, by what its processes leave in its folder: running, ended, stopped, or crashed.

::

    runs/NAME/processes/learner.1    locked while the process's nanny lives; empty until it says how it ended
    runs/NAME/summary.json           the run has ended

Invariants
* The system releases the lock whatever kills the nanny, so nothing that is dead is shown as running.
* A process that ended without a word, or gave up by itself, is a crash; one that was asked to end is not.
* Light: nannies import this.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import IO, NamedTuple

SUMMARY_FILE = "summary.json"
PROCESSES = "processes"
"""Folder of a run, a file a process."""
_ASKED = "stopped"
_TRIES, _PAUSE_S = 10, 0.02
"""Who looks at a run holds each lock for a moment."""


class RunStatus(StrEnum):
    RUNNING = "running"
    ENDED = "ended"
    STOPPED = "stopped"
    CRASHED = "crashed"


class Standing(NamedTuple):
    """A state, and why where that is not all."""

    state: RunStatus
    reason: str = ""


def is_finished(run_dir: Path) -> bool:
    return (run_dir / SUMMARY_FILE).exists()


def standing(run_dir: Path) -> Standing:
    """How the run of this folder stands now, as far as the processes of this host tell."""
    if is_finished(run_dir):
        return Standing(RunStatus.ENDED)
    said = {path.name: _ending(path) for path in sorted((run_dir / PROCESSES).glob("*"))}
    if None in said.values():
        return Standing(RunStatus.RUNNING)
    if not said:
        return Standing(RunStatus.STOPPED, "no process of it has left a word")
    if gave_up := [f"{name} gave up with exit code {word}" for name, word in said.items() if word not in _FINE]:
        return Standing(RunStatus.CRASHED, ", ".join(gave_up))
    if killed := [name for name, word in said.items() if not word]:
        who = "all were" if len(killed) == len(said) else f"{', '.join(killed)} {'was' if len(killed) == 1 else 'were'}"
        return Standing(RunStatus.CRASHED, f"{who} killed")
    return Standing(RunStatus.STOPPED)


_FINE = ("", "0", _ASKED)


def _ending(path: Path) -> str | None:
    """What the process said as it ended, empty if nothing; None where it lives."""
    with contextlib.suppress(FileNotFoundError), path.open() as file:
        if not _locked(file, fcntl.LOCK_SH):
            return None
        return file.read().strip()
    return _ASKED


def _locked(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def process(run_dir: Path, name: str) -> Iterator[Callable[[int, bool], None]]:
    """Hold the file of a process while it lives. What this gives takes its exit code, and whether it was asked to end.

    A folder that can't be written costs the record and nothing else.
    """
    with contextlib.ExitStack() as stack:
        try:
            (run_dir / PROCESSES).mkdir(exist_ok=True)
            file = stack.enter_context((run_dir / PROCESSES / name).open("a"))
        except OSError:
            yield lambda _code, _asked: None
            return
        for _ in range(_TRIES):
            if _locked(file, fcntl.LOCK_EX):
                break
            time.sleep(_PAUSE_S)
        _write(file, "")

        def ended(code: int, was_asked: bool) -> None:
            _write(file, _ASKED if was_asked else str(code))

        yield ended


def _write(file: IO[str], word: str) -> None:
    with contextlib.suppress(OSError):
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), word.encode())


def forget(run_dir: Path) -> None:
    """Drop what the processes of an earlier start said; those that live keep their files."""
    for path in (run_dir / PROCESSES).glob("*"):
        if _ending(path) is not None:
            path.unlink(missing_ok=True)
