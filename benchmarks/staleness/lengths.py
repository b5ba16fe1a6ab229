"""Whose answers end too old, by their length, and what waiting costs: the real group book on a simulated clock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Annotated, NamedTuple

import numpy as np

from benchmarks.harness import Result, markdown, say
from kbrl_async.rollouts.buffer.buffer import RolloutBuffer, rollout_ids
from kbrl_async.rollouts.buffer.events import BatchMade, Closed
from kbrl_async.rollouts.buffer.rules import BufferRules
from kbrl_async.rollouts.settings import BestOfN
from protocols.records import GroupOutcome, TrainSample

HOLDS: dict[str, float | None] = {"20 s": 20.0, "300 s": 300.0, "what 95 % of the run's rollouts take": None}
GROUPS, GROUP, FIFTHS = 8, 8, 5
POLL_S, FIRST = 1.0, 5
"""Updates that are not counted: the window fills."""


def lengths(
    updates: Annotated[int, "of each simulation"] = 200,
    median_s: Annotated[float, "of an answer"] = 120.0,
    spread: Annotated[float, "σ of an answer's lognormal length, half of its variance the problem's"] = 1.0,
    train_s: Annotated[float, "of an update"] = 30.0,
    max_staleness: int = 2,
    seed: int = 0,
) -> Result:
    """Does too short a wait teach short answers? What ends too old, by `hold_s`, and of the slowest fifth of groups.

    Every open rollout is being written at once; 8 groups of 8 an update. The anchor is the wait of 20 s that once was
    fixed.
    """
    found: Result = {}
    for name, hold_s in HOLDS.items():
        rules = BufferRules(
            batch_size=GROUPS, max_steps=updates, max_staleness=max_staleness, advantage="leave_one_out",
            scale_advantages=True, truncated="negative", best_of_n=BestOfN(), hold_s=hold_s,
        )  # fmt: skip
        run = BookRun(rules, median_s, spread, train_s, random.Random(seed))
        run.run()
        found[name] = figures_of(run)
        say(name, found[name])
    keys = "stale_groups", "stale_groups_slowest", "dropped_rollouts", "dropped_rollouts_slowest"
    rows = [[name, *(f"{f[key]:.1%}" for key in keys), f"{f['updates_per_hour']:.1f}"] for name, f in found.items()]
    print(markdown(["hold_s", *(key.replace("_", " ") for key in keys), "updates an hour"], rows), flush=True)
    return {"by_hold": found, "median_s": median_s, "spread": spread, "max_staleness": max_staleness}


class LengthEnd(NamedTuple):
    """Of a group that ended while the window was full."""

    mean_s: float
    """Mean length of its answers."""
    is_stale: bool
    dropped: int
    """Of its rollouts: all where it is stale, else the stragglers that it went on without."""


class BookRun:
    """`BookRun(…).run()`; what became of its groups stands in `ends` afterwards."""

    def __init__(self, rules: BufferRules, median_s: float, spread: float, train_s: float, rng: random.Random) -> None:
        self.ends: list[LengthEnd] = []
        self.trained_at: list[float] = []
        self._book = RolloutBuffer(rules)
        self._median_s, self._each, self._train_s, self._rng = median_s, spread / 2**0.5, train_s, rng
        self._now = 0.0
        self._written: list[tuple[float, str, str, int]] = []
        """A heap of answers: when they end, group, rollout, version."""
        self._mean_s: dict[str, float] = {}
        self._scored: Counter[str] = Counter()
        self._batch: tuple[float, str] | None = None
        """When the learner is done with it."""

    def run(self) -> None:
        while not self._book.is_done:
            self._admit()
            self._note(self._step())

    def _admit(self) -> None:
        while (admitted := self._book.admission(f"p{len(self._mean_s)}", 1, GROUP, self._now)) is not None:
            self._book.apply(admitted)
            group_id, own = admitted.group_id, self._median_s * self._rng.lognormvariate(0, self._each)
            each = [own * self._rng.lognormvariate(0, self._each) for _ in range(GROUP)]
            self._mean_s[group_id] = sum(each) / GROUP
            for rollout_id, s in zip(rollout_ids(group_id, GROUP), each, strict=True):
                heappush(self._written, (self._now + s, group_id, rollout_id, admitted.version))

    def _step(self) -> list[Closed]:
        """The next thing that happens by now; else time passes."""
        event, closed = self._book.take(self._book.poll(self._now))
        if isinstance(event, BatchMade):
            self._batch = self._now + self._train_s, event.batch_id
        if event is not None:
            return closed
        if self._batch is not None and self._batch[0] <= self._now:
            trained = self._book.trained(self._batch[1], self._book.version + 1, self._now)
            self._batch = None
            self.trained_at.append(self._now)
            return self._book.take(trained).closed
        if self._written and self._written[0][0] <= self._now:
            _, group_id, rollout_id, version = heappop(self._written)
            sample = TrainSample(rollout_id, [0], [0], [0.0], 0.0, float(self._rng.random() < 0.5), version)
            scored = self._book.scored(group_id, rollout_id, [sample], self._now)
            self._scored[group_id] += scored is not None
            return self._book.take(scored).closed
        self._now += POLL_S
        return []

    def _note(self, closed: Sequence[Closed]) -> None:
        for group in closed if self._book.batches_trained >= FIRST else ():
            if group.outcome is not GroupOutcome.FAILED:
                is_stale = group.outcome is GroupOutcome.DROPPED_STALE
                dropped = GROUP if is_stale else GROUP - self._scored[group.group_id]
                self.ends.append(LengthEnd(self._mean_s[group.group_id], is_stale, dropped))


def figures_of(run: BookRun) -> Result:
    """Shares of all groups and of the slowest fifth."""
    ends = sorted(run.ends)
    parts = {"": ends, "_slowest": ends[-len(ends) // FIFTHS :]}
    found: Result = {"groups": len(ends)}
    for part, of in parts.items():
        found[f"stale_groups{part}"] = float(np.mean([end.is_stale for end in of]))
        found[f"dropped_rollouts{part}"] = float(np.mean([end.dropped / GROUP for end in of]))
    times = run.trained_at
    return found | {"updates_per_hour": 3600 * (len(times) - 1) / (times[-1] - times[0])}
