"""Confining this process: namespaces once in the zygote, everything else in each child before any untrusted code.

Each step that fails adds its name to a list of what is missing; the caller reports it in every verdict.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
from collections.abc import Sequence

from kbrl_async.kernels.sandbox import gpu, linux
from kbrl_async.kernels.sandbox.wire import Access, Isolation, Level, Limits, Options

_NAMESPACES = {
    "mount namespace": linux.CLONE_NEWNS,
    "pid namespace": linux.CLONE_NEWPID,
    "network namespace": linux.CLONE_NEWNET,
    "ipc namespace": linux.CLONE_NEWIPC,
    "uts namespace": linux.CLONE_NEWUTS,
}
_CORE_LAYERS = frozenset({"user namespace", "landlock", "seccomp"})
_PID_MAX_OF_NAMESPACES = (6, 14)
_LEAST_PID_MAX = 301
_FILES = 4096
"""In a child's scratch folder: autotuning leaves half a dozen for each configuration."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def enter_namespaces() -> list[str]:
    """Leave the host's users, processes, network, mounts and IPC. Single-threaded callers only; returns what
    is missing.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        linux.unshare(linux.CLONE_NEWUSER)
    except OSError:
        return ["user namespace", *_NAMESPACES]
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    missing = []
    for name, flag in _NAMESPACES.items():
        try:
            linux.unshare(flag)
        except OSError:
            missing.append(name)
    return missing


def make_mounts_private() -> None:
    linux.mount("none", "/", "none", linux.MS_REC | linux.MS_PRIVATE)


def mount_proc() -> None:
    """Show this pid namespace in /proc, and no other: the CUDA driver looks itself up there by its pid."""
    linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)


def confine(options: Options, limits: Limits, access: Access, program: bytes | None, missing: list[str]) -> Isolation:
    """Apply every layer to this process, for good. `missing` holds what the zygote could not have."""
    missing = list(missing)
    os.setsid()
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    _limit(limits, options.profile)
    if options.profile == "tool":
        _limit_processes(limits, missing)
    scratch = _private_scratch(options, limits, missing)
    if not gpu.is_used_by(options.profile):
        _attempt("read-only root", lambda: _make_read_only(access.write, scratch), missing)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    _attempt("capabilities", linux.drop_capabilities, missing)
    _restrict_files(options, access, scratch, missing)
    if options.profile == "gpu":
        gpu.postpone(program, limits)  # the driver needs threads of its own first
    else:
        _load_filter(program, missing)
    return Isolation(level(missing), tuple(missing))


def _attempt(name: str, step: object, missing: list[str]) -> bool:
    assert callable(step)
    try:
        step()
    except OSError:
        missing.append(name)
        return False
    return True


def _limit(limits: Limits, profile: str) -> None:
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    for kind, value in (
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, max(limits.files, gpu.FILES) if gpu.is_used_by(profile) else limits.files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, mapped + limits.memory_bytes),
    ):
        if kind == resource.RLIMIT_AS and gpu.is_used_by(profile):
            continue  # a CUDA context reserves hundreds of GB of addresses; `gpu.finish` limits data instead
        resource.setrlimit(kind, (value, value))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, whatever we started goes first
    if limits.cores:
        os.sched_setaffinity(0, limits.cores)
    if limits.nice:
        os.nice(limits.nice)


def _limit_processes(limits: Limits, missing: list[str]) -> None:
    """For tools, which may fork. Root is exempt from the usual limit; since Linux 6.14 a pid namespace has its own.

    On an older kernel the same file would change the whole host's limit: it is not touched there.
    """
    resource.setrlimit(resource.RLIMIT_NPROC, (limits.processes, limits.processes))
    if os.geteuid() != 0:
        return
    release = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    if os.getpid() != 1 or release < _PID_MAX_OF_NAMESPACES:
        missing.append("process limit")
        return

    def lower() -> None:
        with open("/proc/sys/kernel/pid_max", "w") as file:
            file.write(str(max(limits.processes, _LEAST_PID_MAX)))

    _attempt("process limit", lower, missing)


def _private_scratch(options: Options, limits: Limits, missing: list[str]) -> str:
    """A tmpfs of our own on the zygote's empty folder; without it a child can write nowhere."""

    def mount() -> None:
        linux.unshare(linux.CLONE_NEWNS)
        flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
        linux.mount(
            "tmpfs", options.scratch, "tmpfs", flags, f"size={limits.scratch_bytes},nr_inodes={_FILES},mode=0700"
        )

    if "mount namespace" not in missing and _attempt("private tmp", mount, missing):
        os.chdir(options.scratch)
        os.environ["TMPDIR"] = options.scratch
        return options.scratch
    return ""


def _make_read_only(but: Sequence[str], scratch: str) -> None:
    """All mounts but these folders and the scratch.

    Landlock lets the owner of a file change its mode, its times and its flags. The sandbox has the user's own id,
    so only this keeps a tool from `chmod` on whatever the user owns.
    """
    for folder in but:
        linux.mount(folder, folder, "none", linux.MS_BIND)
    linux.set_read_only("/", read_only=True, recursive=True)
    for folder in (*but, *((scratch,) if scratch else ())):
        linux.set_read_only(folder, read_only=False)


def _restrict_files(options: Options, access: Access, scratch: str, missing: list[str]) -> None:
    abi = linux.landlock_abi()
    if abi == 0:
        missing.append("landlock")
        return
    ruleset, everything = linux.landlock_ruleset(abi, talks=options.profile == "gpu-tool")
    on_gpu = gpu.is_used_by(options.profile)
    for path in (*options.read, *access.read, *(gpu.READ if on_gpu else ())):
        linux.landlock_allow(ruleset, path, linux.LANDLOCK_READ)
    device_rights = (linux.LANDLOCK_READ_FILE | linux.LANDLOCK_WRITE_FILE) & everything
    for path in _DEVICES:
        linux.landlock_allow(ruleset, path, device_rights)
    if on_gpu:  # the driver names its threads there
        rights = linux.LANDLOCK_READ | linux.LANDLOCK_WRITE_FILE | linux.LANDLOCK_TRUNCATE
        proc = "/proc" if options.profile == "gpu-tool" else "/proc/self"  # a tool looks at what it started
        linux.landlock_allow(ruleset, proc, rights & everything)
    for path in gpu.devices() if on_gpu else ():
        linux.landlock_allow(ruleset, path, device_rights | (linux.LANDLOCK_IOCTL & everything))
    for path in (*access.write, *((scratch,) if scratch else ())):
        linux.landlock_allow(ruleset, path, everything & ~linux.LANDLOCK_IOCTL)
    linux.landlock_restrict(ruleset)
    os.close(ruleset)


def _load_filter(program: bytes | None, missing: list[str]) -> None:
    if program is None or not _attempt("seccomp", lambda: linux.seccomp_load(program), missing):
        missing.append("seccomp") if "seccomp" not in missing else None


def level(missing: Sequence[str]) -> Level:
    """`full`, `reduced` or `none`: see `Isolation`."""
    if not missing:
        return "full"
    return "none" if set(missing) >= _CORE_LAYERS else "reduced"
