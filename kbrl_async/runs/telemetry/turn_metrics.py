"""Numbers of whole rollouts that take several turns (Kevin mode). Pure arithmetic over their turns."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Protocol

from protocols.records import VERIFIER


class Turn(Protocol):
    """What is asked of a turn's statistics: see `training_metrics.RolloutStats`."""

    @property
    def rollout_id(self) -> str: ...
    @property
    def turn(self) -> int: ...
    @property
    def compiled(self) -> bool: ...
    @property
    def correct(self) -> bool: ...
    @property
    def reward(self) -> float: ...
    @property
    def fault(self) -> str: ...
    @property
    def role(self) -> str: ...


def trajectories(turns: Iterable[Turn]) -> list[list[Turn]]:
    """Turns that wrote a kernel, by rollout, each in order; rollouts in the order of their first scored turn."""
    found: dict[str, list[Turn]] = {}
    for turn in (turn for turn in turns if turn.role != VERIFIER):
        found.setdefault(turn.rollout_id, []).append(turn)
    return [sorted(group, key=lambda t: t.turn) for group in found.values()]


def scalars(turns: Sequence[Turn]) -> dict[str, float]:
    """`trajectory/*`: success_rate (a turn is correct), avg_turns, max_correct_per_trajectory (correct turns of the
    best rollout), best_reward, and how many compile errors the next turn repaired."""
    rollouts = trajectories(turns)
    if not rollouts:
        return {}
    values = {
        "trajectory/success_rate": statistics.fmean(any(t.correct for t in rollout) for rollout in rollouts),
        "trajectory/avg_turns": statistics.fmean(len(rollout) for rollout in rollouts),
        "trajectory/max_correct_per_trajectory": float(max(sum(t.correct for t in rollout) for rollout in rollouts)),
        "trajectory/best_reward": statistics.fmean(max(t.reward for t in rollout) for rollout in rollouts),
    }
    fixed = compile_fix_rate(turns)
    return values if fixed is None else {**values, "trajectory/compile_fix_rate": fixed}


def compile_fix_rate(turns: Sequence[Turn], turn: int = 0) -> float | None:
    """Of the rollouts whose turn `turn` was a compile error: how many compiled in the next turn."""
    pairs = [
        (first, second)
        for rollout in trajectories(turns)
        for first, second in itertools.pairwise(rollout)
        if first.turn == turn and first.fault == "compile_error"
    ]
    return statistics.fmean(second.compiled for _, second in pairs) if pairs else None


def summary(first: Sequence[Turn], last: Sequence[Turn], every: Sequence[Turn]) -> dict[str, float | None]:
    """For `summary.json`: success within rollouts of the first and the last versions, and repairs in the second turn.

    Empty for a run of single turns.
    """
    if not any(turn.turn for turn in every):
        return {}
    return {
        "success_rate_first": scalars(first).get("trajectory/success_rate"),
        "success_rate_last": scalars(last).get("trajectory/success_rate"),
        "avg_turns": scalars(every).get("trajectory/avg_turns"),
        "compile_fix_rate_first": compile_fix_rate(first),
        "compile_fix_rate_last": compile_fix_rate(last),
    }
