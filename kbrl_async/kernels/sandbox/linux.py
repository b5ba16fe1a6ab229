"""The few system calls that Python has no name for. Thin: each raises `OSError` and decides nothing."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_THREAD = 0x00010000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
# The three Landlock calls have the same numbers on every architecture.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION = 1
# As has this one.
_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY = 1
_CAPSET = {"x86_64": 126, "aarch64": 91}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SECCOMP_SET_FILTER, _SECCOMP_TSYNC = 1, 1
_CAPABILITY_VERSION_3 = 0x20080522

LANDLOCK_EXECUTE, LANDLOCK_WRITE_FILE, LANDLOCK_READ_FILE, LANDLOCK_READ_DIR = 1, 2, 4, 8
LANDLOCK_TRUNCATE, LANDLOCK_IOCTL = 1 << 14, 1 << 15
LANDLOCK_READ = LANDLOCK_EXECUTE | LANDLOCK_READ_FILE | LANDLOCK_READ_DIR
_LANDLOCK_ON_FILES = LANDLOCK_EXECUTE | LANDLOCK_WRITE_FILE | LANDLOCK_READ_FILE | LANDLOCK_TRUNCATE | LANDLOCK_IOCTL

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def enter_pid_namespace(fd: int) -> None:
    """Later children of this process are born there; it stays where it is itself."""
    _check(_libc.setns(fd, CLONE_NEWPID), "setns")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _check(
        _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()),
        f"mount {target}",
    )


def set_read_only(path: str, *, read_only: bool, recursive: bool = False) -> None:
    """The mount at `path`, with those below it if asked: nothing in it can be changed, modes and owners included."""
    attributes = (MOUNT_ATTR_RDONLY, 0) if read_only else (0, MOUNT_ATTR_RDONLY)
    body = struct.pack("4Q", *attributes, 0, 0)
    flags = ctypes.c_uint(_AT_RECURSIVE if recursive else 0)
    size = ctypes.c_size_t(len(body))
    _check(_libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, body, size), f"mount_setattr {path}")


def prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def drop_capabilities() -> None:
    number = _CAPSET.get(platform.machine())
    if number is None:
        raise OSError(f"capset has no known number on {platform.machine()}")
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    data = ctypes.create_string_buffer(24)
    _check(_libc.syscall(number, header, data), "capset")


def seccomp_load(program: bytes) -> None:
    """Install a BPF program (8 bytes an instruction). Needs `PR_SET_NO_NEW_PRIVS`."""
    code = ctypes.create_string_buffer(program, len(program))
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    _check(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_, 0, 0), "seccomp")


def seccomp_load_everywhere(program: bytes) -> None:
    """`seccomp_load` for every thread of this process. Needs `PR_SET_NO_NEW_PRIVS`."""
    number = _SECCOMP.get(platform.machine())
    if number is None:
        raise OSError(f"seccomp has no known number on {platform.machine()}")
    code = ctypes.create_string_buffer(program, len(program))
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    if _check(_libc.syscall(number, _SECCOMP_SET_FILTER, _SECCOMP_TSYNC, filter_), "seccomp") > 0:
        raise OSError("a thread of this process can't be given the seccomp filter")


def landlock_abi() -> int:
    """0 where the kernel has no Landlock."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)))


def landlock_ruleset(abi: int, *, talks: bool = False) -> tuple[int, int]:
    """A ruleset that handles all file access, TCP, abstract sockets and signals: its descriptor and all file rights.

    `talks`: leave out TCP and sockets, for a tool that must speak with what it watches.
    """
    rights = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1
    parts = [rights] + ([0 if talks else 3] if abi >= 4 else []) + ([0 if talks else 3] if abi >= 6 else [])
    body = struct.pack(f"{len(parts)}Q", *parts)
    buffer = ctypes.create_string_buffer(body, len(body))
    return _check(_libc.syscall(_LANDLOCK_CREATE, buffer, ctypes.c_size_t(len(body)), 0), "landlock"), rights


def landlock_allow(ruleset: int, path: str, rights: int) -> None:
    """Allow `rights` on `path` and below. A path that does not exist is nobody's loss."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        if not os.path.isdir(path):
            rights &= _LANDLOCK_ON_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, fd), 12)
        _check(_libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock {path}")
    finally:
        os.close(fd)


def landlock_restrict(ruleset: int) -> None:
    _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")


def loopback_up() -> None:
    """Brings up `lo` of this network namespace, which reaches nobody but the processes in it."""
    request = struct.pack("16sH14x", b"lo", _IFF_UP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)
