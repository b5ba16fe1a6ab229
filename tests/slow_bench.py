"""A run whose policy never changes and whose bench is slow for correct kernels: simulated time, a real rollout buffer.

What does not compile is scored at once, a wrong kernel soon, and a correct one waits for its turn at the only bench. So
failures come first: at the run's beginning, in each group, and in what a run that is cut off has of its last groups.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from pathlib import Path

from kbrl_async.rollouts.buffer.buffer import RolloutBuffer, rollout_ids
from kbrl_async.rollouts.buffer.events import Change
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs import summary
from kbrl_async.runs.commands import Command, RolloutEnded
from kbrl_async.runs.run_journal import RunJournal
from kbrl_async.runs.telemetry.by_version import Answers
from protocols.records import GroupOutcome, TrainSample
from tests.plans import buffer_rules

COMPILES, CORRECT = 0.6, 0.4
"""Of all answers, whichever version writes them."""
GROUP, BATCH, LAG = 8, 8, 2
FAILED_S, WRONG_S, BENCH_S, TRAIN_S = 0.2, 1.0, 1.0, 2.0


class SlowBench:
    """`entries` are what an aggregator would have journaled; `scored` is every answer in the order of its score."""

    def __init__(self, updates: int, seed: int = 0, until_s: float = float("inf")) -> None:
        self.book = RolloutBuffer(buffer_rules(batch_size=BATCH, max_steps=updates, max_staleness=LAG, hold_s=60.0))
        self.entries: list[Command] = []
        self.scored: list[RolloutStats] = []
        self._rng = random.Random(seed)
        self._later: list[tuple[float, int, str, object]] = []
        self._bench_free = 0.0
        self._run(until_s)

    def _run(self, until_s: float) -> None:
        self._advance(0.0)
        while self._later and self._later[0][0] < until_s:
            now, _, what, value = heapq.heappop(self._later)
            if what == "scored":
                assert isinstance(value, RolloutStats)
                self._score(value, now)
            else:
                self._note(self.book.take(self.book.trained(str(value), self.book.version + 1, now)))
            self._advance(now)
        self._note(self.book.take(self.book.finish(until_s if self._later else 1e6)))

    def _advance(self, now: float) -> None:
        while self.book.room() > 0:
            change = self.book.take(self.book.admission(f"L1/{self.book.counts['admitted'] % 24:02d}", 1, GROUP, now))
            self._note(change)
            group = f"g{self.book.counts['admitted'] - 1:06d}"
            for rollout_id in rollout_ids(group, GROUP):
                self._write(rollout_id, now)
        while (change := self.book.take(self.book.poll(now))).event is not None:
            self._note(change)
            for batch in self.book.outstanding()[-1:]:
                self._push(now + TRAIN_S, "trained", batch.batch_id)

    def _write(self, rollout_id: str, now: float) -> None:
        luck = self._rng.random()
        problem = self.book.group_problem(rollout_id.partition(".")[0])
        answer = RolloutStats(
            problem_id=problem, level=1, reward=float(luck < CORRECT) + 0.1 * (luck < COMPILES) + 0.01 * luck,
            compiled=luck < COMPILES, correct=luck < CORRECT, policy_version=self.book.version, rollout_id=rollout_id,
            fault="ok" if luck < CORRECT else "incorrect" if luck < COMPILES else "compile_error",
        )  # fmt: skip
        at = now + (WRONG_S if answer.compiled else FAILED_S) * (1 + self._rng.random())
        if answer.correct:
            self._bench_free = at = max(at, self._bench_free) + BENCH_S
        self._push(at, "scored", answer)

    def _score(self, stats: RolloutStats, now: float) -> None:
        group = stats.rollout_id.partition(".")[0]
        sample = TrainSample(stats.rollout_id, [1], [2], [-0.1], 0.0, stats.reward, stats.policy_version)
        change = self.book.take(self.book.scored(group, stats.rollout_id, [sample], now))
        if change.event is not None:
            self.entries.append(RolloutEnded(stats.rollout_id, group, stats))
            self.scored.append(stats)
        self._note(change)

    def _note(self, change: Change) -> None:
        if change.event is not None:
            self.entries.append(change.event)

    def _push(self, at: float, what: str, value: object) -> None:
        heapq.heappush(self._later, (at, len(self.entries) + len(self._later) * 1000, what, value))

    def folder(self, path: Path) -> Path:
        """As a run leaves it."""
        path.mkdir(parents=True)
        with RunJournal(path / "aggregator.sqlite") as journal:
            journal.append(self.entries)
            summary.write(path / "summary.json", self.summary(journal.answers()))
        return path

    def summary(self, answers: Answers) -> summary.Summary:
        ends = {f"groups_{outcome}": self.book.counts[outcome] for outcome in GroupOutcome}
        counters = summary.RunCounters(
            groups_admitted=self.book.counts["admitted"], rollouts=len(self.scored), updates=self.book.batches_trained,
            max_staleness=LAG, **ends,
        )  # fmt: skip
        return summary.build(counters=counters, answers=answers, wall_s=100.0, busy={}, extra={"run": "slow"})


def tenths(scored: Sequence[RolloutStats]) -> tuple[float, float]:
    """Correct in the first and in the last tenth in the order of scoring: what was shown once."""
    size = -(-len(scored) // 10)
    first, last = scored[:size], scored[-size:]
    return sum(s.correct for s in first) / size, sum(s.correct for s in last) / size
