"""The front door: `Builder.build` takes a candidate through check, cache and confined compiler to a report."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from types import TracebackType

import msgspec

from kbrl_async.building.backend import Backend, Unit
from kbrl_async.building.registry import backend
from kbrl_async.building.store import ArtifactStore
from kbrl_async.errors import DiskFull, InfraError
from kbrl_async.sandbox import Access, Child, Isolation, Limits, Zygote
from kbrl_async.sandbox.tool import Command
from protocols.records import BuildReport, Candidate, Fault

_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}
_MAX_OUTPUT = 1 << 16


class BuildOptions(msgspec.Struct, frozen=True):
    deadline_s: float = 10.0
    """Wall clock for one translation unit."""
    nice: int = 0
    cores: tuple[int, ...] = ()
    memory_bytes: int = 2 << 30
    file_bytes: int = 32 << 20


class Builder:
    """Compiles candidates, one at a time for each calling thread::

        with Builder(ArtifactStore(root)) as builder:
            report = builder.build(candidate)

    Raises `MissingTool`, `DiskFull` or `InfraError` for what is the host's fault; those are never cached.
    """

    def __init__(self, store: ArtifactStore, options: BuildOptions | None = None) -> None:
        self.store = store
        self._options = options or BuildOptions()
        self._zygote = Zygote(("kbrl_async.sandbox.tool",), profile="tool")

    def __enter__(self) -> Builder:
        self._zygote.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._zygote.close()

    def build(self, candidate: Candidate) -> BuildReport:
        """Static check, then every translation unit from the cache or the compiler."""
        started = time.time()
        chosen = backend(candidate.backend)
        report = chosen.check(candidate)
        if report is None:
            report = self._units(chosen, chosen.units(candidate))
        return msgspec.structs.replace(report, started_at=started, finished_at=time.time())

    def _units(self, chosen: Backend, units: list[Unit]) -> BuildReport:
        reports = []
        for unit in units:
            report = self._unit(chosen, unit)
            if report.fault is not Fault.OK:
                return report
            reports.append(report)
        artifacts = {key: address for report in reports for key, address in report.artifacts.items()}
        return msgspec.structs.replace(
            reports[-1], artifacts=artifacts, cached=all(report.cached for report in reports)
        )

    def _unit(self, chosen: Backend, unit: Unit) -> BuildReport:
        key = hashlib.sha256(f"{chosen.name}\0{chosen.toolchain()}\0{unit.key}".encode()).hexdigest()
        known = self.store.recall(key)
        if known is not None:
            return msgspec.structs.replace(known, cached=True)
        report, is_deterministic = self._compile(chosen, unit)
        if is_deterministic:
            self.store.remember(key, report)
        return report

    def _compile(self, chosen: Backend, unit: Unit) -> tuple[BuildReport, bool]:
        with self.store.workspace() as folder:
            source = f"kernel{chosen.suffix}"
            (folder / source).write_text(unit.source)
            status, isolation = self._run(chosen.command(source, "kernel.so"), folder)
            if status == 0:
                address = self.store.put((folder / "kernel.so").read_bytes())
                report = BuildReport(Fault.OK, {unit.key: address})
            else:
                report = self._failure(chosen, status, folder)
            toolchain = chosen.toolchain()
            report = msgspec.structs.replace(report, toolchain=toolchain, isolation=isolation.level)
            return report, status is not None

    def _run(self, command: list[str], folder: Path) -> tuple[int | None, Isolation]:
        options = self._options
        limits = Limits(
            cpu_s=int(options.deadline_s) + 1,
            memory_bytes=options.memory_bytes,
            file_bytes=options.file_bytes,
            threads=2,
            nice=options.nice,
            cores=options.cores,
        )
        environment = {**_ENVIRONMENT, "TMPDIR": str(folder)}
        payload = msgspec.msgpack.encode(Command(command, str(folder), environment))
        child = self._zygote.spawn("kbrl_async.sandbox.tool:run", payload, (), limits, Access(write=(str(folder),)))
        try:
            isolation = _isolation(child)
            return child.result(options.deadline_s), isolation
        finally:
            child.close()

    def _failure(self, chosen: Backend, status: int | None, folder: Path) -> BuildReport:
        if status is None:
            text = f"compiling took longer than {self._options.deadline_s:g} s"
            return BuildReport(Fault.COMPILE_ERROR, message=text, hint="Simplify the kernel; avoid huge unrolled code.")
        with (folder / "output.txt").open("rb") as file:
            output = file.read(_MAX_OUTPUT).decode(errors="replace")
        if "No space left on device" in output:
            raise DiskFull("no space is left where the compiler works", "Free some space under the artifact store")
        if status < 0 or "fatal error: Killed" in output or not output.strip():
            raise InfraError(f"the compiler ended with status {status}", "It is tried again elsewhere")
        diagnosis = chosen.diagnose(output)
        return BuildReport(Fault.COMPILE_ERROR, message=diagnosis.message, hint=diagnosis.hint)


def _isolation(child: Child) -> Isolation:
    child.channel.settimeout(10.0)
    try:
        return msgspec.msgpack.decode(child.channel.recv(1 << 16), type=Isolation)
    except (OSError, msgspec.MsgspecError) as error:
        raise InfraError("a sandbox child did not confine itself", "See the zygote's message on stderr") from error
