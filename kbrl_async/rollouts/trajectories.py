"""Rollouts between two turns: what their turns brought so far. Pure; a part of the run's state."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.rollouts.turns import TurnScore
from protocols.records import VERIFIER, TrainSample


class TurnTaken(msgspec.Struct, frozen=True, tag="turn_taken"):
    """A turn was scored and another one follows; written before that one is asked for."""

    rollout_id: str
    group_id: str
    sample: TrainSample
    """With the turn's own score as its reward; returns need the later turns."""
    stats: RolloutStats
    score: TurnScore
    prompt: str
    """Of the next turn, so that a restart asks for the very same one."""
    at: float = 0.0
    category: str = ""
    """What really became of the turn's kernel; see `prompts.feedback`."""
    repair: str = ""
    """A prompt that asks for a repair of the turn's kernel, where it failed (mode=agents)."""


KEPT_FAILURES = 8
"""Failed kernels per problem that a corrector may be given."""


class TrajectoriesState(msgspec.Struct, frozen=True):
    """All that trajectories remember."""

    turns: dict[str, list[TurnTaken]]
    failures: dict[str, list[tuple[str, str]]]


class Trajectories:
    """Turns of unfinished rollouts, in order, and the last failures of each problem."""

    def __init__(self) -> None:
        self._turns: dict[str, list[TurnTaken]] = {}
        self._failures: dict[str, deque[tuple[str, str]]] = {}

    def state(self) -> TrajectoriesState:
        return TrajectoriesState(self._turns, {name: list(kept) for name, kept in self._failures.items()})

    def restore(self, state: TrajectoriesState) -> None:
        self._turns = state.turns
        self._failures = {name: deque(kept, maxlen=KEPT_FAILURES) for name, kept in state.failures.items()}

    def apply(self, entry: TurnTaken) -> None:
        self._turns.setdefault(entry.rollout_id, []).append(entry)
        if entry.repair:
            kept = self._failures.setdefault(entry.stats.problem_id, deque(maxlen=KEPT_FAILURES))
            kept.append((entry.rollout_id, entry.repair))

    def failure_of_another(self, rollout_id: str, problem_id: str) -> str:
        """The prompt to repair the newest failure of another rollout; empty where there is none."""
        failures = reversed(self._failures.get(problem_id, ()))
        return next((repair for owner, repair in failures if owner != rollout_id), "")

    def turns(self, rollout_id: str) -> Sequence[TurnTaken]:
        return self._turns.get(rollout_id, [])

    def forget(self, rollout_id: str) -> None:
        self._turns.pop(rollout_id, None)

    def forget_group(self, group_id: str) -> None:
        """Those of a group that ended without waiting for them."""
        for rollout_id in [key for key, turns in self._turns.items() if turns[0].group_id == group_id]:
            del self._turns[rollout_id]

    def __len__(self) -> int:
        return len(self._turns)


def without_tokens(entry: TurnTaken, *, keep_prompt: bool = False) -> TurnTaken:
    """What must stay of a turn once its group has ended; an evaluation never needs its tokens."""
    bare = msgspec.structs.replace(entry.sample, prompt_ids=[], token_ids=[], logprobs=[])
    return msgspec.structs.replace(entry, sample=bare, prompt=entry.prompt if keep_prompt else "", repair="")


def best_turn(turns: Sequence[RolloutStats]) -> RolloutStats:
    """Of a whole rollout at inference time: the fastest correct turn, else the one with the highest reward."""
    kernels = [turn for turn in turns if turn.role != VERIFIER]
    return max(kernels, key=lambda s: (s.correct, s.speedup_lo or 0.0, s.reward))
