"""What can become of a task and of a worker: the ledger's state, and the moves that change it. Pure.

`Ledger` and its parts decide which moves an event asks for; each move keeps tasks, leases and workers in step and puts
what follows from it (to be journaled, sent or dispatched) into `out`.
"""

from __future__ import annotations

import random
from itertools import islice

import msgspec

from protocols import events as ev
from protocols import messages as msg
from protocols.affinity import LOOK, Affinity
from protocols.auth import Seal
from protocols.checking import CheckDesk
from protocols.leases import Lease, LiveTask, PoolWorker, WorkerPool, lease_id, seal_lease
from protocols.limits import COUNTERS, LedgerOptions
from protocols.messages import Stage, Status
from protocols.queues import STAGES, EndedTask, TaskTable
from protocols.quiet import QuietDesk, Sends

_DRAIN_FIRST = tuple(reversed(STAGES))
_AGED_STAGES = frozenset({Stage.COMPILE, Stage.VERIFY, Stage.BENCH})
_WITH_REFERENCES = frozenset({Stage.VERIFY, Stage.BENCH})
_MAX_PASSED_OVER = 32
"""Tasks that a free worker has refused and that are passed over in one search. A worker that refuses everything
therefore gets nothing more once so many tasks wait for somebody else, which bounds both the search and the harm."""


class Moves:
    """See the module's docstring."""

    def __init__(self, options: LedgerOptions, epoch: int, seal: Seal | None, rng: random.Random) -> None:
        self.options = options
        self.epoch = epoch
        self.seal = seal
        self.policy_version = 0
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.tasks = TaskTable(options.finished_limit)
        self.pool = WorkerPool(STAGES)
        self.affinity = Affinity()
        self.quiet = QuietDesk(options.quiet)
        self.checks = CheckDesk(options.checks, rng)
        self.stages = {stage: options.stage(stage) for stage in STAGES}
        self.draining = False
        self.now = 0.0
        self.out: list[ev.Action] = []
        self._next_lease = 1

    def begin(self, now: float) -> None:
        """Another event, of this time."""
        self.now = now
        self.out = []

    # ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def dispatch(self) -> bool:
        """Lease what can be leased, late stages first; True where an old task has moved on and needs another look."""
        moved = False
        for stage in _DRAIN_FIRST:
            if not self.tasks.queues[stage].lanes:
                continue
            passed_over: list[LiveTask] = []
            while len(passed_over) < _MAX_PASSED_OVER and (task := self._next_task(stage)) is not None:
                self.tasks.take_out(task)
                if self._is_stale(task):
                    moved = True
                    self.counters["stale"] += 1
                    self.divert(task, Stage.SCORE, Status.STALE)
                elif (worker := self.pool.take(task)) is None:
                    passed_over.append(task)
                else:
                    self._lease(self._together(task, worker), worker)
            for task in reversed(passed_over):
                self.tasks.give_back(task)
        return moved

    def _next_task(self, stage: str) -> LiveTask | None:
        """The oldest task among those that some free worker can do."""
        queue = self.tasks.queues[stage]
        return queue.oldest(needs for needs in queue.lanes if self.pool.has_free(stage, needs))

    def _together(self, oldest: LiveTask, worker: PoolWorker) -> LiveTask:
        """What a free worker gets: rather a task of a group whose reference it has, or a likely one, see `affinity`."""
        if oldest.stage not in _WITH_REFERENCES:
            return oldest
        lanes = self.tasks.queues[oldest.stage].lanes
        waiting = (t for name, lane in lanes.items() if worker.covers(name) for t in islice(lane.values(), LOOK))
        able = (task for task in waiting if self._may_have(worker, task))
        chosen = self.affinity.choose(oldest, able, worker.worker_id, self.options.likely_first)
        if chosen is not oldest:
            self.tasks.take_out(chosen)
            self.tasks.give_back(oldest)
        return chosen

    def _may_have(self, worker: PoolWorker, task: LiveTask) -> bool:
        is_refused = worker.worker_id in task.excluded or worker.principal in task.barred
        return not is_refused and not self._is_stale(task)

    def _is_stale(self, task: LiveTask) -> bool:
        if task.stage not in _AGED_STAGES or task.max_staleness < 0 or task.version < 0:
            return False
        return self.policy_version - task.version > task.max_staleness

    def _lease(self, task: LiveTask, worker: PoolWorker) -> None:
        held = lease_id(self.epoch, self._next_lease, task.stage, task.task_id)
        if self.seal is not None and worker.owner:
            held = seal_lease(held, self.seal.tag(worker.owner, held))
        self._next_lease += 1
        self.grant(task, worker, held)
        self.counters["dispatched"] += 1
        header = msg.Task(
            task.task_id,
            held,
            task.stage,
            task.losses + 1,
            self.stages[task.stage].ttl_s,
            self.policy_version,
            task.status,
            task.group_id,
        )
        self.out.append(ev.Update(task.row()))
        self.out.append(ev.Dispatch(worker.route, header))

    def grant(self, task: LiveTask, worker: PoolWorker, held: str) -> Lease:
        assert task.lease is None
        if task.stage == Stage.BENCH and self.tasks.pins.pin(task.group_id, worker.hardware):
            task.hardware = worker.hardware
            self.tasks.repin(task.group_id, worker.hardware)
        if task.stage in _WITH_REFERENCES:
            self.affinity.served(worker.worker_id, task.group_id)
        lease = Lease(held, task, worker, self.now, self.now + self.stages[task.stage].ttl_s)
        task.lease = lease
        self.pool.hold(worker, lease)
        return lease

    def divert(self, task: LiveTask, stage: str, status: str) -> None:
        self.checks.forget(task.task_id)
        task.status = status
        self.tasks.enter(task, stage, self.now)
        self.out.append(ev.Update(task.row()))

    def lose(self, lease: Lease) -> None:
        """The work under a lease is lost: try again in front of the queue, or give up after too many losses."""
        task = lease.task
        self.pool.release(lease)
        task.losses += 1
        self.counters["lost"] += 1
        limit = self.stages[task.stage].max_losses
        if limit is not None and task.losses >= limit:
            self.counters["poisoned"] += 1
            self.give_up(task, Status.WORKER_LOST)
        else:
            self.requeue(task)

    def give_up(self, task: LiveTask, status: str) -> None:
        self.divert(task, Stage.TRAINED if task.stage == Stage.TRAIN else Stage.SCORE, status)

    def requeue(self, task: LiveTask) -> None:
        self.tasks.give_back(task)
        self.out.append(ev.Update(task.row()))

    def withdraw(self, task: LiveTask, reason: str) -> None:
        """Take the task from wherever it is; whoever works on it is told to stop."""
        if task.lease is not None:
            self.revoke(task.lease, reason)
        self.tasks.take_out(task)

    def revoke(self, lease: Lease, reason: str) -> None:
        self.counters["revoked"] += 1
        self.send(lease.worker, msg.Revoke(lease.lease_id, reason))
        self.pool.release(lease)

    def advance(self, task: LiveTask, result: msg.Result) -> None:
        if task.stage == Stage.GENERATE:
            task.version = result.policy_version
        elif task.stage == Stage.TRAIN and result.policy_version > self.policy_version:
            self.set_policy(result.policy_version)
        self.checks.forget(task.task_id)
        task.status = Status.OK
        if result.next_stage:
            self.tasks.enter(task, result.next_stage, self.now)
            task.chance = result.chance if self.options.likely_first and 0.0 <= result.chance <= 1.0 else 0.0
            self.out.append(ev.Append(task.row()))
        else:
            self.finish(task)

    def timed(self, task: LiveTask, worker: PoolWorker | None) -> None:
        """The group's timings come from this hardware from now on, also where its lease was given up meanwhile."""
        if worker is not None and self.tasks.pins.pin(task.group_id, worker.hardware):
            task.hardware = worker.hardware
            self.tasks.repin(task.group_id, worker.hardware)
        self.tasks.pins.timed(task.group_id)

    def finish(self, task: LiveTask) -> None:
        self.counters["finished"] += 1
        forgotten: list[EndedTask] = self.tasks.end(task)
        self.out.append(ev.Finish(msgspec.structs.replace(task.row(), stage="")))
        self.out.extend(ev.Forget(ended.seq, ended.task_id) for ended in forgotten)

    # ── workers ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def remove(self, worker: PoolWorker, *, fenced: bool = False) -> None:
        """The worker is gone: its leases are lost, and where it was replaced their results are refused for good."""
        self.pool.remove(worker)
        self.affinity.gone(worker.worker_id)
        self.say(self.quiet.gone(worker.worker_id, self.now))
        for lease in sorted(worker.leases.values(), key=lambda lease: -lease.task.order):
            self.lose(lease)
            if fenced:
                lease.task.fenced |= {lease.lease_id}

    def suspect(self, worker: PoolWorker) -> None:
        worker.suspect = True
        self.pool.refresh(worker)

    def set_policy(self, version: int) -> None:
        self.policy_version = version
        self.out.append(ev.SetPolicy(version))

    def send(self, worker: PoolWorker, message: msg.Message) -> None:
        self.out.append(ev.ToWorker(worker.route, message))

    def say(self, sends: Sends) -> None:
        for worker_id, message in sends:
            worker = self.pool.by_id.get(worker_id)
            if worker is not None:
                self.send(worker, message)
