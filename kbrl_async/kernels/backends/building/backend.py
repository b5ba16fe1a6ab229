"""What a backend is: how its candidates are checked without running anything, and how they are built."""

from __future__ import annotations

from typing import Protocol

from kbrl_async.kernels.backends.building.context import BuildContext
from protocols.records import BuildReport, Candidate, Problem


class Backend(Protocol):
    name: str

    def missing(self) -> str:
        """Why this host can't build for it, with the cure; empty where it can. Quick: asked at every start."""

    def check(self, candidate: Candidate) -> BuildReport | None:
        """The tripwires: a report where the candidate must not be built, else None. Executes nothing."""

    def build(self, candidate: Candidate, problem: Problem | None, workshop: BuildContext) -> BuildReport:
        """Only called after `check` gave None. Whatever of the candidate has to run for it, runs confined.

        `problem` gives constructor arguments and input shapes to backends that need them; a report says so where
        it is None and was needed. Raises `MissingTool`, `DiskFull` or `InfraError` for what is the host's fault.
        """
