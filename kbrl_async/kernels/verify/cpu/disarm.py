"""Switching a frozen child's kernels off from outside: the first instruction of each becomes a return, or all of them.

::

    artifact (.so, ours) ─ELF─▶ its functions' offsets     /proc/PID/maps ─▶ where the child has it mapped
                                      └────────── /proc/PID/mem: `ret` ──────────┘

An extension's functions may be local to their file, or part of others: of those all code becomes returns. Python that
calls one gets nonsense then, and mostly ends.

Nothing that the candidate's Python can look at changes: neither the launcher nor the way of the call. An output that is
still right was not made by these kernels.
"""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path

from kbrl_async.kernels.backends.launch.elf import functions

_RETURN = {"x86_64": b"\xc3", "aarch64": b"\xc0\x03\x5f\xd6"}


def disarm(pid: int, artifacts: list[Path], whole: bool = False) -> int:
    """How many functions of these shared objects (`whole`: stretches of all their code) return at once in process `pid`
    from now on; 0 where this host or architecture does not allow it. The process must be stopped, and must not be used
    for anything else afterwards.
    """
    code = _RETURN.get(platform.machine())
    if code is None:
        return 0
    written = 0
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_WRONLY)
    except OSError:
        return 0
    try:
        for artifact in artifacts:
            for address, size in _code(pid, artifact, len(code), whole):
                filling = code * (size // len(code))
                written += os.pwrite(memory, filling, address) == len(filling)
    except (OSError, struct.error, ValueError, IndexError):
        return 0
    finally:
        os.close(memory)
    return written


def _code(pid: int, artifact: Path, instruction: int, whole: bool) -> Iterator[tuple[int, int]]:
    """Addresses and bytes."""
    status = artifact.stat()
    offsets = functions(artifact.read_bytes())
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            span, rights, offset, _, inode = line.split()[:5]
            if int(inode) != status.st_ino or "x" not in rights:
                continue
            begin, end = (int(part, 16) for part in span.split("-"))
            first = int(offset, 16)
            if whole:
                yield begin, end - begin
            else:
                yield from ((begin + at - first, instruction) for at in offsets if first <= at < first + end - begin)
