"""Refinement turns (Kevin, Baronio et al. 2025): when a rollout goes on, and what each of its turns is worth. Pure.

::

    turn 0 ─ verdict ─▶ goes_on? ─ yes ─▶ turn 1 ─ verdict ─▶ … ─ no ─▶ returns of all turns ─▶ one sample a turn
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from kbrl_async.rollouts.rewards.advantages import turn_returns
from kbrl_async.rollouts.settings import Turns
from protocols.records import TrainSample


class TurnRules(msgspec.Struct, frozen=True):
    """How many turns a rollout takes, and what they are worth; `runs.planning` makes it of a run's settings."""

    max_turns: int
    gamma: float
    """Discount of a later turn's score in an earlier turn's return."""
    turns: Turns


class TurnScore(msgspec.Struct, frozen=True):
    """What the rules look at."""

    reward: float
    correct: bool = False
    speedup_lo: float | None = None


def goes_on(scores: Sequence[TurnScore], rules: TurnRules) -> bool:
    """Whether a rollout with these scored turns takes another one."""
    if not scores or len(scores) >= rules.max_turns:
        return False
    last, turns = scores[-1], rules.turns
    if turns.stop == "correct":
        return not last.correct
    if turns.stop == "speedup":
        return not (last.correct and (last.speedup_lo or 0.0) >= turns.stop_speedup)
    if turns.stop == "plateau" and len(scores) > turns.patience:
        before, after = scores[: -turns.patience], scores[-turns.patience :]
        return max(s.reward for s in after) > max(s.reward for s in before)
    return True


def is_single(group_id: str, rules: TurnRules) -> bool:
    """Whether a training group's rollouts end after their first turn: by its id, so after a restart as before."""
    return zlib.crc32(group_id.encode()) < rules.turns.single_share * (1 << 32)


def with_returns(samples: Sequence[TrainSample], rules: TurnRules) -> list[TrainSample]:
    """The turns of one rollout, each with its return R_t = Σ_k≥t γ^(k−t)·s_k (or the max) in place of its score."""
    gamma, how = rules.gamma, rules.turns.returns
    returns = turn_returns([sample.reward for sample in samples], gamma, how)
    plans = turn_returns([sample.plan_reward for sample in samples], gamma, how)
    best = turn_returns([sample.reward + sample.reward_spread for sample in samples], gamma, how)
    best_plans = turn_returns([sample.plan_reward + sample.plan_spread for sample in samples], gamma, how)
    return [
        msgspec.structs.replace(s, reward=r, plan_reward=p, reward_spread=b - r, plan_spread=q - p)
        for s, r, p, b, q in zip(samples, returns, plans, best, best_plans, strict=True)
    ]


def turn_id(rollout_id: str, turn: int) -> str:
    """The task of a turn: `g000012.r0` for the first one, then `g000012.r0.t1` …"""
    return rollout_id if turn == 0 else f"{rollout_id}.t{turn}"


def split_turn_id(task_id: str) -> tuple[str, int]:
    """The rollout and the turn of a task; the inverse of `turn_id`."""
    rollout_id, _, turn = task_id.rpartition(".t")
    return (rollout_id, int(turn)) if rollout_id and turn.isdigit() else (task_id, 0)
