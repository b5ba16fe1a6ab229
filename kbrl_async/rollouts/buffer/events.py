"""The events of the rollout buffer: everything that ever changes it. Each is journaled before anybody acts on it.

Structs are tagged and append-only, like those on the wire: a journal of an older version must replay.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from protocols.records import GroupOutcome, TrainSample


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    group_id: str
    problem_id: str
    level: int
    rollouts: int
    version: int
    at: float


class RolloutScored(msgspec.Struct, frozen=True, tag="scored"):
    """A rollout ended with a reward: one sample a turn, `advantage` still 0."""

    group_id: str
    rollout_id: str
    samples: list[TrainSample]
    at: float


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """A rollout ended without a reward (I4): its group goes on without it."""

    group_id: str
    rollout_id: str
    reason: str
    at: float


class Swept(msgspec.Struct, frozen=True, tag="swept"):
    """Groups that no batch can take any more (I2)."""

    group_ids: list[str]
    at: float


class HoldBegan(msgspec.Struct, frozen=True, tag="hold_began"):
    """Batch `index` could start, but waits for a group that would become too old without it."""

    index: int
    at: float


class StragglersCut(msgspec.Struct, frozen=True, tag="stragglers_cut"):
    """These groups go on without the rollouts that they still wait for: waiting longer would lose the whole of them."""

    group_ids: list[str]
    at: float


class BatchMade(msgspec.Struct, frozen=True, tag="batch_made"):
    batch_id: str
    index: int
    """The policy version it is trained on."""
    group_ids: list[str]
    at: float


class BatchTrained(msgspec.Struct, frozen=True, tag="batch_trained"):
    batch_id: str
    version: int
    """The policy version it made."""
    at: float


class BatchFailed(msgspec.Struct, frozen=True, tag="batch_failed"):
    batch_id: str
    reason: str
    at: float


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    reason: str
    at: float


Event = (
    Admitted
    | RolloutScored
    | Lost
    | Swept
    | StragglersCut
    | HoldBegan
    | BatchMade
    | BatchTrained
    | BatchFailed
    | Finished
)


class Closed(NamedTuple):
    """The one end of a group. The aggregator retires the group's tasks at the broker when it sees this."""

    group_id: str
    problem_id: str
    outcome: GroupOutcome
    reason: str


class Change(NamedTuple):
    """What a decision did: its event (None: nothing happened) and the groups that ended by it."""

    event: Event | None
    closed: list[Closed]
