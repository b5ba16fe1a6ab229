"""The zygote's own process: imports once, then forks one confined child per request. Runs as
`python -m kbrl_async.sandbox.zygote FD OPTIONS`.

::

    outer (waits) ── fork ─▶ zygote, pid 1 of its namespaces ── fork ─▶ child ─▶ layers ─▶ entry ─▶ _exit
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

from kbrl_async.sandbox import layers, linux
from kbrl_async.sandbox.filters import seccomp_program
from kbrl_async.sandbox.wire import Exited, Isolation, Options, Spawn, Spawned, Started, Wait, receive, send

Entry = Callable[[socket.socket, bytes, list[int], Isolation], None]


class _Server:
    def __init__(self, channel: socket.socket, options: Options, missing: list[str]) -> None:
        self.channel, self.options, self.missing = channel, options, missing
        self.modules = {name: importlib.import_module(name) for name in options.preload}
        self.program = self._seccomp()
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        gc.collect()
        gc.freeze()

    def _seccomp(self) -> bytes | None:
        try:
            return seccomp_program(self.options.profile, self.options.threads)
        except (ImportError, OSError, RuntimeError):
            return None

    def serve(self) -> None:
        send(self.channel, Started(tuple(self.missing)))
        while True:
            try:
                message, fds = receive(self.channel)
            except (EOFError, ConnectionError):
                return
            if isinstance(message, Spawn):
                self._spawn(message, fds)
            elif isinstance(message, Wait):
                send(self.channel, Exited(_status(message.pid)))

    def _spawn(self, request: Spawn, fds: list[int]) -> None:
        pid = os.fork()
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
    missing = layers.enter_namespaces()
    if "pid namespace" not in missing:
        inner = os.fork()
        if inner != 0:
            channel.close()
            os.waitpid(inner, 0)
            os._exit(0)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if "mount namespace" not in missing:
        layers.make_mounts_private()
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        _Server(channel, options, missing).serve()


if __name__ == "__main__":
    main()
