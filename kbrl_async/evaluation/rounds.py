"""Evaluations of the held-out problems while training goes on. Pure; a part of the run's state.

::

    update n·every ─▶ round of version n ─▶ a few rollouts under way at once ─▶ all ended ─▶ figures of version n
                          └ the next one is due while this one runs: it is left out, rounds never pile up

Invariants
* Training never waits for a round: nothing that admits groups, makes batches or ends the run looks here.
* At most `eval_credit` of a round's rollouts are under way, however many it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kbrl_async.evaluation.metrics import heldout_scalars
from kbrl_async.evaluation.progress import EvaluationProgress
from kbrl_async.rollouts.stats import RolloutStats
from protocols.records import Problem

PREFIX = "eval-v"
Progress = EvaluationProgress[RolloutStats | None]
"""A rollout ends with its best turn; None where infrastructure failed."""


class RoundBegun(msgspec.Struct, frozen=True, tag="round_begun"):
    """The held-out problems are asked of this version, or of those that follow while the round runs."""

    version: int
    at: float = 0.0


class Round(msgspec.Struct, frozen=True):
    """A round that has ended."""

    version: int
    results: list[RolloutStats | None]
    """One a rollout; None where infrastructure failed. Of the newest round only (I10)."""
    figures: dict[str, float] = msgspec.field(default_factory=dict)
    """What TensorBoard shows of it."""
    reward: float | None = None
    """Mean over the rollouts that have a verdict; None where there is none."""


class RoundsState(msgspec.Struct, frozen=True):
    """All that rounds remember."""

    running: int | None
    results: dict[str, RolloutStats | None]
    begun_at: int
    ended: list[Round]


def group_of_round(version: int) -> str:
    return f"{PREFIX}{version}"


def is_round(group_id: str) -> bool:
    return group_id.startswith(PREFIX)


class Rounds:
    """See the module's docstring. Parameters are the settings of these names."""

    def __init__(self, heldout: Sequence[Problem], eval_samples: int, eval_every: int, eval_credit: int) -> None:
        self._heldout, self._samples, self._every, self._credit = heldout, eval_samples, eval_every, eval_credit
        self._progress: Progress | None = None
        self._begun_at = 0
        self.running: int | None = None
        """The version whose round is under way."""
        self.ended: list[Round] = []

    def state(self) -> RoundsState:
        results = dict(self._progress.ended) if self._progress is not None else {}
        return RoundsState(self.running, results, self._begun_at, self.ended)

    def restore(self, state: RoundsState) -> None:
        self._begun_at, self.ended = state.begun_at, state.ended
        if state.running is not None:
            self._start(state.running, state.results)

    def due(self, version: int) -> int | None:
        """The version that a round should begin for now, if any."""
        if not self._every or not self._samples or not self._heldout or self.running is not None:
            return None
        return version if version and version % self._every == 0 and version > self._begun_at else None

    def open(self) -> Mapping[str, Problem]:
        """Rollouts that are under way."""
        return {} if self._progress is None else self._progress.open

    def begin(self, version: int) -> Mapping[str, Problem]:
        """A round of this version; returns the rollouts that are to be asked for."""
        self._begun_at = version
        return self._start(version, {})

    def _start(self, version: int, ended: Mapping[str, RolloutStats | None]) -> Mapping[str, Problem]:
        self.running = version
        self._progress = EvaluationProgress(group_of_round(version), self._heldout, self._samples, self._credit)
        self._progress.restore(ended)
        self._progress.begin()
        return self._progress.open

    def end(
        self, group_id: str, rollout_id: str, stats: RolloutStats | None
    ) -> tuple[Mapping[str, Problem], Round | None]:
        """One rollout's end: the rollouts that are to be asked for next, and the round, if that was its last. Ends of
        another round are late and change nothing."""
        progress, version = self._progress, self.running
        if progress is None or version is None or progress.name != group_id or not progress.end(rollout_id, stats):
            return {}, None
        if not progress.has_ended:
            return progress.begin(), None
        done = _judged(version, progress.in_order())
        self.ended = [*(msgspec.structs.replace(earlier, results=[]) for earlier in self.ended), done]
        self.running = self._progress = None
        return {}, done

    def best(self) -> int | None:
        """The version with the highest mean reward; a rollout without a verdict counts for nobody."""
        means = {done.version: done.reward for done in self.ended if done.reward is not None}
        return max(means, key=lambda version: (means[version], version)) if means else None


def _judged(version: int, results: list[RolloutStats | None]) -> Round:
    found = [stats for stats in results if stats is not None]
    reward = sum(stats.reward for stats in found) / len(found) if found else None
    return Round(version, results, heldout_scalars(found), reward)
