"""What goes into the ledger and what comes out of it: plain values, so that a log of events replays a run.

The ledger never sees payload bytes. An action of the kind "journal this" refers to the payload frames of the event that
caused it; the broker, which performs the actions, has them at hand.
"""

from __future__ import annotations

import msgspec

from protocols import messages


class FromProducer(msgspec.Struct, frozen=True):
    route: bytes
    message: messages.Message


class FromWorker(msgspec.Struct, frozen=True):
    route: bytes
    message: messages.Message
    owner: str = ""
    """Whom the sender's key stands for, such as `bench/host7`; empty: a process of this host, which needs none."""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed; sent by the broker every heartbeat at the latest."""


class QuietDue(msgspec.Struct, frozen=True):
    """The moment that `QuietDesk.due` named has come; without it a tick finds out, which may be a heartbeat later."""


class PeerLost(msgspec.Struct, frozen=True):
    """The socket has no connection to this route any more."""

    route: bytes


class PeerFull(msgspec.Struct, frozen=True):
    """The socket could not take a message for this route: its peer does not read."""

    route: bytes


class StartDrain(msgspec.Struct, frozen=True):
    """The broker stops: no new work goes out, results are still taken."""

    reason: str = ""


class Compared(msgspec.Struct, frozen=True):
    """Which of the opinions on a task agree, as pairs of their places; the answer to `Compare`."""

    task_id: str
    agree: list[tuple[int, int]]


Event = FromProducer | FromWorker | Tick | QuietDue | PeerLost | PeerFull | StartDrain | Compared


class TaskRow(msgspec.Struct, frozen=True):
    """A task as the journal keeps it; an empty `stage` means that it has ended and only its id is remembered."""

    seq: int
    """Key of the task in the journal, never used twice."""
    task_id: str
    stage: str
    group_id: str = ""
    max_staleness: int = msgspec.field(default=-1, name="max_lag")
    """As journals of the release before have it, under the name of then."""
    status: str = messages.Status.OK
    version: int = -1
    losses: int = 0
    order: int = 0
    """Place in its queue: lower goes first."""
    leased: bool = False
    """Somebody may work on it: after a restart it waits for one lease before it is given away again."""
    needs: str = ""
    hardware: str = ""
    """What its group's timings come from, once it has been at a bench."""


class Snapshot(msgspec.Struct, frozen=True):
    """All that the journal remembers, as a restarted ledger needs it."""

    rows: list[TaskRow] = msgspec.field(default_factory=list)
    policy_version: int = 0
    counters: dict[str, int] = msgspec.field(default_factory=dict)


class Store(msgspec.Struct, frozen=True):
    """Journal a new task; the event's payload frames are its record."""

    row: TaskRow


class Append(msgspec.Struct, frozen=True):
    """Journal the task's new state and append the event's payload frames to its record."""

    row: TaskRow


class Update(msgspec.Struct, frozen=True):
    """Journal the task's new state; its record stays."""

    row: TaskRow


class Finish(msgspec.Struct, frozen=True):
    """The task has ended: drop its record, remember its id."""

    row: TaskRow


class Forget(msgspec.Struct, frozen=True):
    """Drop the task's record and its id."""

    seq: int
    task_id: str


class Opinion(msgspec.Struct, frozen=True):
    """Keep the event's payload frames as an opinion on the task; they are no part of its record yet."""

    task_id: str
    place: int
    """What was kept from here on is dropped."""


class Compare(msgspec.Struct, frozen=True):
    """Compare the opinions on the task and say what agrees (`Compared`)."""

    task_id: str


class Settle(msgspec.Struct, frozen=True):
    """Journal the task's new state and append the opinion at this place to its record; forget the others."""

    row: TaskRow
    opinion: int


class Quarantine(msgspec.Struct, frozen=True):
    """This principal has lied: somebody has to look at it."""

    principal: str


class SetPolicy(msgspec.Struct, frozen=True):
    version: int


class ToProducer(msgspec.Struct, frozen=True):
    route: bytes
    message: messages.Message


class ToWorker(msgspec.Struct, frozen=True):
    route: bytes
    message: messages.Message


class Dispatch(msgspec.Struct, frozen=True):
    """Send the task with its record to the worker, after the journal has committed."""

    route: bytes
    task: messages.Task


Action = (
    Store | Append | Update | Finish | Forget | SetPolicy | ToProducer | ToWorker | Dispatch
    | Opinion | Compare | Settle | Quarantine
)  # fmt: skip
