"""Confining this process: namespaces once in the zygote, everything else in each child before any untrusted code.

Each step that fails adds its name to a list of what is missing; the caller reports it in every verdict.
"""

from __future__ import annotations

import os
import resource
import signal

from kbrl_async.sandbox import linux
from kbrl_async.sandbox.wire import Access, Isolation, Limits, Options

_NAMESPACES = {
    "mount namespace": linux.CLONE_NEWNS,
    "pid namespace": linux.CLONE_NEWPID,
    "network namespace": linux.CLONE_NEWNET,
    "ipc namespace": linux.CLONE_NEWIPC,
    "uts namespace": linux.CLONE_NEWUTS,
}
_CORE_LAYERS = frozenset({"user namespace", "landlock", "seccomp"})
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


def confine(options: Options, limits: Limits, access: Access, program: bytes | None, missing: list[str]) -> Isolation:
    """Apply every layer to this process, for good. `missing` holds what the zygote could not have."""
    missing = list(missing)
    os.setsid()
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    _limit(limits)
    scratch = _private_scratch(options, limits, missing)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    _attempt("capabilities", linux.drop_capabilities, missing)
    _restrict_files(options, access, scratch, missing)
    _load_filter(program, missing)
    return Isolation(_level(missing), tuple(missing))


def _attempt(name: str, step: object, missing: list[str]) -> bool:
    assert callable(step)
    try:
        step()
    except OSError:
        missing.append(name)
        return False
    return True


def _limit(limits: Limits) -> None:
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    for kind, value in (
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, mapped + limits.memory_bytes),
    ):
        resource.setrlimit(kind, (value, value))
    if limits.cores:
        os.sched_setaffinity(0, limits.cores)
    if limits.nice:
        os.nice(limits.nice)


def _private_scratch(options: Options, limits: Limits, missing: list[str]) -> str:
    """A tmpfs of our own on the zygote's empty folder; without it a child can write nowhere."""

    def mount() -> None:
        linux.unshare(linux.CLONE_NEWNS)
        flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
        linux.mount("tmpfs", options.scratch, "tmpfs", flags, f"size={limits.scratch_bytes},nr_inodes=256,mode=0700")

    if "mount namespace" not in missing and _attempt("private tmp", mount, missing):
        os.chdir(options.scratch)
        return options.scratch
    return ""


def _restrict_files(options: Options, access: Access, scratch: str, missing: list[str]) -> None:
    abi = linux.landlock_abi()
    if abi == 0:
        missing.append("landlock")
        return
    ruleset, everything = linux.landlock_ruleset(abi)
    for path in (*options.read, *access.read):
        linux.landlock_allow(ruleset, path, linux.LANDLOCK_READ)
    device_rights = (linux.LANDLOCK_READ_FILE | linux.LANDLOCK_WRITE_FILE) & everything
    for path in _DEVICES:
        linux.landlock_allow(ruleset, path, device_rights)
    for path in (*access.write, *((scratch,) if scratch else ())):
        linux.landlock_allow(ruleset, path, everything & ~linux.LANDLOCK_IOCTL)
    linux.landlock_restrict(ruleset)
    os.close(ruleset)


def _load_filter(program: bytes | None, missing: list[str]) -> None:
    if program is None or not _attempt("seccomp", lambda: linux.seccomp_load(program), missing):
        missing.append("seccomp") if "seccomp" not in missing else None


def _level(missing: list[str]) -> str:
    if not missing:
        return "full"
    return "none" if set(missing) >= _CORE_LAYERS else "reduced"
