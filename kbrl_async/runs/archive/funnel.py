"""How many candidates came to each step of the funnel, how many passed it, and what it cost. Pure.

::

    format ─▶ static ─▶ compile ─▶ small_inputs ─▶ full_inputs ─▶ timing          each step's failures end there
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from kbrl_async.rollouts.stats import Step
from protocols.rollout import STEPS


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
