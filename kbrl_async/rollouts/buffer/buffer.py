"""The rollout buffer: which groups are open, ready, in a batch, or ended, and why. Pure and replayable.

::

    admit ─▶ open ── all rollouts ended ─▶ ready ─ poll ─▶ in a batch ─▶ trained | failed
              │             │                  └─ too old ─▶ dropped_stale
              │             ├─ too few scored ─▶ failed | dropped_stale
              │             └─ all rewards the same ─▶ filtered          finish ─▶ failed("run_ended")

Invariants, after every call
* admitted == trained + filtered + dropped_stale + failed + open, where open counts ready and batched groups too (I1).
* A rollout enters at most one batch; doubled, late and unknown events change nothing (I1).
* A batch on version n holds no sample older than n − S (I2).
* At most (S+1)·P groups are open, and never more than the remaining batches need.
* `replay(rules, events)` of the applied events gives the same buffer (I9).

Holding back (`_must_wait`) keeps slow groups from being dropped. Why that is always possible: batch n on version n
leaves at most S·P of the window's (S+1)·P groups behind, and batches n+1 … n+S have S·P places for them. So with no
deadline and samples as fresh as their admission, nothing is dropped; S = 0 is the synchronous baseline.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from kbrl_async.errors import ConfigError
from kbrl_async.rollouts.buffer import batching
from kbrl_async.rollouts.buffer.events import (
    Admitted,
    BatchFailed,
    BatchMade,
    BatchTrained,
    Change,
    Closed,
    Event,
    Finished,
    HoldBegan,
    Lost,
    RolloutScored,
    StragglersCut,
    Swept,
)
from kbrl_async.rollouts.buffer.group import BufferState, Group, rewards_by_turn
from kbrl_async.rollouts.buffer.rules import BufferRules
from protocols.records import GroupOutcome, TrainGroup, TrainSample

STALE = "stale"
RUN_ENDED = "run_ended"
ZERO_VARIANCE = "zero_variance"
TOO_FEW = "too_few_rollouts"
RUNNING_RATE = 0.3
"""Weight of a problem's newest group in its running mean reward."""
STRAGGLER = "straggler"
HOLD_FLOOR_S = 20.0
"""Shortest of the waits that a run's own rollouts decide."""
REMEMBERED, _QUANTILE = 256, 0.95
"""Newest rollouts whose time is known, and the share of them that is waited for."""


class RolloutBuffer:
    """Decisions (`admission`, `scored`, `poll` …) return the event that is to happen, `apply` makes it happen.

    event = buffer.scored("g000001", "g000001.r0", samples, now)
    closed = buffer.apply(event)           # journaled first
    """

    def __init__(self, rules: BufferRules) -> None:
        if rules.batch_size < 1 or rules.max_staleness < 0:
            raise ConfigError("batch_size < 1 or max_staleness < 0", "Correct the value")
        self.rules = rules
        self.version = 0
        self.counts: Counter[str] = Counter()
        """`admitted` and one entry a `GroupOutcome`."""
        self.reasons: Counter[str] = Counter()
        self.batches_trained = 0
        self.batches_failed = 0
        self.is_finished = False
        self.allowed_staleness = rules.max_staleness
        """What admission goes by; an alarm may lower it. What is open already keeps what it was promised."""
        self.is_paused = False
        """Nothing is admitted while anything open may still end by itself."""
        _ = rules.baseline  # a name that stands for nothing is told at once
        self._groups: dict[str, Group] = {}
        self._batches: dict[str, BatchMade] = {}
        self._next_group = 0
        self._next_batch = 0
        self._hold: HoldBegan | None = None
        self._failures: Counter[str] = Counter()
        self._benched: dict[str, float] = {}
        self._running: dict[str, dict[int, float]] = {}
        self._durations: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds from admission to the end of the newest scored rollouts."""

    @classmethod
    def replay(cls, rules: BufferRules, events: Iterable[Event]) -> RolloutBuffer:
        """The buffer as it was after `events`."""
        buffer = cls(rules)
        for event in events:
            buffer.apply(event)
        return buffer

    # ── all of it ────────────────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> BufferState:
        """To be written at once: it shares what is open with the buffer."""
        return BufferState(
            self.version,
            dict(self.counts),
            dict(self.reasons),
            self.batches_trained,
            self.batches_failed,
            self.is_finished,
            self.allowed_staleness,
            self.is_paused,
            list(self._groups.values()),
            list(self._batches.values()),
            self._next_group,
            self._next_batch,
            self._hold,
            dict(self._failures),
            dict(self._benched),
            self._running,
            list(self._durations),
        )

    def restore(self, state: BufferState) -> None:
        """The buffer as it was when `state` was taken; its rules stay."""
        self.version, self.counts, self.reasons = state.version, Counter(state.counts), Counter(state.reasons)
        self.batches_trained, self.batches_failed = state.batches_trained, state.batches_failed
        self.is_finished, self.is_paused = state.is_finished, state.is_paused
        self.allowed_staleness = state.allowed_staleness
        self._groups = {group.group_id: group for group in state.groups}
        self._batches = {batch.batch_id: batch for batch in state.batches}
        self._next_group, self._next_batch, self._hold = state.next_group, state.next_batch, state.hold
        self._failures, self._benched = Counter(state.failures), state.benched
        self._running = state.running
        self._durations = deque(state.durations, maxlen=REMEMBERED)

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def open_groups(self) -> int:
        """Groups that have not ended: they hold the window's slots."""
        return len(self._groups)

    @property
    def is_done(self) -> bool:
        """All batches are trained, or the run was finished, and nothing is left open."""
        return (self.is_finished or self.batches_trained >= self.rules.max_steps) and not self._groups

    def room(self) -> int:
        """How many groups may be admitted now."""
        if self.is_finished or (self.is_paused and self._is_moving):
            return 0
        p, left = self.rules.batch_size, self.rules.max_steps - self.batches_trained
        return max(0, min(self.allowed_staleness + 1, left) * p - len(self._groups))

    def benched(self, now: float) -> frozenset[str]:
        """Problems that failed too often in a row, not to be chosen now (unless nothing else is left)."""
        return frozenset(problem for problem, until in self._benched.items() if until > now)

    def open_rollouts(self) -> dict[str, list[str]]:
        """Rollouts still awaited, by group: what a restarted aggregator submits again."""
        return {
            g.group_id: [r for r in rollout_ids(g.group_id, g.expected) if r not in g.scored and r not in g.lost]
            for g in self._groups.values()
            if not g.is_complete
        }

    def awaits_more(self, group_id: str) -> bool:
        """Whether rollouts of an open group have not ended."""
        group = self._groups.get(group_id)
        return group is not None and not group.is_complete

    def group_version(self, group_id: str) -> int | None:
        """The policy version at admission of an open group; None once it has ended."""
        group = self._groups.get(group_id)
        return None if group is None else group.admitted_version

    def group_problem(self, group_id: str) -> str:
        """The problem of an open group."""
        return self._groups[group_id].problem_id

    def outstanding(self) -> list[BatchMade]:
        """Batches made and not yet answered, oldest first."""
        return list(self._batches.values())

    def train_groups(self, batch_id: str) -> list[TrainGroup]:
        """The groups of an outstanding batch, with advantages: the same on every call."""
        chosen = [self._groups[group_id] for group_id in self._batches[batch_id].group_ids]
        return batching.train_groups(chosen, self.rules)

    @property
    def hold_s(self) -> float:
        """Longest wait for a group that would become too old. A fixed one that is shorter than answers take would teach
        short answers and easy problems: what is slow would always end too old."""
        if self.rules.hold_s is not None:
            return self.rules.hold_s
        known = sorted(self._durations)
        return max(HOLD_FLOOR_S, known[int(_QUANTILE * (len(known) - 1))] if known else 0.0)

    def check(self) -> None:
        """AssertionError unless the counters add up (I1)."""
        ended = sum(self.counts[outcome] for outcome in GroupOutcome)
        assert self.counts["admitted"] == ended + len(self._groups), (self.counts, len(self._groups))

    # ── decisions: what is to happen, None where nothing is ─────────────────────────────────────────────────────

    def admission(self, problem_id: str, level: int, rollouts: int, now: float) -> Admitted | None:
        """A group on the newest version; None when there is no room."""
        if self.room() < 1 or rollouts < self.rules.min_rollouts:
            return None
        return Admitted(f"g{self._next_group:06d}", problem_id, level, rollouts, self.version, now)

    def scored(
        self, group_id: str, rollout_id: str, samples: list[TrainSample], now: float
    ) -> RolloutScored | Lost | None:
        """A rollout has its rewards. No samples count as lost; late and doubled ends are nothing."""
        if not self.awaits(group_id, rollout_id):
            return None
        if not samples:
            return Lost(group_id, rollout_id, "no_samples", now)
        return RolloutScored(group_id, rollout_id, samples, now)

    def lost(self, group_id: str, rollout_id: str, reason: str, now: float) -> Lost | None:
        """A rollout ended without a reward; `reason` is a `Fault` or another word, `"stale"` for too old."""
        return Lost(group_id, rollout_id, reason, now) if self.awaits(group_id, rollout_id) else None

    def poll(self, now: float) -> Swept | HoldBegan | StragglersCut | BatchMade | None:
        """Drops what is too old, then makes a batch if one is due, or begins to hold it back; after that, groups that
        would be too old for every later batch go on without the rollouts that they still wait for."""
        stale = [g.group_id for g in self._groups.values() if self._is_too_old(g)]
        if stale:
            return Swept(stale, now)
        if self.is_finished or self._batches:
            return None
        left = self.rules.max_steps - self.batches_trained
        ready = sorted((g for g in self._groups.values() if g.is_ready), key=lambda g: (g.oldest, g.group_id))
        if left < 1 or len(ready) < self.rules.batch_size:
            return None
        if self._must_wait(ready):
            if self._hold is None or self._hold.index != self._next_index:
                return HoldBegan(self._next_index, now)
            if now < self._hold.at + self.hold_s:
                return None
            if late := self._late():
                return StragglersCut(late, now)
        chosen = [g.group_id for g in ready[: self.rules.batch_size]]
        return BatchMade(f"batch-{self._next_batch:06d}", self._next_index, chosen, now)

    def trained(self, batch_id: str, version: int, now: float) -> BatchTrained | None:
        """The learner answered with its new version."""
        return BatchTrained(batch_id, version, now) if batch_id in self._batches else None

    def batch_failed(self, batch_id: str, reason: str, now: float) -> BatchFailed | None:
        """The learner could not train it."""
        return BatchFailed(batch_id, reason, now) if batch_id in self._batches else None

    def finish(self, now: float, reason: str = RUN_ENDED) -> Finished | None:
        """Ends all groups outside a batch as failed; an outstanding batch may still be answered."""
        return None if self.is_finished else Finished(reason, now)

    # ── applying events ──────────────────────────────────────────────────────────────────────────────────────────

    def take(self, event: Event | None) -> Change:
        """Applies a decision at once: for whoever keeps no journal."""
        return Change(event, [] if event is None else self.apply(event))

    def apply(self, event: Event) -> list[Closed]:
        """The only place where state changes: a pure function of state and event."""
        match event:
            case Admitted():
                self._groups[event.group_id] = Group(
                    event.group_id, event.problem_id, event.level, event.rollouts, event.version, admitted_at=event.at
                )
                self._next_group += 1
                self.counts["admitted"] += 1
                return []
            case RolloutScored():
                group = self._groups[event.group_id]
                group.scored[event.rollout_id] = event.samples
                self._durations.append(event.at - group.admitted_at)
                return self._settle(group, event.at)
            case Lost():
                group = self._groups[event.group_id]
                group.lost[event.rollout_id] = event.reason
                return self._settle(group, event.at)
            case Swept():
                return [self._close(g, GroupOutcome.DROPPED_STALE, STALE, event.at) for g in event.group_ids]
            case StragglersCut():
                return [
                    closed for group_id in event.group_ids for closed in self._cut(self._groups[group_id], event.at)
                ]
            case HoldBegan():
                self._hold = event
                return []
            case BatchMade():
                self._batches[event.batch_id] = event
                self._next_batch += 1
                self._hold = None
                for group_id in event.group_ids:
                    group = self._groups[group_id]
                    group.batch_id = event.batch_id
                    group.running = dict(self._running.get(group.problem_id, {}))
                return []
            case BatchTrained():
                batch = self._batches.pop(event.batch_id)
                self.version = max(self.version, event.version)
                self.batches_trained += 1
                for group_id in batch.group_ids:
                    self._learn_mean(self._groups[group_id])
                return [self._close(g, GroupOutcome.TRAINED, "", event.at) for g in batch.group_ids]
            case BatchFailed():
                batch = self._batches.pop(event.batch_id)
                self.batches_failed += 1
                return [self._close(g, GroupOutcome.FAILED, event.reason, event.at) for g in batch.group_ids]
            case Finished():
                self.is_finished = True
                self._hold = None
                waiting = [g.group_id for g in self._groups.values() if not g.batch_id]
                return [self._close(g, GroupOutcome.FAILED, event.reason, event.at) for g in waiting]

    def _settle(self, group: Group, at: float) -> list[Closed]:
        """Closes a complete group that can't be trained; leaves the others open or ready."""
        if not group.is_complete:
            return []
        if len(group.scored) < self.rules.min_rollouts:
            if STALE in group.lost.values():
                return [self._close(group.group_id, GroupOutcome.DROPPED_STALE, STALE, at)]
            reason = next(iter(group.lost.values()), TOO_FEW)
            return [self._close(group.group_id, GroupOutcome.FAILED, reason, at)]
        if batching.teaches_nothing(group, self.rules):
            return [self._close(group.group_id, GroupOutcome.FILTERED, ZERO_VARIANCE, at)]
        return []

    def _cut(self, group: Group, at: float) -> list[Closed]:
        for rollout_id in rollout_ids(group.group_id, group.expected):
            if rollout_id not in group.scored:
                group.lost.setdefault(rollout_id, STRAGGLER)
        return self._settle(group, at)

    def _close(self, group_id: str, outcome: GroupOutcome, reason: str, at: float) -> Closed:
        group = self._groups.pop(group_id)
        self.counts[outcome] += 1
        if reason:
            self.reasons[reason] += 1
        self._judge(group.problem_id, outcome is GroupOutcome.FAILED and not self.is_finished, at)
        return Closed(group_id, group.problem_id, outcome, reason)

    def _judge(self, problem_id: str, has_failed: bool, at: float) -> None:
        if not has_failed:
            self._failures.pop(problem_id, None)
            return
        self._failures[problem_id] += 1
        if self._failures[problem_id] >= self.rules.bench_after:
            self._benched[problem_id] = at + self.rules.bench_s
            self._failures.pop(problem_id)

    # ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _next_index(self) -> int:
        return self.version + len(self._batches)

    @property
    def _is_moving(self) -> bool:
        # Complete groups that are too few for a batch wait for new ones: a pause that held those back would never end.
        return bool(self._batches) or any(not group.is_complete for group in self._groups.values())

    def awaits(self, group_id: str, rollout_id: str) -> bool:
        """Whether this rollout of an open group has not ended."""
        group = self._groups.get(group_id)
        if group is None or rollout_id in group.scored or rollout_id in group.lost:
            return False
        return rollout_id in rollout_ids(group_id, group.expected)

    def _is_too_old(self, group: Group) -> bool:
        # What is known, not what is feared: a group admitted long ago may yet be generated by a fresh policy.
        known = group.known_oldest
        return not group.batch_id and known is not None and self._next_index - known > self.rules.max_staleness

    def _late(self) -> list[str]:
        """Open groups that no batch after this one can take, with rollouts enough to be trained on without the rest."""
        oldest = self._next_index - self.rules.max_staleness
        return [
            group.group_id
            for group in self._groups.values()
            if not group.is_complete and group.oldest <= oldest and len(group.scored) >= self.rules.min_rollouts
        ]

    def _must_wait(self, ready: list[Group]) -> bool:
        """This batch would leave more groups of some version behind than the batches that may take them have places.

        Groups of version x fit batches up to x + S; after batch n, (x + S − n)·P places are left for them. Waiting
        helps only while one of them is still open and this batch has a place that no group of that age takes.
        """
        p, n = self.rules.batch_size, self._next_index
        chosen = ready[:p]
        taken = {g.group_id for g in chosen}
        rest = [g for g in self._groups.values() if not g.batch_id and g.group_id not in taken]
        for x in {g.oldest for g in rest if not g.is_complete}:
            places = p * max(0, x + self.rules.max_staleness - n)
            if sum(g.oldest <= x for g in rest) > places and sum(g.oldest <= x for g in chosen) < p:
                return True
        return False

    def _learn_mean(self, group: Group) -> None:
        known = self._running.setdefault(group.problem_id, {})
        for turn, rewards in rewards_by_turn(group).items():
            mean = sum(rewards) / len(rewards)
            known[turn] = mean if turn not in known else known[turn] + RUNNING_RATE * (mean - known[turn])


def rollout_ids(group_id: str, count: int) -> list[str]:
    """The ids of a group's rollouts: `g000012.r0` …"""
    return [f"{group_id}.r{i}" for i in range(count)]
