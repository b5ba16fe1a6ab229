"""The build half: a candidate through its backend's static checks and compiler to a report."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import msgspec

from kbrl_async.errors import InfraError
from kbrl_async.kernels.backends import backend
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.building.context import BuildContext
from kbrl_async.kernels.backends.launch.plan import is_plan
from kbrl_async.kernels.backends.open import build as opened
from kbrl_async.kernels.sandbox import Isolation
from kbrl_async.kernels.settings import BACKENDS, CompileFarm
from kbrl_async.kernels.stages import StageClock
from kbrl_async.kernels.syntax.where import located
from protocols.records import BuildReport, Candidate, Fault, Problem

_MAX_TEXT = 800


class Builder:
    """Compiles candidates, one at a time for each calling thread::

        with Builder(ArtifactStore(root)) as builder:
            report = builder.build(candidate)

    :raises MissingTool: and `DiskFull`, `InfraError`: what is the host's fault; those are never cached.
    """

    def __init__(self, store: ArtifactStore, farm: CompileFarm | None = None, cores: tuple[int, ...] = ()) -> None:
        self.store = store
        self.context = BuildContext(store, farm or CompileFarm(), cores)

    def __enter__(self) -> Builder:
        self.context.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def isolation(self) -> Isolation:
        """What confines compilers on this host; known once entered."""
        return self.context.isolation

    def close(self) -> None:
        self.context.close()

    def build(self, candidate: Candidate, problem: Problem | None = None) -> BuildReport:
        """`problem` is needed by backends that compile for real launch arguments."""
        started = time.time()
        chosen, rules = backend(candidate.backend), self.context.farm.rules
        clock = StageClock()
        report = chosen.check(candidate)
        is_free = report is not None and rules == "open" and candidate.backend in BACKENDS.ours
        if is_free and not is_plan(candidate.source):
            report = opened.check(candidate)
        clock.ends("static", Fault.OK if report is None else report.fault)
        if report is None:
            build = functools.partial(opened.build, chosen) if is_free else chosen.build
            report = build(candidate, problem, self.context)
            clock.ends("compile", report.fault, "from the cache" if report.cached else "")
        if report.fault is not Fault.OK and report.rule:
            message = located(report.message, candidate.source, report.rule, _MAX_TEXT)
            report = msgspec.structs.replace(report, message=message)
        ended = {"started_at": started, "finished_at": time.time(), "stages": clock.reports}
        return msgspec.structs.replace(report, rules=rules, **ended)

    def remarks(self, candidate: Candidate) -> tuple[str, ...]:
        """What the compiler says of the loops of a candidate that was built."""
        return backend(candidate.backend).remarks(candidate, self.context)


def artifact_paths(store: ArtifactStore, build: BuildReport) -> dict[str, Path]:
    """Where what was built lies, by the report's keys.

    :raises InfraError: not all of it is in the store any more.
    """
    paths = {key: store.path(address) for key, address in build.artifacts.items()}
    found = {key: path for key, path in paths.items() if path is not None}
    if len(found) < len(paths):
        raise InfraError("an artifact is no longer in the store", "Raise compile_farm.store_max_bytes")
    return found
