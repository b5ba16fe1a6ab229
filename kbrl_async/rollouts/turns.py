"""Refinement turns (Kevin, Baronio et al. 2025): when a rollout goes on, and what each of its turns is worth. Pure.

::

    turn 0 ─ verdict ─▶ goes_on? ─ yes ─▶ turn 1 ─ verdict ─▶ … ─ no ─▶ returns of all turns ─▶ one sample a turn
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kbrl_async.errors import ConfigError
from kbrl_async.rollouts.rewards.advantages import turn_returns
from protocols.records import TrainSample

STOP_RULES = ("never", "correct", "speedup", "plateau")


class TurnOptions(msgspec.Struct, frozen=True):
    """The defaults are one turn: a rollout without refinement."""

    max_turns: int = 1
    gamma: float = 0.4
    """Discount of a later turn's score in an earlier turn's return."""
    returns: str = "sum"
    """`"sum"` or `"max"` of the discounted scores."""
    stop: str = "never"
    """`never`: all turns are taken. `correct`: stops learning of speed. `speedup`: at `stop_speedup`. `plateau`: when
    the last `patience` turns scored no better than the best before them."""
    stop_speedup: float = 1.0
    patience: int = 2

    def __post_init__(self) -> None:
        if self.stop not in STOP_RULES:
            raise ConfigError(f"unknown stop rule {self.stop!r}", f"Known ones: {', '.join(STOP_RULES)}")


class TurnScore(msgspec.Struct, frozen=True):
    """What the rules look at."""

    reward: float
    correct: bool = False
    speedup_lo: float | None = None


def goes_on(scores: Sequence[TurnScore], options: TurnOptions) -> bool:
    """Whether a rollout with these scored turns takes another one."""
    if not scores or len(scores) >= options.max_turns:
        return False
    last = scores[-1]
    if options.stop == "correct":
        return not last.correct
    if options.stop == "speedup":
        return not (last.correct and (last.speedup_lo or 0.0) >= options.stop_speedup)
    if options.stop == "plateau" and len(scores) > options.patience:
        before, after = scores[: -options.patience], scores[-options.patience :]
        return max(s.reward for s in after) > max(s.reward for s in before)
    return True


def with_returns(turns: Sequence[TrainSample], options: TurnOptions) -> list[TrainSample]:
    """The turns of one rollout, each with its return R_t = Σ_k≥t γ^(k−t)·s_k (or the max) in place of its score."""
    returns = turn_returns([sample.reward for sample in turns], options.gamma, options.returns)
    plans = turn_returns([sample.plan_reward for sample in turns], options.gamma, options.returns)
    return [msgspec.structs.replace(s, reward=r, plan_reward=p) for s, r, p in zip(turns, returns, plans, strict=True)]


def turn_id(rollout_id: str, turn: int) -> str:
    """The task of a turn: `g000012.r0` for the first one, then `g000012.r0.t1` …"""
    return rollout_id if turn == 0 else f"{rollout_id}.t{turn}"


def split_turn_id(task_id: str) -> tuple[str, int]:
    """The rollout and the turn of a task; the inverse of `turn_id`."""
    rollout_id, _, turn = task_id.rpartition(".t")
    return (rollout_id, int(turn)) if rollout_id and turn.isdigit() else (task_id, 0)
