"""What backends build with: the store, folders, confined tools and confined Python.

::

    cached(key, make) ─ hit ─▶ BuildReport
          └─ miss ─▶ make(): folder ─▶ run(compiler) ─▶ put(file) ─▶ BuildReport
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from kbrl_async.errors import DiskFull, InfraError
from kbrl_async.kernels.backends.building.store import ArtifactStore
from kbrl_async.kernels.sandbox import (
    START_S,
    Access,
    BadOutput,
    Child,
    Isolation,
    Limits,
    Zygote,
    is_over,
    read_output,
)
from kbrl_async.kernels.sandbox.tool import ToolCommand
from kbrl_async.kernels.settings import CompileFarm
from protocols.records import BuildReport, Fault

_ENVIRONMENT = {"PATH": "/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}
_MAX_OUTPUT = 1 << 16
MAX_WORDS = 256 << 20
"""A tool that says more than this is not listened to; what is kept of less is far shorter."""
_MORE_CPU_S = 60
"""A tool is ended at its deadline, and has used up its processor time only if nobody is there to do that: sooner, and
whoever is late by a second would take a bomb for a fault of the host."""
_TOOLS_A_CORE = 3
"""At work at most: one extension has two compilers, and each has a deadline by the clock."""
MAX_ENTRIES = 4096
"""Files and folders that a tool may leave in its folder."""


class Diagnosis(msgspec.Struct, frozen=True):
    """Compiler output, cleaned for the model."""

    message: str
    hint: str = ""


class ToolRun(msgspec.Struct, frozen=True):
    """How a confined tool ended. `status` None: it was killed at its deadline."""

    status: int | None
    output: str
    isolation: str
    deadline_s: float

    @property
    def is_deterministic(self) -> bool:
        return self.status is not None


class BuildContext:
    """Safe for many threads. Everything a candidate causes to run, runs in a child of one of its zygotes."""

    def __init__(
        self,
        store: ArtifactStore,
        farm: CompileFarm,
        cores: tuple[int, ...] = (),
        *,
        memory_bytes: int = 2 << 30,
        file_bytes: int = 256 << 20,
    ) -> None:
        """`memory_bytes`: address space of one compiler process; CUDA's compilers get four times as much."""
        self.store, self.farm, self._cores = store, farm, cores
        self.memory_bytes, self.file_bytes = memory_bytes, file_bytes
        self._tools = Zygote(("kbrl_async.kernels.sandbox.tool",), profile="tool")
        self._python: dict[str, Zygote] = {}
        self._gpu_tools: Zygote | None = None
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(_TOOLS_A_CORE * (len(cores) or os.cpu_count() or 1))

    def start(self) -> None:
        self._tools.start()

    def close(self) -> None:
        self._tools.close()
        for zygote in (*self._python.values(), *((self._gpu_tools,) if self._gpu_tools else ())):
            zygote.close()

    @property
    def isolation(self) -> Isolation:
        return self._tools.isolation

    def folder(self) -> contextlib.AbstractContextManager[Path]:
        """A new folder for one build, gone afterwards."""
        return self.store.workspace()

    def cached(self, *parts: str, make: Callable[[], tuple[BuildReport, bool]]) -> BuildReport:
        """The result kept under `parts` (source, flags, architecture, toolchain), or that of `make`.

        `make` gives the report and whether it is deterministic: only then it is kept.
        """
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        known = self.store.recall(key)
        if known is not None:
            return msgspec.structs.replace(known, cached=True)
        report, is_deterministic = make()
        if is_deterministic:
            self.store.remember(key, report)
        return report

    def run(
        self,
        command: list[str],
        folder: Path,
        *,
        deadline_s: float | None = None,
        memory_bytes: int | None = None,
        threads: int = 2,
        read: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        on_gpu: bool = False,
    ) -> ToolRun:
        """Run a compiler confined: it reads the system and `read`, and writes into `folder` only. `on_gpu`: a tool that
        watches a program on the GPU, see the sandbox's profile `gpu-tool`.
        """
        deadline = deadline_s or self.farm.deadline_s
        limits = self._limits(deadline, memory_bytes or self.memory_bytes, threads)
        variables = {**_ENVIRONMENT, "TMPDIR": str(folder), **(environment or {})}
        output = "output.txt"
        payload = msgspec.msgpack.encode(ToolCommand(command, str(folder), variables, output))
        access = Access(read=read, write=(str(folder),))
        zygote = self._gpu_zygote() if on_gpu else self._tools
        with (
            self._places,
            contextlib.closing(
                zygote.spawn("kbrl_async.kernels.sandbox.tool:run", payload, (), limits, access)
            ) as child,
        ):
            isolation = isolation_of(child)
            status = child.result(deadline, lambda: is_over(folder, 2 * self.file_bytes, MAX_ENTRIES))
        words = _words(folder, output)
        return ToolRun(status, words, isolation.level, deadline)

    def _gpu_zygote(self) -> Zygote:
        with self._lock:
            if self._gpu_tools is None:
                self._gpu_tools = Zygote(("kbrl_async.kernels.sandbox.tool",), profile="gpu-tool")
            return self._gpu_tools

    def collect(self, folder: Path, name: str) -> bytes:
        """What a tool was to leave in its folder; `InfraError` where it is no ordinary file of acceptable size."""
        try:
            return read_output(folder, name, self.file_bytes)
        except BadOutput as error:
            raise InfraError(f"a tool left no usable output: {error}", "It is tried again elsewhere") from error

    def python(self, entry: str, payload: bytes, folder: Path, *, deadline_s: float, threads: int = 1) -> Child:
        """Start `entry`, a `package.module:function`, in a confined Python that has torch; the caller closes it.

        Its first message is its `Isolation`; see `isolation_of`.
        """
        with self._lock:
            module = entry.partition(":")[0]
            zygote = self._python.get(module)
            if zygote is None:
                zygote = self._python[module] = Zygote(("torch", module), profile="tool")
        limits = self._limits(deadline_s, 4 * self.memory_bytes, threads)
        access = Access(write=(str(folder),))
        return zygote.spawn(entry, payload, (), limits, access)

    def failure(self, run: ToolRun, diagnose: Callable[[str], Diagnosis]) -> BuildReport:
        """The report of a tool that did not succeed. Raises where the host is to blame."""
        if run.status is None:
            text = f"compiling took longer than {run.deadline_s:g} s, or wrote far too much"
            return BuildReport(Fault.COMPILE_ERROR, message=text, hint="Simplify the kernel; avoid huge unrolled code.")
        if "No space left on device" in run.output:
            raise DiskFull("no space is left where the compiler works", "Free some space under the artifact store")
        if run.status < 0 or "fatal error: Killed" in run.output or not run.output.strip():
            raise InfraError(f"the compiler ended with status {run.status}", "It is tried again elsewhere")
        diagnosis = diagnose(run.output)
        return BuildReport(Fault.COMPILE_ERROR, message=diagnosis.message, hint=diagnosis.hint)

    def _limits(self, deadline_s: float, memory_bytes: int, threads: int) -> Limits:
        return Limits(
            cpu_s=2 * int(deadline_s) + _MORE_CPU_S,
            memory_bytes=memory_bytes,
            file_bytes=self.file_bytes,
            threads=threads,
            nice=self.farm.nice,
            cores=self._cores,
        )


def _words(folder: Path, name: str) -> str:
    try:
        return read_output(folder, name, MAX_WORDS)[:_MAX_OUTPUT].decode(errors="replace")
    except BadOutput:
        return ""


def isolation_of(child: Child) -> Isolation:
    """The first word of a confined tool."""
    child.channel.settimeout(START_S)
    try:
        return msgspec.msgpack.decode(child.channel.recv(1 << 16), type=Isolation)
    except (OSError, msgspec.MsgspecError) as error:
        raise InfraError("a sandbox child did not confine itself", "See the zygote's message on stderr") from error
