"""Evaluations of the held-out problems while training goes on. Pure; a part of the campaign's state.

::

    update n·every ─▶ round of version n ─▶ a few rollouts under way at once ─▶ all ended ─▶ figures of version n
                          └ the next one is due while this one runs: it is left out, rounds never pile up

Invariants
* Training never waits for a round: nothing that admits groups, makes batches or ends the run looks here.
* At most `credit` of a round's rollouts are under way, however many it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kbrl_async.runs.telemetry.training_metrics import RolloutStats, heldout_scalars
from protocols.records import Problem

PREFIX = "eval-v"


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
    """See the module's docstring."""

    def __init__(self, heldout: Sequence[Problem], samples: int, every: int, credit: int) -> None:
        self._heldout, self._samples, self._every, self._credit = heldout, samples, every, credit
        self._running: int | None = None
        self._results: dict[str, RolloutStats | None] = {}
        self._begun_at = 0
        self.ended: list[Round] = []

    def state(self) -> RoundsState:
        return RoundsState(self._running, self._results, self._begun_at, self.ended)

    def restore(self, state: RoundsState) -> None:
        self._running, self._results = state.running, state.results
        self._begun_at, self.ended = state.begun_at, state.ended

    @property
    def running(self) -> int | None:
        """The version whose round is under way."""
        return self._running

    def due(self, version: int) -> int | None:
        """The version that a round should begin for now, if any."""
        if not self._every or not self._samples or not self._heldout or self._running is not None:
            return None
        return version if version and version % self._every == 0 and version > self._begun_at else None

    def wanted(self) -> dict[str, Problem]:
        """Rollouts that may be under way now: the first few of those without an end."""
        if self._running is None:
            return {}
        open_ = {key: problem for key, problem in self._ids(self._running).items() if key not in self._results}
        return dict(list(open_.items())[: self._credit])

    def _ids(self, version: int) -> dict[str, Problem]:
        return {
            f"{group_of_round(version)}.{problem.problem_id}.{sample}": problem
            for problem in self._heldout
            for sample in range(self._samples)
        }

    def begin(self, entry: RoundBegun) -> None:
        self._running, self._begun_at, self._results = entry.version, entry.version, {}

    def take(self, phase: str, rollout_id: str, stats: RolloutStats | None) -> Round | None:
        """One rollout's end; the round, if that was the last. Ends of another round are late and change nothing."""
        if self._running is None or phase != group_of_round(self._running):
            return None
        ids = self._ids(self._running)
        if rollout_id in ids:
            self._results.setdefault(rollout_id, stats)
        if len(self._results) < len(ids):
            return None
        done = _judged(self._running, [self._results[key] for key in ids])
        self.ended = [*(msgspec.structs.replace(earlier, results=[]) for earlier in self.ended), done]
        self._running, self._results = None, {}
        return done

    def best(self) -> int | None:
        """The version with the highest mean reward; a rollout without a verdict counts for nobody."""
        means = {done.version: done.reward for done in self.ended if done.reward is not None}
        return max(means, key=lambda version: (means[version], version)) if means else None


def _judged(version: int, results: list[RolloutStats | None]) -> Round:
    found = [stats for stats in results if stats is not None]
    reward = sum(stats.reward for stats in found) / len(found) if found else None
    return Round(version, results, heldout_scalars(found), reward)
