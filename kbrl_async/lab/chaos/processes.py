"""Who belongs to a run on this host, as /proc tells: nannies, their children, sandboxes and what runs in them.

::

    nanny ─ child (KBRL_RUN_DIR, KBRL_NANNY_PID = its parent) ┬ outer ─ zygote ─ candidate or compiler ─ …
                                                              └ rank (of the same service)
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from kbrl_async.lab.chaos.faults import CANDIDATE, COMPILER, NANNY, RANK, RUN, ZYGOTE

_ZYGOTE = "kbrl_async.kernels.sandbox.zygote"
_SERVICE = re.compile(r"services\.([a-z_]+)$")


class ProcessRole(StrEnum):
    NANNY = "nanny"
    CHILD = "child"
    RANK = "rank"
    """One that the first rank of a learner has started."""
    ZYGOTE = "zygote"
    CONFINED = "confined"
    """What runs in a sandbox: a candidate, or a compiler."""


class Process(msgspec.Struct, frozen=True):
    pid: int
    role: ProcessRole
    service: str
    """The one that it works for."""
    instance: str


class _ProcEntry(msgspec.Struct, frozen=True):
    pid: int
    parent: int
    words: tuple[str, ...]
    environment: dict[str, str]


def census(run_dir: Path, proc: Path = Path("/proc")) -> list[Process]:
    """All processes of the run, children first."""
    entries = {entry.pid: entry for entry in _entries(proc)}
    below: dict[int, list[int]] = defaultdict(list)
    for entry in entries.values():
        below[entry.parent].append(entry.pid)
    wanted = str(run_dir.resolve())
    found: list[Process] = []
    for entry in entries.values():
        service = _service(entry, wanted)
        if service:
            instance = entry.environment.get("HONCHO_PROCESS_NAME", service)
            found.append(Process(entry.pid, ProcessRole.CHILD, service, instance))
            found.append(Process(entry.parent, ProcessRole.NANNY, service, instance))
            found += _sandboxes(entry.pid, service, instance, entries, below)
            found += _ranks([entries[pid] for pid in below[entry.pid]], service)
    return sorted(found, key=lambda process: (process.role is not ProcessRole.CHILD, process.pid))


def matching(processes: list[Process], target: str) -> list[Process]:
    """Those that a fault's target names."""
    if target == RUN:
        return processes
    if target in (CANDIDATE, COMPILER):
        farm = target == COMPILER
        return [p for p in processes if p.role is ProcessRole.CONFINED and (p.service == "compile_farm") == farm]
    if target in (ZYGOTE, RANK):
        return [p for p in processes if p.role == target]
    role = ProcessRole.NANNY if target.startswith(NANNY) else ProcessRole.CHILD
    name = target.removeprefix(NANNY)
    return [p for p in processes if p.role is role and name in (p.service, p.instance)]


def instance_of(pid: int, proc: Path = Path("/proc")) -> str:
    """The runner's name of a process, such as `learner.1`; empty where it is unknown."""
    return _environment(proc / str(pid)).get("HONCHO_PROCESS_NAME", "")


def _service(entry: _ProcEntry, run_dir: str) -> str:
    """The service whose working process this is, or an empty string."""
    if entry.environment.get("KBRL_RUN_DIR") != run_dir or entry.environment.get("KBRL_NANNY_PID") != str(entry.parent):
        return ""
    return next((match[1] for word in entry.words if (match := _SERVICE.search(word))), "")


def _ranks(children: list[_ProcEntry], service: str) -> Iterator[Process]:
    """By the name that they were started with: between fork and exec whatever a child starts looks like the child."""
    for entry in children:
        instance = entry.environment.get("HONCHO_PROCESS_NAME", "")
        if instance.startswith(f"{service}.rank"):
            yield Process(entry.pid, ProcessRole.RANK, service, instance)


def _sandboxes(
    top: int, service: str, instance: str, entries: Mapping[int, _ProcEntry], below: Mapping[int, list[int]]
) -> Iterator[Process]:
    pending = [(pid, 0) for pid in below[top]]
    while pending:
        pid, depth = pending.pop()
        depth += depth > 0 or _ZYGOTE in entries[pid].words
        if depth:
            role = ProcessRole.ZYGOTE if depth <= 2 else ProcessRole.CONFINED
            yield Process(pid, role, service, instance)
        pending += [(child, depth) for child in below[pid]]


def _entries(proc: Path) -> Iterator[_ProcEntry]:
    for folder in proc.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                words = tuple((folder / "cmdline").read_bytes().decode(errors="replace").split("\0"))
                yield _ProcEntry(int(folder.name), parent, words, _environment(folder))


def _environment(folder: Path) -> dict[str, str]:
    try:
        variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    pairs = (variable.partition("=") for variable in variables)
    return {name: value for name, sign, value in pairs if sign and name.startswith(("KBRL_", "HONCHO_"))}
