"""The seccomp programs, built once in the zygote and loaded by every child (0.05 ms instead of building 0.2–10 ms).

A deny list over allow: torch, OpenMP and libc differ too much between versions for an allow list. What is denied
answers `EPERM`; `clone3` answers `ENOSYS`, so that libc falls back to `clone`, whose flags a filter can see.
"""

from __future__ import annotations

import errno
import tempfile

from kbrl_async.kernels.sandbox import linux

_ALWAYS = [
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "process_madvise",
    "process_mrelease",
    "lsm_set_self_attr",
    "pidfd_getfd",
    "kcmp",
    "perf_event_open",
    "bpf",
    "userfaultfd",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "keyctl",
    "add_key",
    "request_key",
    "mount",
    "umount2",
    "move_mount",
    "open_tree",
    "fsopen",
    "fsmount",
    "fspick",
    "mount_setattr",
    "open_tree_attr",
    "pivot_root",
    "chroot",
    "setns",
    "unshare",
    "sched_setaffinity",
    "sched_setscheduler",
    "sched_setparam",
    "sched_setattr",
    "setpriority",
    "ioprio_set",
    "socket",
    "socketpair",
    "connect",
    "bind",
    "listen",
    "accept",
    "accept4",
    "shmget",
    "shmat",
    "shmctl",
    "semget",
    "semop",
    "semctl",
    "msgget",
    "msgsnd",
    "msgctl",
    "mq_open",
    "init_module",
    "finit_module",
    "delete_module",
    "kexec_load",
    "reboot",
    "swapon",
    "swapoff",
    "acct",
    "quotactl",
    "quotactl_fd",
    "name_to_handle_at",
    "open_by_handle_at",
    "personality",
    "syslog",
    "settimeofday",
    "clock_settime",
    "clock_adjtime",
    "adjtimex",
    "sethostname",
    "setdomainname",
    "fanotify_init",
    "inotify_init",
    "inotify_init1",
    "seccomp",
    "mbind",
    "set_mempolicy",
    "set_mempolicy_home_node",
    "migrate_pages",
    "move_pages",
    "modify_ldt",
    "iopl",
    "ioperm",
    "vhangup",
    "nfsservctl",
    "lookup_dcookie",
]
_KERNEL_ONLY = [
    "execve",
    "execveat",
    "fork",
    "vfork",
    "kill",
    "tkill",
    "tgkill",
    "rt_sigqueueinfo",
    "rt_tgsigqueueinfo",
    "pidfd_send_signal",
    "pidfd_open",
    "setsid",
    "setpgid",
    "setitimer",
    "alarm",
    "timer_create",
    "timerfd_create",
    "memfd_create",
    "prlimit64",
    "setrlimit",
    "symlink",
    "symlinkat",
    "link",
    "linkat",
    "mknod",
    "mknodat",
    # Landlock does not cover who owns a file, its mode, times and attributes: a child may own what it can only read.
    "chmod",
    "fchmod",
    "fchmodat",
    "fchmodat2",
    "chown",
    "fchown",
    "lchown",
    "fchownat",
    "utime",
    "utimes",
    "futimesat",
    "utimensat",
    "setxattr",
    "lsetxattr",
    "fsetxattr",
    "setxattrat",
    "removexattr",
    "lremovexattr",
    "fremovexattr",
    "removexattrat",
    "file_setattr",
    "memfd_secret",
]
_GPU_TOOL = frozenset(
    [
        "socket",
        "socketpair",
        "connect",
        "bind",
        "listen",
        "accept",
        "accept4",
        "ptrace",
        "process_vm_readv",
        "process_vm_writev",
        "sched_setaffinity",
    ]
)
"""What a tool that watches a GPU program may do, in its own network and process namespaces."""
_NUMBERS = {
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
    "process_mrelease": 448,
    "set_mempolicy_home_node": 450,
    "fchmodat2": 452,
    "lsm_set_self_attr": 460,
    "setxattrat": 463,
    "removexattrat": 466,
    "open_tree_attr": 467,
    "file_setattr": 469,
}
"""Calls that are newer than some libseccomp which has to deny them; a new call has one number on all architectures."""
_PRCTL_DENIED = (linux.PR_SET_PDEATHSIG, linux.PR_SET_DUMPABLE)


def seccomp_program(profile: str, threads: int) -> bytes:
    """The BPF bytes of a profile. Raises `ImportError` or `OSError` where libseccomp is missing."""
    import pyseccomp as seccomp

    program = seccomp.SyscallFilter(defaction=seccomp.ALLOW)
    deny = seccomp.ERRNO(errno.EPERM)
    is_kernel = profile in ("kernel", "gpu")
    allowed = _GPU_TOOL if profile == "gpu-tool" else frozenset()
    for name in [*_ALWAYS, *(_KERNEL_ONLY if is_kernel else ())]:
        if name in allowed:
            continue
        for call in (name, *((_NUMBERS[name],) if name in _NUMBERS else ())):
            try:
                program.add_rule(deny, call)
                break
            except (OSError, ValueError):  # this architecture or library has no such call
                continue
    if is_kernel:
        program.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
        if threads > 1:
            flag = linux.CLONE_THREAD
            program.add_rule(deny, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, 0))
        else:
            program.add_rule(seccomp.ERRNO(errno.EAGAIN), "clone")
        for option in _PRCTL_DENIED:
            program.add_rule(deny, "prctl", seccomp.Arg(0, seccomp.EQ, option))
    with tempfile.TemporaryFile() as file:
        program.export_bpf(file)
        file.seek(0)
        return file.read()
