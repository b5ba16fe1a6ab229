"""The zygote's own process: imports once, then forks one confined child per request. Runs as
`python -m kbrl_async.kernels.sandbox.zygote FD OPTIONS`.

::

    outer (waits) ── fork ─▶ zygote, pid 1 of its namespaces ── fork ─▶ child, pid 1 of its own ─▶ layers ─▶ entry
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable

import msgspec

from kbrl_async.kernels.sandbox import gpu, layers, linux
from kbrl_async.kernels.sandbox.filters import seccomp_program
from kbrl_async.kernels.sandbox.wire import (
    Access,
    Exited,
    Isolation,
    Limits,
    Options,
    Spawn,
    Spawned,
    Started,
    Wait,
    receive,
    send,
)

Entry = Callable[[socket.socket, bytes, list[int], Isolation], None]


class _Server:
    def __init__(self, channel: socket.socket, options: Options, missing: list[str]) -> None:
        self.channel, self.options, self.missing = channel, options, missing
        self.modules = {name: importlib.import_module(name) for name in options.preload}
        self.program = self._seccomp()
        self.own_processes = self._pid_namespace()
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        gc.collect()
        gc.freeze()

    def _seccomp(self) -> bytes | None:
        try:
            return seccomp_program(self.options.profile, self.options.threads)
        except (ImportError, OSError, RuntimeError):
            return None

    def _pid_namespace(self) -> int | None:
        """Ours, to come back to after each child got one of its own; None where children have to share ours.

        A GPU child stays in ours: the driver looks itself up in the /proc that shows it.
        """
        if gpu.is_used_by(self.options.profile) or "pid namespace" in self.missing:
            return None
        ours = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        try:
            linux.unshare(linux.CLONE_NEWPID)
            linux.enter_pid_namespace(ours)
        except OSError:
            self.missing.append("pid namespace of each child")
            return None
        return ours

    def serve(self) -> None:
        send(self.channel, Started(tuple(self._probe())))
        while True:
            try:
                message, fds = receive(self.channel)
            except (EOFError, ConnectionError):
                return
            if isinstance(message, Spawn):
                self._spawn(message, fds)
            elif isinstance(message, Wait):
                send(self.channel, Exited(_status(message.pid)))

    def _probe(self) -> list[str]:
        """What a child will lack on this host, as one that confined itself and ended has found."""
        reader, writer = os.pipe()
        pid = self._fork()
        if pid == 0:
            isolation = layers.confine(self.options, Limits(), Access(), self.program, self.missing)
            os.write(writer, msgspec.json.encode(isolation.missing))
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as file:
            found = file.read()
        os.waitpid(pid, 0)
        missing = msgspec.json.decode(found, type=list[str]) if found else [*self.missing, "confinement"]
        if not gpu.is_used_by(self.options.profile):
            return missing
        return [*missing, gpu.OPEN_SURFACE, *([gpu.TOOL_SURFACE] if self.options.profile == "gpu-tool" else [])]

    def _fork(self) -> int:
        """A child, the first process of a pid namespace of its own: it sees and signals nobody else, and all that it
        starts dies with it, however it was daemonised.
        """
        if self.own_processes is None:
            return os.fork()
        linux.unshare(linux.CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                linux.enter_pid_namespace(self.own_processes)
        return pid

    def _spawn(self, request: Spawn, fds: list[int]) -> None:
        pid = self._fork()
        if pid == 0:
            self._become_child(request, fds)
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        send(self.channel, Spawned(pid), [pidfd])
        os.close(pidfd)

    def _become_child(self, request: Spawn, fds: list[int]) -> None:
        """Never returns."""
        code = 70
        try:
            self.channel.close()
            name, function = request.entry.split(":")
            entry: Entry = getattr(self.modules[name], function)
            isolation = layers.confine(self.options, request.limits, request.access, self.program, self.missing)
            entry(socket.socket(fileno=fds[0]), request.payload, fds[1:], isolation)
            code = 0
        finally:
            os._exit(code)


def _status(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 0


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    options = msgspec.json.decode(sys.argv[2], type=Options)
    missing = [] if options.is_enclosed else layers.enter_namespaces()
    if "pid namespace" not in missing and not options.is_enclosed:
        inner = os.fork()
        if inner != 0:
            channel.close()
            os.waitpid(inner, 0)
            os._exit(0)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if options.profile == "gpu-tool" and "network namespace" not in missing:
        with contextlib.suppress(OSError):
            linux.loopback_up()
    if "mount namespace" not in missing:
        layers.make_mounts_private()
        if gpu.is_used_by(options.profile) and "pid namespace" not in missing:
            with contextlib.suppress(OSError):
                layers.mount_proc()
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        _Server(channel, options, missing).serve()


if __name__ == "__main__":
    main()
