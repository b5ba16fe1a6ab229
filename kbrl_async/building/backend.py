"""What a backend is: how its candidates are checked, split into units, and compiled."""

from __future__ import annotations

from typing import Protocol

import msgspec

from protocols.records import BuildReport, Candidate


class Unit(msgspec.Struct, frozen=True):
    """One translation unit of a candidate."""

    key: str
    """Name in `BuildReport.artifacts`: sha256 of the source."""
    source: str


class Diagnosis(msgspec.Struct, frozen=True):
    """Compiler output, cleaned for the model."""

    message: str
    hint: str = ""


class Backend(Protocol):
    name: str

    def check(self, candidate: Candidate) -> BuildReport | None:
        """The tripwires: a report where the candidate must not be built, else None. Executes nothing."""

    def units(self, candidate: Candidate) -> list[Unit]:
        """What has to be compiled. Only called after `check` gave None."""

    def toolchain(self) -> str:
        """Compiler, version, flags and resolved architecture: part of the cache key. `MissingTool` where it
        is absent.
        """

    def command(self, source: str, target: str) -> list[str]:
        """The compiler's arguments, relative to a folder that holds `source`."""

    @property
    def suffix(self) -> str:
        """Of a source file."""

    def diagnose(self, output: str) -> Diagnosis:
        """From what the compiler said."""
