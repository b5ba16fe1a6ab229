"""The project's own suite, read once a process: many modules ask for it as they are imported."""

from __future__ import annotations

import functools

from kbrl_async.kernels.problems import load_suite
from protocols.records import Problem


@functools.cache
def suite(*levels: int, shapes: str = "cpu") -> tuple[Problem, ...]:
    """Of these levels, or of all."""
    return tuple(load_suite(levels=levels, shapes=shapes))
