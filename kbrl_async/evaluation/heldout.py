"""The evaluations of a training run: before and after training, and in rounds beside it. Pure; a part of its state.

Each is an `EvaluationProgress` over the held-out problems; before and after ask all at once, rounds a few (`rounds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kbrl_async.evaluation.progress import EvaluationProgress
from kbrl_async.evaluation.rounds import Round, Rounds, RoundsState, group_of_round, is_round
from kbrl_async.rollouts.stats import RolloutStats
from protocols.records import Problem

BEFORE, AFTER = "eval-before", "eval-after"


def is_evaluation(group_id: str) -> bool:
    """Whether these rollouts are of an evaluation: counted by no group, in no batch."""
    return group_id in (BEFORE, AFTER) or is_round(group_id)


class OpenRollout(NamedTuple):
    """A rollout that is under way."""

    rollout_id: str
    group_id: str
    problem: Problem


class HeldoutEvaluations:
    """Parameters are the settings of these names."""

    def __init__(self, heldout: Sequence[Problem], eval_samples: int, eval_every: int, eval_credit: int) -> None:
        self._whole: dict[str, EvaluationProgress[RolloutStats | None]] = {
            phase: EvaluationProgress(phase, heldout, eval_samples) for phase in (BEFORE, AFTER)
        }
        self._whole[BEFORE].begin()
        self.rounds = Rounds(heldout, eval_samples, eval_every, eval_credit)

    def ended(self) -> dict[str, dict[str, RolloutStats | None]]:
        """The ends of those before and after, to be written down."""
        return {phase: dict(progress.ended) for phase, progress in self._whole.items()}

    def restore(self, ended: Mapping[str, Mapping[str, RolloutStats | None]], rounds: RoundsState) -> None:
        for phase, ends in ended.items():
            self._whole[phase].restore(ends)
        self.rounds.restore(rounds)

    def has_ended(self, phase: str) -> bool:
        return self._whole[phase].has_ended

    def counts(self, phase: str) -> tuple[int, int]:
        """Rollouts that have ended, and all."""
        return len(self._whole[phase].ended), self._whole[phase].total

    def results(self, phase: str) -> list[RolloutStats]:
        """Of the rollouts that infrastructure did not lose."""
        return [stats for stats in self._whole[phase].ended.values() if stats is not None]

    def problem(self, group_id: str, rollout_id: str) -> Problem | None:
        """What a rollout that is under way is asked; None for all others."""
        if group_id in self._whole:
            return self._whole[group_id].open.get(rollout_id)
        return self.rounds.open().get(rollout_id) if is_round(group_id) else None

    def asked(self, phase: str) -> Iterator[OpenRollout]:
        """All that is under way before or after training."""
        return _asked(phase, self._whole[phase].open)

    def asked_in_round(self) -> Iterator[OpenRollout]:
        return _asked(group_of_round(self.rounds.running or 0), self.rounds.open())

    def begin_after(self) -> None:
        self._whole[AFTER].begin()

    def begin_round(self, version: int) -> Iterator[OpenRollout]:
        return _asked(group_of_round(version), self.rounds.begin(version))

    def end(self, group_id: str, rollout_id: str, stats: RolloutStats | None) -> tuple[list[OpenRollout], Round | None]:
        """One rollout's end: what is to be asked next, and the round, if that was its last."""
        if group_id in self._whole:
            self._whole[group_id].end(rollout_id, stats)
            return [], None
        begun, done = self.rounds.end(group_id, rollout_id, stats)
        return list(_asked(group_id, begun)), done


def _asked(group_id: str, opened: Mapping[str, Problem]) -> Iterator[OpenRollout]:
    return (OpenRollout(rollout_id, group_id, problem) for rollout_id, problem in opened.items())
