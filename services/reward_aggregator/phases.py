"""Which phase a training run is in, how much of it is done, and when time ends it. Pure."""

from __future__ import annotations

from typing import NamedTuple

from kbrl_async.evaluation.heldout import AFTER, BEFORE
from kbrl_async.runs.run_state import RunState
from kbrl_async.runs.telemetry import progress


class Phase(NamedTuple):
    """The arguments of `progress.Reporter.tell`."""

    phase: str
    note: str
    share: float
    limit_s: float | None = None


def phase_of(state: RunState, now: float) -> Phase:
    """At `now` of the run's own clock."""
    if state.has_trained:
        return _evaluation(state, AFTER, progress.AFTER)
    if not state.may_train:
        return _evaluation(state, BEFORE, progress.BEFORE)
    updates, wanted = state.updates, state.plan.buffer.max_steps
    limit, begun = state.plan.max_minutes, state.first_result
    left = None if limit is None or begun is None else 60 * limit - (now - begun)
    return Phase(progress.TRAINING, f"update {updates} of {wanted}", updates / wanted, left)


def _evaluation(state: RunState, phase: str, shown: str) -> Phase:
    ended, total = state.evaluated(phase)
    return Phase(shown, f"{ended} of {total} answers", ended / total if total else 1.0)
