"""Static tripwires by backend. They catch the careless and explain; what holds against the clever is the sandbox."""

from __future__ import annotations

from kbrl_async.kernels.backends.building.registry import backend
from protocols.records import BuildReport, Candidate


def static_check(candidate: Candidate) -> BuildReport | None:
    """A report where the candidate must not be built, else None. Never executes anything of it."""
    return backend(candidate.backend).check(candidate)
