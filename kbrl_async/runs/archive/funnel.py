"""How many candidates came to each step of the funnel, how many passed it, and what it cost. Pure.

::

    format ─▶ static ─▶ compile ─▶ small_inputs ─▶ full_inputs ─▶ timing          each step's failures end there

Invariants
* As many enter a step as passed the one before, and who fails leaves: a candidate fails at most one step. A run that
  times nothing has no step `timing`.
* The failures of all steps are the answers that are not correct.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from kbrl_async.rollouts.stats import RolloutStats, StepOutcome
from kbrl_async.runs.telemetry.training_metrics import kernels
from protocols.records import Fault
from protocols.rollout import STEPS

_FAILS_AT = {"format_error": "format", "static_violation": "static", "compile_error": "compile"}
"""Where no stage reported the failure."""
_VERIFIED = STEPS.index("full_inputs")


def funnel(answers: Iterable[RolloutStats]) -> dict[str, dict[str, float]]:
    """By step: `entered`, `passed`, `seconds` in all and `median_s`, of answers that wrote a kernel; steps that nobody
    came to are left out."""
    taken = [step for stats in kernels(answers) for step in way(stats.funnel, stats.fault)]
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


def way(reported: Sequence[StepOutcome], fault: str) -> tuple[StepOutcome, ...]:
    """The steps of one candidate, in order: all passed but the last, unless its fault is `ok`.

    A bench looks on after a failure, for a share of the credit, and finds faults between two steps and after the last
    one. What it looks at after a failure costs the failed step. A fault that no step reports is that of the last one it
    came to, or of the next where it has not passed all inputs yet.
    """
    last = _last(reported, fault)
    seconds = dict.fromkeys(STEPS[: last + 1], 0.0)
    for step in reported:
        name = step.name if step.name in seconds else STEPS[last]
        seconds[name] += step.seconds
    passes = fault == Fault.OK
    return tuple(StepOutcome(name, passes or name != STEPS[last], spent) for name, spent in seconds.items())


def _last(reported: Sequence[StepOutcome], fault: str) -> int:
    """The place of the step at which a candidate left."""
    failed = [STEPS.index(step.name) for step in reported if not step.passed]
    came_to = max((STEPS.index(step.name) for step in reported), default=-1)
    if fault == Fault.OK:
        return max(came_to, _VERIFIED)
    if failed:
        return min(failed)
    if fault in _FAILS_AT:
        return max(came_to, STEPS.index(_FAILS_AT[fault]))
    return came_to if came_to >= _VERIFIED else came_to + 1
