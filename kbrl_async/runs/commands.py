"""What changes a run's state, and what has then to be done. A command is an entry of the journal; effects are data.

::

    due, scored, lost, trained … ─▶ command ─▶ journal ─▶ RunState.do(command) ─▶ effects: ask, train, archive, say
                                       ▲                                           (a restart and a replay do none)
                              a restart, `kbrl replay`

Commands are tagged and append-only, like structs on the wire: a journal of an older version must replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kbrl_async.evaluation.rounds import Round, RoundBegun
from kbrl_async.rollouts import trajectories
from kbrl_async.rollouts.alarms import AlarmChange
from kbrl_async.rollouts.buffer.events import BatchMade, Closed, Event, RolloutScored
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.rollouts.trajectories import TurnTaken
from protocols.records import Problem, Purpose, TrainGroup

# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────


class RolloutEnded(msgspec.Struct, frozen=True, tag="rollout_ended"):
    """The numbers of a training rollout's last turn; written together with the buffer's own event."""

    rollout_id: str
    group_id: str
    stats: RolloutStats


class Evaluated(msgspec.Struct, frozen=True, tag="evaluated"):
    """A held-out rollout ended; `stats` is None where infrastructure failed."""

    phase: str
    rollout_id: str
    stats: RolloutStats | None
    at: float = 0.0


class Watched(msgspec.Struct, frozen=True, tag="watched"):
    """What the alarms see of an update; written together with the buffer's own event."""

    version: int
    metrics: dict[str, float]
    at: float = 0.0


Command = Event | RolloutEnded | TurnTaken | Evaluated | RoundBegun | Watched


def without_tokens(command: Command) -> Command:
    """What must stay of a scored rollout once its group has ended: its reward and version, not its tokens (I10)."""
    if isinstance(command, TurnTaken):
        return trajectories.without_tokens(command)
    if not isinstance(command, RolloutScored):
        return command
    samples = [msgspec.structs.replace(s, prompt_ids=[], token_ids=[], logprobs=[]) for s in command.samples]
    return msgspec.structs.replace(command, samples=samples)


def group_of(command: Command) -> str:
    """The group that a command's tokens belong to; empty for all that carry none."""
    return command.group_id if isinstance(command, RolloutScored | TurnTaken) else ""


# ── effects ───────────────────────────────────────────────────────────────────────────────────────────────────────


class AskTurn(NamedTuple):
    """The next turn of this rollout is asked for."""

    rollout_id: str
    group_id: str
    problem: Problem
    purpose: Purpose


class SendBatch(NamedTuple):
    """The batch goes to the learner."""

    batch: BatchMade


class ForgetGroup(NamedTuple):
    """The broker forgets this group's tasks."""

    group_id: str


class CurriculumMoved(NamedTuple):
    change: str


class RoundStarted(NamedTuple):
    """The policy of this version is kept until the round has ended."""

    version: int


Effect = AskTurn | SendBatch | ForgetGroup | CurriculumMoved | RoundStarted | Round | AlarmChange | Closed
"""A `Closed` group goes to the archive, and its tasks are retired; a `Round` and an `AlarmChange` are told."""


def closed_in(effects: Sequence[Effect]) -> list[Closed]:
    return [effect for effect in effects if isinstance(effect, Closed)]


def batch_frames(groups: Sequence[TrainGroup]) -> list[bytes]:
    return [msgspec.msgpack.encode(group) for group in groups]
