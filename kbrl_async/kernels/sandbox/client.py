"""The trusted side: `Zygote` starts children, `Child` is the handle on one of them.

A `Zygote` restarts its process when that has died; the request that noticed raises `InfraError` and is retried by the
caller's caller, because nothing is known about what the dead process did.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import select
import shutil
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import kbrl_async
from kbrl_async.errors import InfraError
from kbrl_async.kernels.sandbox.canary import song
from kbrl_async.kernels.sandbox.layers import level
from kbrl_async.kernels.sandbox.scratch import Scratch
from kbrl_async.kernels.sandbox.wire import (
    Access,
    Exited,
    Isolation,
    Limits,
    Message,
    Options,
    Spawn,
    Spawned,
    Started,
    Wait,
    receive,
    send,
)

_BUBBLEWRAP = (
    *("bwrap", "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
    *("--die-with-parent", "--cap-add", "ALL", "--dev-bind", "/", "/", "--proc", "/proc"),
)
"""Namespaces, and the right to mount in them; the zygote's children give it up before untrusted code runs."""
HUB_CACHE = "HF_HUB_CACHE"
"""Where it is set, children may read the models there (KernelBench's level 4), and no other ones."""
CANARY = "kbrl_async.kernels.sandbox.canary"
LIBRARIES = ("msgspec", "torch")
"""Where these were found, all others are: a folder that PYTHONPATH alone names is a child's, too."""
_START_S = 60.0
START_S = _ANSWER_S = 30.0
"""What takes milliseconds, the start of a child first of all, may take so long on a loaded host."""
DEATH_S = 30.0
"""A killed process may take its time: a busy GPU's driver takes its contexts down one after the other. Less than what a
bench may stand still for before its work is given to another."""
_STOP_PAUSE_S = 20e-6
_STOP_YIELDS = 4
_WATCH_S = 0.05
_FLAGS, _PF_EXITING = 6, 0x4
"""Of /proc/PID/stat, behind the name; set before a process gives up its memory and its files."""
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SYSTEMROOT", "CUDA_VISIBLE_DEVICES", HUB_CACHE)


def interpreter_paths() -> tuple[str, ...]:
    """What Python and its libraries need to be read: the interpreter, site-packages, this package, system libraries.

    A user's own site-packages and one that a `.pth` file adds are known by their place on `sys.path` alone.
    """
    package = str(Path(kbrl_async.__file__).parent)
    added = (path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))
    paths = {*sysconfig.get_paths().values(), *site.getsitepackages(), *added, sys.prefix, sys.base_prefix, package}
    system = (
        "/usr",
        "/lib",
        "/lib64",
        "/bin",
        "/etc/ld.so.cache",
        "/etc/alternatives",
        "/proc/cpuinfo",
        "/sys/devices/system/cpu",
    )
    models = [os.environ[HUB_CACHE]] if os.environ.get(HUB_CACHE) else []
    return tuple(sorted({str(Path(path).resolve()) for path in (*paths, *system, *models)} - {"/"}))


class Zygote:
    """A clean process that forks confined children. Safe to share between threads.

    `profile` is `"kernel"`, `"gpu"`, `"tool"` or `"gpu-tool"`; `preload` names modules that hold the entries, imported
    before any fork.
    """

    def __init__(self, preload: tuple[str, ...], profile: str = "kernel", threads: int = 1) -> None:
        self._preload, self._profile, self._threads = preload, profile, threads
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._scratch = Scratch()
        self.is_enclosed = False
        self.missing: tuple[str, ...] = ()
        self.generation = 0
        """Counts the processes that this zygote has had; children of an earlier one are dead."""

    def __enter__(self) -> Zygote:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def isolation(self) -> Isolation:
        """What children have on this host, as one found that was started for it; known once started."""
        return Isolation(level(self.missing), self.missing)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process now, instead of at the first `spawn`."""
        with self._lock:
            self._ensure()

    def close(self) -> None:
        """At once, also while another thread starts it: that takes seconds, and holds the lock."""
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._stop()
            self._scratch.close()

    def replace(self) -> None:
        """End the process; the next `spawn` starts another."""
        with self._lock:
            self._stop()

    def check(self, within_s: float = START_S) -> None:
        """A canary, after a child was killed: a fresh one must be as confined as the first, and compute rightly.

        Raises `InfraError` where it does not, and replaces the zygote's process.
        """
        nonce = secrets.token_bytes(16)
        child = self.spawn(CANARY + ":run", nonce)
        try:
            answer = child.receive(1 << 16, within_s)
        finally:
            child.close()
        if answer != msgspec.msgpack.encode(song(self.isolation, nonce)):
            self.replace()
            raise InfraError("the sandbox does not work any more after a kill", "It is replaced; see the host's memory")

    def spawn(
        self,
        entry: str,
        payload: bytes = b"",
        fds: tuple[int, ...] = (),
        limits: Limits | None = None,
        access: Access | None = None,
    ) -> Child:
        """Fork a child, confine it, run `entry` in it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = Spawn(entry, payload, limits or Limits(), access or Access())
        try:
            with self._lock, theirs:
                self._ensure()
                answer, received = self._ask(request, [theirs.fileno(), *fds])
        except InfraError:
            ours.close()
            raise
        assert isinstance(answer, Spawned)
        return Child(self, answer.pid, received[0], ours)

    def wait(self, pid: int, generation: int) -> int | None:
        """Reap a dying child: its exit code, or minus its signal; None where the zygote that could say has
        died itself.
        """
        with self._lock:
            if generation != self.generation or self._channel is None:
                return None
            try:
                answer, _ = self._ask(Wait(pid), [])
            except InfraError:
                return None
        assert isinstance(answer, Exited)
        return answer.status

    def _ask(self, request: Message, fds: list[int]) -> tuple[Message, list[int]]:
        assert self._channel is not None
        try:
            send(self._channel, request, fds)
            return self._answer(_ANSWER_S)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self._stop()
            raise InfraError(
                f"the sandbox zygote died or hangs ({error})", "It is restarted at the next call"
            ) from error

    def _answer(self, deadline_s: float) -> tuple[Message, list[int]]:
        assert self._channel is not None
        self._channel.settimeout(deadline_s)
        return receive(self._channel)

    def _ensure(self) -> None:
        if self._process is not None and self._process.poll() is None and self._channel is not None:
            return
        self._stop()
        self.generation += 1
        self.missing = self.launch()
        if "user namespace" in self.missing and not self.is_enclosed and shutil.which("bwrap"):
            # Some hosts refuse us namespaces and grant them to bubblewrap: then it makes them, all else is the same.
            self._stop()
            self.is_enclosed = True
            self.missing = self.launch()

    def launch(self) -> tuple[str, ...]:
        """Start the process; what its children lack."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for side in (self._channel, theirs):
            side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        readable = (*interpreter_paths(), *_folders_of(LIBRARIES))
        options = Options(self._profile, (*self._preload, CANARY), readable, self._scratch.path, self._threads)
        options = msgspec.structs.replace(options, is_enclosed=self.is_enclosed)
        enclosure = _BUBBLEWRAP if self.is_enclosed else ()
        command = [*enclosure, sys.executable, "-m", "kbrl_async.kernels.sandbox.zygote", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, msgspec.json.encode(options).decode()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None,
                env=_environment(self._threads, self._preload),
                start_new_session=True,
            )
        try:
            started, _ = self._answer(_START_S)
        except (OSError, EOFError) as error:
            self._stop()
            raise InfraError(f"the sandbox zygote did not start ({error})", "Its own message is on stderr") from error
        assert isinstance(started, Started)
        return started.missing

    def _stop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _folders_of(modules: tuple[str, ...]) -> list[str]:
    """Where modules lie that a child would not find: a user's own file, what `pip install --target` or `--user` put."""
    folders, found_anyway = [], _own_folders()
    for name in dict.fromkeys(module.partition(".")[0] for module in modules):
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.origin:
            continue
        folder = Path(spec.origin).parent.parent if spec.submodule_search_locations else Path(spec.origin).parent
        if folder.resolve() not in found_anyway:
            folders.append(str(folder))
    return folders


def _own_folders() -> set[Path]:
    """On the path of every process of this interpreter: its site-packages, and behind them what their `.pth` files add.

    Not a user's: a child has another home. Named once more, what stands behind would come before site-packages.
    """
    sites = _resolved(*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    path = [Path(entry).resolve() for entry in sys.path]
    first = next((at for at, folder in enumerate(path) if folder in sites), len(path))
    named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return sites | ({*path[first:]} - _resolved(*named, site.getusersitepackages()))


def _resolved(*paths: str) -> set[Path]:
    return {Path(path).resolve() for path in paths}


def _environment(threads: int, modules: tuple[str, ...] = ()) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    count = str(threads)
    pools = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OMP_THREAD_LIMIT"), count)
    root = str(Path(kbrl_async.__file__).parent.parent)
    return (
        kept
        | pools
        | {
            "PYTHONPATH": os.pathsep.join(dict.fromkeys([root, *_folders_of((*modules, *LIBRARIES))])),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_WAIT_POLICY": "passive",
            "HOME": "/",
            "HF_HUB_OFFLINE": "1",
            "HF_DEACTIVATE_ASYNC_LOAD": "1",  # a child may have no threads
            "USER": "kbrl",
            "TORCHINDUCTOR_CACHE_DIR": "/",  # importing torch's compiler makes this folder, and nothing can be made
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # it would start processes, which a child may not
        }
    )


class Child:
    """A running child: its socket, and its process as a pidfd, which can't be confused with a later process."""

    def __init__(self, zygote: Zygote, pid: int, pidfd: int, channel: socket.socket) -> None:
        self._zygote, self._pid, self._pidfd = zygote, pid, pidfd
        self._generation = zygote.generation
        self._is_open = True
        self.channel = channel
        self.host_pid = _host_pid(pidfd)
        self._status: int | None = None

    def signal(self, number: int) -> None:
        if not self._is_open:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def has_ended(self, within_s: float = 0.0) -> bool:
        return not self._is_open or bool(select.select([self._pidfd], [], [], within_s)[0])

    def ends(self, within_s: float = 0.0) -> bool:
        """The same, and once it can do nothing but end that is waited for: a loaded host takes its time."""
        return self.has_ended(within_s) or (self.is_dying and self.has_ended(DEATH_S))

    @property
    def is_dying(self) -> bool:
        """Whether it is on its way out: none of its code runs any more, and what is left is the kernel's work."""
        return not self._is_open or _is_exiting(self.host_pid)

    def freeze(self, deadline_s: float = 10.0) -> bool:
        """Stop every thread and wait until they have stopped; False where the child has died instead."""
        self.signal(signal.SIGSTOP)
        end = time.monotonic() + deadline_s
        tries = 0
        while not _all_stopped(self.host_pid):
            if self.has_ended():
                return False
            if time.monotonic() > end:
                raise InfraError("a sandboxed process can't be stopped", "The host may be overloaded")
            tries += 1
            # On a shared core the child needs it once more to stop: yield first, then really sleep.
            os.sched_yield() if tries <= _STOP_YIELDS else time.sleep(_STOP_PAUSE_S)
        return True

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it with all its descendants, and reap it. May be called again."""
        if not self._is_open:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.host_pid, signal.SIGKILL)  # a tool's children too; the unreaped pid can't be another's
        self.signal(signal.SIGKILL)  # one that has just been forked has no group of its own yet
        self._is_open = False
        self.channel.close()
        # Not the zygote: if it waited here for longer than it may, it would be given up, and all its children with it.
        has_ended = bool(select.select([self._pidfd], [], [], DEATH_S)[0])
        os.close(self._pidfd)
        if has_ended:
            self._status = self._zygote.wait(self._pid, self._generation)

    def ending(self, within_s: float) -> str:
        """In words how it has ended, once its socket is shut; where it lives on after `within_s`, it is killed."""
        has_ended = self.has_ended(within_s)
        self.close()
        if not has_ended:
            return f"it shut its socket and lived on for {within_s:g} s"
        if self._status is None:
            return "its zygote died, or it can't be killed"
        if self._status >= 0:
            return f"it ended with exit code {self._status}"
        return f"it was ended by signal {-self._status} ({signal.Signals(-self._status).name})"

    def receive(self, max_bytes: int, within_s: float, is_over: Callable[[], bool] = lambda: False) -> bytes | None:
        """Its next message, empty where it has closed its end; None where none came before its time had ended."""
        end = time.monotonic() + within_s
        while (left_s := end - time.monotonic()) > 0 and not is_over():
            if select.select([self.channel], [], [], min(left_s, _WATCH_S))[0]:
                try:
                    return self.channel.recv(max_bytes)
                except ConnectionError:
                    return b""
        return None

    def result(self, within_s: float, is_over: Callable[[], bool] = lambda: False) -> int | None:
        """Its exit code (or minus its signal) if it ends in time; else None, and it is killed.

        `is_over` is asked now and then; once it is true the child's time has ended.
        """
        end = time.monotonic() + within_s
        ended = False
        while not ended and (left_s := end - time.monotonic()) > 0 and not is_over():
            ended = self.has_ended(min(left_s, _WATCH_S))
        ended = ended or self.has_ended()
        self.close()
        if self._status is None:
            cause = "the sandbox zygote died under its child, or that can't be killed"
            raise InfraError(cause, "The zygote is restarted at the next call; look for processes in state D")
        return self._status if ended else None


def _host_pid(pidfd: int) -> int:
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        for line in file:
            if line.startswith("Pid:"):
                return int(line.split()[1])
    raise InfraError("the kernel does not tell a pidfd's pid", "Linux 5.3 or newer is needed")


def _all_stopped(pid: int) -> bool:
    try:
        return all(_state(pid, thread) in (b"T", b"t") for thread in os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return False


def _is_exiting(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return bool(int(file.read().rpartition(b")")[2].split()[_FLAGS]) & _PF_EXITING)
    except (FileNotFoundError, ProcessLookupError):
        return True


def _state(pid: int, thread: str) -> bytes:
    with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0]
