"""Rules and plans of runs for tests, which say only what they are about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kbrl_async.rollouts.buffer.rules import BufferRules
from kbrl_async.rollouts.settings import Alarms, BestOfN, Curriculum, Turns
from kbrl_async.rollouts.turns import TurnRules
from kbrl_async.runs.run_memory import RunPlan
from protocols.records import Problem

QUIET = {"ess_below": 0.0, "kl_above": 0.0, "entropy_below": 0.0}


def buffer_rules(**changes: Any) -> BufferRules:
    given = {"batch_size": 2, "max_steps": 4, "max_staleness": 1, "advantage": "leave_one_out", "hold_s": 20.0}
    batching = {"scale_advantages": True, "truncated": "negative", "best_of_n": BestOfN()}
    return BufferRules(**{**given, **batching, **changes})


def turn_rules(max_turns: int = 1, gamma: float = 0.4, **turns: Any) -> TurnRules:
    return TurnRules(max_turns, gamma, Turns(**turns))


def alarms(**changes: Any) -> Alarms:
    """None but those that are asked for, and that on a loss which is not finite."""
    return Alarms(**{**QUIET, **changes})


def run_plan(training: Sequence[Problem], heldout: Sequence[Problem] = (), **changes: Any) -> RunPlan:
    given = {
        "group_size": 2,
        "seed": 0,
        "max_minutes": None,
        "eval_samples": 2,
        "eval_every": 0,
        "eval_credit": 4,
        "buffer": buffer_rules(),
        "turns": turn_rules(),
        "curriculum": Curriculum(),
        "alarms": alarms(),
    }
    return RunPlan(list(training), list(heldout), **{**given, **changes})
