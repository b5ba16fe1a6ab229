"""How many candidates came to each step of the funnel, how many passed it, and what it cost. Pure.

::

    format ─▶ static ─▶ compile ─▶ small_inputs ─▶ full_inputs ─▶ timing          each step's failures end there
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from protocols.records import Fault
from protocols.rollout import STEPS, Record


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One step that one candidate came to."""

    name: str
    passed: bool
    seconds: float = 0.0


def steps_of(record: Record) -> tuple[Step, ...]:
    """Those that the rollout's candidate came to, in order."""
    return tuple(Step(s.name, s.fault is Fault.OK, s.seconds) for s in record.stages if s.name in STEPS)


def funnel(candidates: Iterable[Sequence[Step]]) -> dict[str, dict[str, float]]:
    """By step: `entered`, `passed`, `seconds` in all and `median_s`; steps that nobody came to are left out."""
    taken = [step for steps in candidates for step in steps]
    out: dict[str, dict[str, float]] = {}
    for name in STEPS:
        mine = [step for step in taken if step.name == name]
        if mine:
            seconds = [step.seconds for step in mine]
            out[name] = {
                "entered": len(mine),
                "passed": sum(step.passed for step in mine),
                "seconds": round(sum(seconds), 3),
                "median_s": round(statistics.median(seconds), 5),
            }
    return out
