"""What a child that uses a GPU is given beyond the others, and the second half of its confinement.

::

    confine: namespaces, rlimits, no capabilities, Landlock ─▶ trusted code makes the CUDA context (the driver starts
    threads, opens devices) ─▶ `finish`: seccomp on every thread, memory limit ─▶ untrusted code

The first half holds for the driver's threads too, because they are born after it; seccomp is then put on all of them.
"""

from __future__ import annotations

import glob
import resource

from kbrl_async.kernels.sandbox import linux
from kbrl_async.kernels.sandbox.wire import Isolation, Limits

OPEN_SURFACE = "gpu driver ioctl surface"
READ = (
    "/proc/driver",
    "/proc/devices",
    "/proc/modules",
    "/proc/sys/vm",
    "/proc/meminfo",
    "/proc/stat",
    "/sys/devices",
    "/sys/bus/pci",
    "/sys/module",
)
FILES = 4096
TOOL_SURFACE = "sockets and ptrace (in namespaces of its own)"
"""What a GPU tool such as compute-sanitizer needs beyond a compiler: it talks to the program that it watches."""


def is_used_by(profile: str) -> bool:
    """Whether children of this profile get the driver's devices."""
    return profile in ("gpu", "gpu-tool")


class _Postponed:
    """What `confine` leaves for `finish`, in this process."""

    program: bytes | None = None
    limits: Limits | None = None


def devices() -> list[str]:
    """Device files of the driver."""
    return sorted(glob.glob("/dev/nvidia*"))


def postpone(program: bytes | None, limits: Limits) -> None:
    _Postponed.program, _Postponed.limits = program, limits


def finish(isolation: Isolation) -> Isolation:
    """Call before any untrusted code, once CUDA works in this process."""
    missing = [*isolation.missing, OPEN_SURFACE]
    if _Postponed.limits is not None:
        ceiling = _data_bytes() + _Postponed.limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (ceiling, ceiling))
    try:
        if _Postponed.program is None:
            raise OSError("no seccomp program could be built")
        linux.seccomp_load_everywhere(_Postponed.program)
    except OSError:
        missing.append("seccomp")
    lost = {"user namespace", "landlock", "seccomp"} <= set(missing)
    return Isolation("none" if lost else "reduced", tuple(missing))


def _data_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()
