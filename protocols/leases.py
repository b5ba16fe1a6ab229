"""Who works on what: live tasks, leases, workers and their credit.

A lease id names its task and stage, so that a restarted broker, whose journal holds no leases, can tell what a worker
still holds. `WorkerPool` hands out free workers in turn: a worker that just got a task goes to the back of the line.

Invariants
* A task has at most one live lease; a worker never more leases than `min(slots, credit)`.
* A suspect worker keeps its leases but gets no new ones.
* A worker gets only what it covers: tasks that need nothing, and those whose need is among its backends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from heapq import merge
from operator import itemgetter

import msgspec

from protocols.events import TaskRow
from protocols.messages import BACKENDS, Load, Stage, Status

ON = " on "
"""Between backend and hardware in the name of a lane; no backend's name has spaces."""


def lease_id(epoch: int, number: int, stage: str, task_id: str) -> str:
    return f"{epoch}.{number}:{stage}:{task_id}"


def parse_lease_id(text: str) -> tuple[str, str] | None:
    """Stage and task id of a lease id, or None where it is none of ours."""
    parts = text.split(":", 2)
    return (parts[1], parts[2]) if len(parts) == 3 else None


def seal_lease(text: str, tag: str) -> str:
    """A lease id that says to whom it was granted: the tag stands in its first part."""
    head, _, rest = text.partition(":")
    return f"{head}.{tag}:{rest}"


def unseal_lease(text: str) -> tuple[str, str]:
    """The lease id without its tag, and the tag; an empty one where there is none."""
    head, colon, rest = text.partition(":")
    parts = head.split(".")
    if len(parts) != 3 or not colon:
        return text, ""
    return f"{parts[0]}.{parts[1]}:{rest}", parts[2]


class LiveTask(msgspec.Struct, eq=False):
    """A task that has not ended. It is queued, leased, or in grace after a restart (`grace_until`)."""

    seq: int
    task_id: str
    stage: str
    group_id: str
    max_staleness: int
    status: str = Status.OK
    version: int = -1
    losses: int = 0
    order: int = 0
    entered_at: float = 0.0
    lease: Lease | None = None
    grace_until: float | None = None
    excluded: frozenset[str] = frozenset()
    """Workers that refused it at this stage."""
    fenced: frozenset[str] = frozenset()
    """Leases of this stage whose results are refused."""
    needs: str = ""
    """The capability that a worker must have for it; empty: none."""
    hardware: str = ""
    """At a bench: what its group's timings come from; empty: nothing was timed yet."""
    barred: frozenset[str] = frozenset()
    """Principals that may not do it at all: they have given an opinion on it."""
    opinions: tuple[str, ...] = ()
    """Where the opinions on it, which wait, would send it."""
    passed_over: int = 0
    """Younger tasks that went before it at this stage, see `affinity`."""
    chance: float = 0.0
    """At a bench: what the farm predicts, where the run's benches go by it. A restart forgets it."""

    @property
    def lane(self) -> str:
        """Who may do it: tasks of one lane wait in one line."""
        pinned = self.hardware and self.stage == Stage.BENCH  # scoring a timing takes no hardware
        return f"{self.needs}{ON}{self.hardware}" if pinned else self.needs

    def row(self) -> TaskRow:
        leased = self.lease is not None or self.grace_until is not None
        return TaskRow(
            self.seq,
            self.task_id,
            self.stage,
            self.group_id,
            self.max_staleness,
            self.status,
            self.version,
            self.losses,
            self.order,
            leased,
            self.needs,
            self.hardware,
        )


class Lease(msgspec.Struct, eq=False):
    lease_id: str
    task: LiveTask
    worker: PoolWorker
    granted_at: float
    expires_at: float


class PoolWorker(msgspec.Struct, eq=False):
    worker_id: str
    incarnation: str
    route: bytes
    stages: tuple[str, ...]
    slots: int
    credit: int
    last_seen: float
    suspect: bool = False
    leases: dict[str, Lease] = msgspec.field(default_factory=dict)
    load: Load = msgspec.field(default_factory=Load)
    backends: frozenset[str] | None = None
    """None: it takes anything."""
    owner: str = ""
    """Whom its key stands for; empty on this host."""
    hardware: str = ""
    """What it times on, as far as it says so."""

    @property
    def principal(self) -> str:
        """Whom its results are held against: its key, or itself where it needs none."""
        return self.owner or self.worker_id

    @property
    def free(self) -> int:
        return min(self.slots, self.credit) - len(self.leases)

    def covers(self, lane: str) -> bool:
        needs, _, hardware = lane.partition(ON)
        if hardware and hardware != self.hardware:
            return False
        return not needs or self.backends is None or needs in self.backends


def backends_of(caps: Mapping[str, str]) -> frozenset[str] | None:
    """What a Hello says about `BACKENDS`; None where it says nothing."""
    listed = caps.get(BACKENDS)
    return None if listed is None else frozenset(name.strip() for name in listed.split(",") if name.strip())


class FreeLine:
    """Who may get a task now, in turn. Kept by what they cover, so that nobody looks at all who can't do a task."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[frozenset[str] | None, str], OrderedDict[str, tuple[int, PoolWorker]]] = {}
        """By backends and hardware, which is all that `PoolWorker.covers` goes by; the number is the place in line."""
        self._places = 0

    def add(self, worker: PoolWorker) -> None:
        """To the back of the line; one that stands in it stays where it is."""
        kind = self._kinds.setdefault((worker.backends, worker.hardware), OrderedDict())
        if worker.worker_id not in kind:
            self._places += 1
            kind[worker.worker_id] = (self._places, worker)

    def discard(self, worker: PoolWorker) -> bool:
        key = (worker.backends, worker.hardware)
        kind = self._kinds.get(key)
        if kind is None or kind.pop(worker.worker_id, None) is None:
            return False
        if not kind:
            del self._kinds[key]
        return True

    def has(self, lane: str) -> bool:
        return any(_covers(kind, lane) for kind in self._kinds.values())

    def able(self, lane: str) -> Iterator[PoolWorker]:
        """Those that cover it, whoever has waited longest first."""
        kinds = [kind.values() for kind in self._kinds.values() if _covers(kind, lane)]
        return (worker for _, worker in merge(*kinds, key=itemgetter(0)))


def _covers(kind: Mapping[str, tuple[int, PoolWorker]], lane: str) -> bool:
    return next(iter(kind.values()))[1].covers(lane)


class WorkerPool:
    """Workers by id and route, and for each stage the line of those that may get a task now."""

    def __init__(self, stages: Iterable[str]) -> None:
        self.by_id: dict[str, PoolWorker] = {}
        self.by_route: dict[bytes, PoolWorker] = {}
        self._line = {stage: FreeLine() for stage in stages}

    def add(self, worker: PoolWorker) -> None:
        self.by_id[worker.worker_id] = worker
        self.by_route[worker.route] = worker
        self.refresh(worker)

    def remove(self, worker: PoolWorker) -> None:
        del self.by_id[worker.worker_id]
        self.by_route.pop(worker.route, None)
        for stage in worker.stages:
            self._line[stage].discard(worker)

    def move(self, worker: PoolWorker, route: bytes) -> None:
        """The worker has reconnected under another route."""
        self.by_route.pop(worker.route, None)
        worker.route = route
        self.by_route[route] = worker

    def refresh(self, worker: PoolWorker) -> None:
        """Put the worker into its lines or take it out, after its credit, leases or health have changed."""
        may_work = not worker.suspect and worker.free > 0
        for stage in worker.stages:
            if may_work:
                self._line[stage].add(worker)
            else:
                self._line[stage].discard(worker)

    def has_free(self, stage: str, needs: str = "") -> bool:
        return self._line[stage].has(needs)

    def is_served(self, stage: str, needs: str) -> bool:
        """False where workers serve the stage and none of them can do this; where none has come yet, one may."""
        serving = [worker for worker in self.by_id.values() if stage in worker.stages]
        return not serving or any(worker.covers(needs) for worker in serving)

    def take(self, task: LiveTask) -> PoolWorker | None:
        """The next able worker in line; one that refused the task only where nobody else could do it."""
        refused: PoolWorker | None = None
        for worker in self._line[task.stage].able(task.lane):
            if worker.principal in task.barred:
                continue
            if worker.worker_id not in task.excluded:
                return worker
            refused = refused or worker
        return None if refused is None or self.others(task, task.barred, task.excluded) else refused

    def others(self, task: LiveTask, barred: frozenset[str], excluded: frozenset[str] = frozenset()) -> bool:
        """Is there anybody, neither of these principals nor one of these workers, who could do this task too?"""
        return any(
            task.stage in worker.stages
            and worker.covers(task.lane)
            and not worker.suspect
            and worker.principal not in barred
            and worker.worker_id not in excluded
            for worker in self.by_id.values()
        )

    def hold(self, worker: PoolWorker, lease: Lease) -> None:
        worker.leases[lease.lease_id] = lease
        for stage in worker.stages:
            if self._line[stage].discard(worker):
                self._line[stage].add(worker)
        if worker.free <= 0:
            self.refresh(worker)

    def release(self, lease: Lease) -> None:
        worker = lease.worker
        worker.leases.pop(lease.lease_id, None)
        lease.task.lease = None
        if self.by_id.get(worker.worker_id) is worker:
            self.refresh(worker)


class Fence:
    """Which incarnation of each worker is the living one; an older one that shows up again is a zombie."""

    def __init__(self, limit: int = 100_000, depth: int = 16) -> None:
        self._limit = limit
        self._depth = depth
        self._known: OrderedDict[str, list[str]] = OrderedDict()

    def admits(self, worker_id: str, incarnation: str) -> bool:
        """Record the incarnation as the living one, or return False where a newer one has taken its place."""
        known = self._known.setdefault(worker_id, [])
        self._known.move_to_end(worker_id)
        if incarnation in known[:-1]:
            return False
        if not known or known[-1] != incarnation:
            known.append(incarnation)
            del known[: -self._depth]
        while len(self._known) > self._limit:
            self._known.popitem(last=False)
        return True
