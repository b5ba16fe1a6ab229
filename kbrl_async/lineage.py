"""Which process this is, and whether another still lives: a pid with its start time, since pids are used again.

::

    launcher: identity() ──KBRL_LAUNCHER──▶ nanny of a service: lives(…)? No: drain and end, as with SIGTERM
"""

from __future__ import annotations

import os
from pathlib import Path

LAUNCHER = "KBRL_LAUNCHER"
"""Who has started a service and collects its lines; what runs without one is nobody's to end."""


def identity(pid: int | None = None, proc: Path = Path("/proc")) -> str:
    """`"pid:start"` of a process that lives, of this one by default; empty where that can't be told."""
    try:
        return _identity(pid or os.getpid(), proc)
    except OSError:
        return ""


def lives(known: str, proc: Path = Path("/proc")) -> bool:
    """Whether the process of an `identity` is still there. One that nobody has waited for yet is gone all the same.

    True where that can't be told now, for want of memory or files: whoever asks may ask again.
    """
    pid = known.partition(":")[0]
    try:
        return pid.isdigit() and _identity(int(pid), proc) == known
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True


def _identity(pid: int, proc: Path) -> str:
    fields = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else f"{pid}:{fields[19]}"
