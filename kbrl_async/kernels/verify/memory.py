"""Memory between processes: reading a child's, and files in memory that can be sealed."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = _libc.process_vm_writev.restype = ctypes.c_ssize_t
_SIZE_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, SHRINK, GROW
_SEALS = _SIZE_SEALS | 0x8  # F_SEAL_WRITE
_F_ADD_SEALS = 1033
_MOST = 64 << 20
_LONGEST, _IN_A_FILE = 64 << 10, b"\0"


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_memory(pid: int, address: int, target: int, size: int) -> bool:
    """Copy `size` bytes at `address` of process `pid` to our address `target`; False where not all of it can
    be read.
    """
    return _copied(_libc.process_vm_readv, pid, address, target, size)


def write_memory(pid: int, address: int, source: int, size: int) -> bool:
    """Copy `size` bytes at our address `source` to `address` of process `pid`; False where not all of it went there."""
    return _copied(_libc.process_vm_writev, pid, address, source, size)


def _copied(copy: Callable[..., int], pid: int, remote: int, local: int, size: int) -> bool:
    """Piece by piece: Linux moves less than 2 GiB in one call, and says how much that was."""
    if not 0 < remote < 1 << 63:
        return False
    done = 0
    while done < size:
        mine, theirs = _IoVec(local + done, size - done), _IoVec(remote + done, size - done)
        moved = copy(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        if moved <= 0:
            return False
        done += moved
    return True


@functools.cache
def may_read_children() -> bool:
    """Whether this host lets us read the memory of a child process (some containers do not)."""
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with open(f"/proc/{child.pid}/maps") as file:
            address = int(file.readline().partition("-")[0], 16)
        byte = ctypes.create_string_buffer(1)
        return read_memory(child.pid, address, ctypes.addressof(byte), 1)
    except OSError:
        return False
    finally:
        child.kill()
        child.communicate()


def give_back() -> None:
    """What was freed goes back to the system. By itself, glibc gives back only what lies behind the last piece in use:
    after tensors of many sizes that is little, and the process stays as large as it ever was, and grows.
    """
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def own_bytes() -> int:
    """What this process holds alone and in no file; 0 where the system does not say."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * mmap.PAGESIZE


class Surplus:
    """Freed memory that is kept for reuse, bounded. Giving it back after each candidate would have the next one fault
    all its pages in anew; never giving it back lets the process grow with the largest problems that ever met.
    """

    def __init__(
        self, most: int = _MOST, held: Callable[[], int] = own_bytes, give: Callable[[], None] = give_back
    ) -> None:
        self._most, self._held, self._give = most, held, give
        self._least = held()

    def check(self) -> None:
        """Between two candidates: all of it goes where the process holds `most` bytes more than it once needed."""
        held = self._held()
        if held - self._least > self._most:
            self._give()
            self._least = self._held()
        else:
            self._least = min(self._least, held)


def as_message(data: bytes) -> tuple[bytes, list[int]]:
    """What to send over a socket, and the descriptors to go first with it: a candidate with its files may be longer
    than any message. Whoever sends closes them.
    """
    if len(data) <= _LONGEST:
        return data, []
    fd, view = memory_file("message"), memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return _IN_A_FILE, [fd]


def whole(data: bytes, fds: list[int]) -> tuple[bytes, list[int]]:
    """What was meant by such a message, and the descriptors that are left."""
    if data != _IN_A_FILE or not fds:
        return data, fds
    with os.fdopen(fds[0], "rb") as file:
        file.seek(0)
        return file.read(), fds[1:]


def memory_file(name: str) -> int:
    """A new file in memory; `seal` makes it unchangeable."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def content_of(fd: int) -> bytearray:
    """All of a file, as one buffer of its own. A read of 2 GiB or more ends before.

    :raises ValueError: it became shorter meanwhile.
    """
    data = bytearray(os.fstat(fd).st_size)
    done = 0
    with memoryview(data) as view:
        while done < len(data):
            with view[done:] as left:
                got = os.preadv(fd, [left], done)
            if not got:
                raise ValueError("a file became shorter while it was read")
            done += got
    return data


def copied(fd: int) -> int:
    """A new sealed file in memory with the same content. Two children that get the same file could leave each other
    word in its offset, its times or its hints.
    """
    made, size, begin = memory_file("copy"), os.fstat(fd).st_size, 0
    while begin < size:
        begin += os.sendfile(made, fd, begin, size - begin)
    seal(made)
    return made


def seal(fd: int) -> None:
    """Nobody can change the file any more, whoever holds a descriptor of it."""
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)


def seal_size(fd: int) -> None:
    """Its content may change, its size can't any more. Before anybody maps a file that a child gets: where a mapped
    file was cut, the next touch is the end of the process.
    """
    fcntl.fcntl(fd, _F_ADD_SEALS, _SIZE_SEALS)
