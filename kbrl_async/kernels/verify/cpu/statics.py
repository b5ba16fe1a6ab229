"""The static memory of built shared objects in a child (`static int calls;`), put back from outside before each call:
what a kernel leaves there is not found by the next call.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from kbrl_async.kernels.backends.launch import elf
from kbrl_async.kernels.verify.memory import read_memory, write_memory

MAX_BYTES = 32 << 20


def refusal(artifacts: Mapping[str, Path]) -> str:
    """Why the static memory of these can't be put back; empty where it can."""
    try:
        writable = [elf.writable(path.read_bytes()) for path in artifacts.values()]
    except (struct.error, ValueError):
        return "what was built is no shared object"
    if any(found is None for found in writable):
        return "a kernel keeps memory of its own thread"
    if sum(size for found in writable for _, size in found or ()) > MAX_BYTES:
        return "static memory of the kernels is too large to be put back before each call"
    return ""


class Statics:
    """Of one stopped process, as it is when this is made: before the first call of any kernel.

    :raises OSError: the process is gone, or has taken that memory away.
    """

    def __init__(self, pid: int, artifacts: Mapping[str, Path]) -> None:
        self._pid = pid
        self._kept: list[tuple[int, torch.Tensor]] = []
        self._now: list[torch.Tensor] = []
        for address, size in _mapped(pid, artifacts):
            block = torch.empty(size, dtype=torch.uint8)
            if not read_memory(pid, address, block.data_ptr(), size):
                raise OSError(f"static memory of {pid} can't be read")
            self._kept.append((address, block))
            self._now.append(torch.empty_like(block))

    def restore(self) -> None:
        """All of it is as it was. What did not change is not written: its lines stay as cold as they are.

        :raises OSError: the process is gone, or has taken its memory away.
        """
        for (address, kept), now in zip(self._kept, self._now, strict=True):
            if not read_memory(self._pid, address, now.data_ptr(), now.numel()):
                raise OSError("static memory is gone")
            if not torch.equal(kept, now) and not write_memory(self._pid, address, kept.data_ptr(), kept.numel()):
                raise OSError("static memory can't be written")


def _mapped(pid: int, artifacts: Mapping[str, Path]) -> Iterator[tuple[int, int]]:
    bases: dict[int, int] = {}
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            span, _, offset, _, inode = line.split()[:5]
            if int(offset, 16) == 0:
                bases.setdefault(int(inode), int(span.partition("-")[0], 16))
    for path in artifacts.values():
        base = bases.get(path.stat().st_ino)
        if base is None:
            raise OSError("a shared object is not where it was loaded")
        for address, size in elf.writable(path.read_bytes()) or ():
            yield base + address, size
