"""The front door: `Builder.build` takes a candidate through its backend's tripwires and compiler to a report."""

from __future__ import annotations

import time

import msgspec

from kbrl_async.kernels.backends.building.context import BuildContext, BuildOptions
from kbrl_async.kernels.backends.building.registry import backend
from kbrl_async.kernels.backends.building.store import ArtifactStore
from kbrl_async.kernels.sandbox import Isolation
from kbrl_async.kernels.stages import StageClock
from protocols.records import BuildReport, Candidate, Fault, Problem


class Builder:
    """Compiles candidates, one at a time for each calling thread::

        with Builder(ArtifactStore(root)) as builder:
            report = builder.build(candidate)

    Raises `MissingTool`, `DiskFull` or `InfraError` for what is the host's fault; those are never cached.
    """

    def __init__(self, store: ArtifactStore, options: BuildOptions | None = None) -> None:
        self.store = store
        self._workshop = BuildContext(store, options or BuildOptions())

    def __enter__(self) -> Builder:
        self._workshop.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def isolation(self) -> Isolation:
        """What confines compilers on this host; known once entered."""
        return self._workshop.isolation

    def close(self) -> None:
        self._workshop.close()

    def build(self, candidate: Candidate, problem: Problem | None = None) -> BuildReport:
        """`problem` is needed by backends that compile for real launch arguments."""
        started = time.time()
        chosen = backend(candidate.backend)
        clock = StageClock()
        report = chosen.check(candidate)
        clock.ends("static", Fault.OK if report is None else report.fault)
        if report is None:
            report = chosen.build(candidate, problem, self._workshop)
            clock.ends("compile", report.fault, "from the cache" if report.cached else "")
        return msgspec.structs.replace(report, started_at=started, finished_at=time.time(), stages=clock.reports)
