"""The headers of the broker protocol: one small struct per message kind.

Frames on the wire are `[route][version+kind][header][payload …]`; see `framing`. The broker decodes the header and
passes payload frames on untouched. Worker and producer connect with a DEALER to one of the broker's two ROUTERs::

    producer ─ Submit ─────────▶ broker        worker ─ Hello/Beat/Result/Nack/Bye ─▶ broker
    producer ◀ SubmitAck/Busy ── broker        worker ◀ Welcome/Task/Ack/Revoke/Drain ─ broker
    bench ◀ QuietRequest/Grant/Done ▶ broker   holder ◀ Pause/Paused/Resume ▶ broker        (see `quiet`)
    viewer ─ StatusRequest ────▶ broker        viewer ◀ StatusReport ── broker             (a third ROUTER, read-only)
    bench ─ Want ▶ ◀ Chunk ──── broker        farm ─ Offer ▶ ◀ Kept ── broker              (see `transfer`)

Invariants
* `array_like` and append-only: a new field has a default and stands last, so that old and new peers understand each
  other (golden bytes of every message are checked in).
* Times are seconds. A `task_id` is fixed by its producer and never changes on the way through the stages (I1).
"""

from __future__ import annotations

import enum

import msgspec

BACKENDS = "backends"
"""Key of `Hello.caps`: the backends that the worker can do, joined by commas. A worker without it takes anything."""


SHARES = "shares"
"""Key of `Hello.caps`: resources (such as a host's GPU) that the worker loads and can leave in peace for a while."""


HARDWARE = "hardware"
"""Key of `Hello.caps`: what a bench times on. The timings of a group come from one kind of it."""


class Stage(enum.StrEnum):
    """The queues of the broker; a task walks through them from left to right and may skip some."""

    GENERATE = "generate"
    COMPILE = "compile"
    VERIFY = "verify"
    """Where a run has verifiers: its benches then only time what is right."""
    BENCH = "bench"
    SCORE = "score"
    TRAIN = "train"
    TRAINED = "trained"


class Status(enum.StrEnum):
    """How the last stage of a task ended, as its header says it (the payload holds the details)."""

    OK = "ok"
    WORKER_LOST = "worker_lost"
    STALE = "stale"
    NO_WORKER = "no_worker"
    """Workers serve the stage, and none of them can do what this task needs."""


class Load(msgspec.Struct, array_like=True, frozen=True):
    """What a process says of itself with each beat."""

    busy: float = 0.0
    """Share of the time since the last beat in which it worked (0 … 1)."""
    queued: int = 0
    lag_ms: float = 0.0
    """Worst event-loop lag since the last beat (I11)."""
    rss_mb: float = 0.0
    done: int = 0
    """Tasks finished since start."""
    tokens: int = 0
    """Tokens generated or trained since start."""
    cpu: float = 0.0
    """Cores that the process and its children used since the last beat; 1 is one whole core."""
    gpu: float = -1.0
    """Utilisation of the process's GPUs in the mean (0 … 1); −1: it has none."""
    gpu_mb: float = 0.0
    """Memory in use on the fullest of them, by whomever."""
    facts: dict[str, float] = msgspec.field(default_factory=dict)
    """A few figures of its own, such as `reward_mean` of the last update: what a viewer shows beside the load."""


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """A worker introduces itself: `incarnation` is new for each process, `held` lists leases it still works on."""

    worker_id: str
    incarnation: str
    stages: list[str]
    slots: int
    held: list[str] = msgspec.field(default_factory=list)
    """Lease ids whose work runs or whose result waits for its `Ack`."""
    caps: dict[str, str] = msgspec.field(default_factory=dict)
    """What this worker can do; see `BACKENDS` and `SHARES`."""
    policy_version: int = -1
    """The learner says here which version it has; others leave −1."""
    credit: int = -1
    """Leases that it wants for now, `slots` being the most it will ever want; −1: as many as that."""


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    epoch: int
    heartbeat_s: float
    lease_s: float
    policy_version: int
    adopted: list[str] = msgspec.field(default_factory=list)
    """Those of `Hello.held` that stay valid; the worker abandons the others."""
    settings: str = ""
    """What workers must agree on, as JSON: settings of the run by key. Empty: the broker does not know them."""


class Beat(msgspec.Struct, array_like=True, frozen=True):
    """Sent every `heartbeat_s` by the loop that does the work; renews `leases`; `credit_total` is its capacity."""

    credit_total: int
    leases: list[str] = msgspec.field(default_factory=list)
    load: Load = msgspec.field(default_factory=Load)
    epoch: int = 0
    """The epoch that the sender knows. The broker beats too, and its 0 means: I don't know you, say Hello."""


class Task(msgspec.Struct, array_like=True, frozen=True):
    task_id: str
    lease_id: str
    stage: str
    attempt: int
    ttl_s: float
    policy_version: int
    """The newest version the broker knows of."""
    status: str = Status.OK
    group_id: str = ""


class Result(msgspec.Struct, array_like=True, frozen=True):
    """Kept in the worker's outbox until `Ack`. Its payload frames are appended to the task's record."""

    task_id: str
    lease_id: str
    next_stage: str = ""
    """The queue the task goes to now; empty when it ends here."""
    policy_version: int = -1
    """`generate`: the version that wrote it. `train`: the version that it made. Else −1."""
    group_id: str = ""
    chance: float = 0.0
    """`compile`: the predicted chance that it is right. It may order a queue, and nothing that is paid knows it."""


class Ack(msgspec.Struct, array_like=True, frozen=True):
    """The result is journaled (`accepted`), or was not needed (`accepted=False`, with the reason)."""

    task_id: str
    lease_id: str
    accepted: bool = True
    reason: str = ""


class Revoke(msgspec.Struct, array_like=True, frozen=True):
    lease_id: str
    reason: str


class Nack(msgspec.Struct, array_like=True, frozen=True):
    """The worker could not do it for a reason of its own (I4): the task is retried elsewhere."""

    lease_id: str
    reason: str


class Drain(msgspec.Struct, array_like=True, frozen=True):
    """To a worker: finish what you hold, take no more, say `Bye`."""

    reason: str = ""


class Bye(msgspec.Struct, array_like=True, frozen=True):
    """From a worker: I am gone and hold nothing."""

    reason: str = ""


class Submit(msgspec.Struct, array_like=True, frozen=True):
    """A new task with its first payload frames. Submitting a known `task_id` again is harmless."""

    task_id: str
    stage: str
    group_id: str = ""
    max_staleness: int = msgspec.field(default=-1, name="max_lag")
    """Policy versions that may have come between generation and dispatch (I2); −1: any number."""
    needs: str = ""
    """The backend that workers must offer under `BACKENDS` to get this task, at every stage; empty: any worker."""


class SubmitAck(msgspec.Struct, array_like=True, frozen=True):
    task_id: str
    duplicate: bool = False
    group_id: str = ""
    """Set, with an empty `task_id`, where a Retire is acknowledged."""


class Busy(msgspec.Struct, array_like=True, frozen=True):
    """Back-pressure: the queue is full, submit `task_id` again after `retry_s`."""

    task_id: str
    retry_s: float


class Retire(msgspec.Struct, array_like=True, frozen=True):
    """From the aggregator: this group has ended; drop what is still queued of it, revoke what runs, forget the rest."""

    group_id: str


class QuietRequest(msgspec.Struct, array_like=True, frozen=True):
    """From a bench: let me have `resource` to myself. Repeated until its grant has come."""

    request_id: str
    resource: str
    length_s: float


class QuietGrant(msgspec.Struct, array_like=True, frozen=True):
    """To the bench: for `length_s` nobody else works on the resource, but those in `missing`, who did not answer."""

    request_id: str
    resource: str
    length_s: float
    waited_s: float = 0.0
    missing: list[str] = msgspec.field(default_factory=list)


class QuietDone(msgspec.Struct, array_like=True, frozen=True):
    """From the bench: the window may end; also: I wait no longer."""

    request_id: str


class Pause(msgspec.Struct, array_like=True, frozen=True):
    """To a worker that shares `resource`: begin no further step, say `Paused`; go on by yourself after `length_s`."""

    window_id: str
    resource: str
    length_s: float


class Paused(msgspec.Struct, array_like=True, frozen=True):
    window_id: str
    is_idle: bool = False
    """It had nothing to do anyway, and nothing waits: the window takes no time from it."""


class Resume(msgspec.Struct, array_like=True, frozen=True):
    window_id: str


class StatusRequest(msgspec.Struct, array_like=True, frozen=True):
    """From a viewer: how does the system stand? Changes nothing; the broker's status socket takes nothing else."""

    token: str = ""
    """Comes back in the report."""


class StageStanding(msgspec.Struct, array_like=True, frozen=True):
    stage: str
    queued: int = 0
    in_flight: int = 0
    """Leased, or in grace after a restart of the broker."""
    oldest_s: float = 0.0
    """How long the head of the queue has waited at this stage."""
    workers: int = 0
    credit: int = 0
    """Leases that its workers would take in all, those that are suspect left out."""
    lag_mean: float = 0.0
    """Policy versions between now and those that wrote the tasks at this stage (I2)."""
    lag_max: int = 0


class WorkerStanding(msgspec.Struct, array_like=True, frozen=True):
    worker_id: str
    stages: list[str] = msgspec.field(default_factory=list)
    slots: int = 0
    credit: int = 0
    leases: int = 0
    suspect: bool = False
    silent_s: float = 0.0
    """Since it was last heard of."""
    load: Load = msgspec.field(default_factory=Load)


class TroubleReport(msgspec.Struct, array_like=True, frozen=True):
    """Something that went wrong with a task or a worker, as the broker saw it."""

    at: float
    """Epoch seconds."""
    who: str
    what: str


class StatusReport(msgspec.Struct, array_like=True, frozen=True):
    """To a viewer: how the system stood at `at`."""

    token: str = ""
    at: float = 0.0
    """Epoch seconds of the broker's host."""
    epoch: int = 0
    uptime_s: float = 0.0
    """Of this broker process."""
    policy_version: int = 0
    draining: bool = False
    """The run is being stopped, or has ended."""
    stages: list[StageStanding] = msgspec.field(default_factory=list)
    workers: list[WorkerStanding] = msgspec.field(default_factory=list)
    counters: dict[str, int] = msgspec.field(default_factory=dict)
    broker: Load = msgspec.field(default_factory=Load)
    troubles: list[TroubleReport] = msgspec.field(default_factory=list)
    """The last ones, oldest first."""
    run: str = ""
    rates: dict[str, float] = msgspec.field(default_factory=dict)
    """`rollouts_per_s`, `tokens_per_s`, `updates_per_h` over the last half minute; empty right after a start."""


class Want(msgspec.Struct, array_like=True, frozen=True):
    """From a bench or sampler that shares no disk: a piece of an artifact. Answered by one `Chunk`; see `transfer`."""

    address: str
    """Sha256 of the content, as hex digits; or `transfer.POLICY`."""
    offset: int
    length: int


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """To the bench: the piece that begins at `offset` is the payload frame; `total` −1: there is no such artifact."""

    address: str
    offset: int
    total: int


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """From a compile farm that shares no disk: the payload frame is a piece of an artifact; none asks what is kept."""

    address: str
    offset: int
    total: int


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """To the farm: go on at `offset`; `complete` once all is there and hashes to its address; or why it never will."""

    address: str
    offset: int
    complete: bool = False
    reason: str = ""


Message = (
    Hello | Welcome | Beat | Task | Result | Ack | Revoke | Nack | Drain | Bye | Submit | SubmitAck | Busy | Retire
    | QuietRequest | QuietGrant | QuietDone | Pause | Paused | Resume | StatusRequest | StatusReport
    | Want | Chunk | Offer | Kept
)  # fmt: skip
