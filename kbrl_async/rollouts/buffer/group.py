"""One open group, and what a whole buffer of them is made of when it is written down."""

from __future__ import annotations

import dataclasses

import msgspec

from kbrl_async.rollouts.buffer.events import BatchMade, HoldBegan
from protocols.records import TrainSample


@dataclasses.dataclass
class Group:
    group_id: str
    problem_id: str
    level: int
    expected: int
    admitted_version: int
    scored: dict[str, list[TrainSample]] = dataclasses.field(default_factory=dict)
    lost: dict[str, str] = dataclasses.field(default_factory=dict)
    batch_id: str = ""
    running: dict[int, float] = dataclasses.field(default_factory=dict)
    """Running mean reward of the problem by turn, as it was when the batch was made."""
    admitted_at: float = 0.0

    @property
    def is_complete(self) -> bool:
        return len(self.scored) + len(self.lost) >= self.expected

    @property
    def is_ready(self) -> bool:
        return self.is_complete and not self.batch_id

    @property
    def known_oldest(self) -> int | None:
        return min((s.policy_version for samples in self.scored.values() for s in samples), default=None)

    @property
    def oldest(self) -> int:
        """Oldest version that is or may still be among its samples."""
        known = self.known_oldest
        if self.is_complete and known is not None:
            return known
        return self.admitted_version if known is None else min(known, self.admitted_version)


class BufferState(msgspec.Struct, frozen=True):
    """All that a `RolloutBuffer` remembers: as large as what is open, however long the run is."""

    version: int
    counts: dict[str, int]
    reasons: dict[str, int]
    batches_trained: int
    batches_failed: int
    is_finished: bool
    allowed_staleness: int = msgspec.field(name="window_lag")
    is_paused: bool
    groups: list[Group]
    batches: list[BatchMade]
    next_group: int
    next_batch: int
    hold: HoldBegan | None
    failures: dict[str, int]
    benched: dict[str, float]
    running: dict[str, dict[int, float]]
    durations: list[float] = msgspec.field(default_factory=list)


def rewards_by_turn(group: Group) -> dict[int, list[float]]:
    rewards: dict[int, list[float]] = {}
    for samples in group.scored.values():
        for sample in samples:
            rewards.setdefault(sample.turn, []).append(sample.reward)
    return rewards
