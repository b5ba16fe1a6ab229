"""The broker's brain as a pure state machine: `Ledger.handle(event, now) -> [action]`, no socket, clock or file.

One task, from submission to its end::

              Submit                    credit                      Result, last stage
    (unknown) ──────▶ queued at a stage ──────▶ leased ────────────────────────────────▶ ended
                        ▲  ▲   │  ▲               │ │                                      ▲
                        │  │   │  └─ lost, Nack ──┘ │                                      │
                        │  │   └ too old, or nobody └─ Result, next stage: its queue       │
                        │  │     can do it: score                                          │
                        │  └── grace after a restart, unless a worker still holds it       │
                        └ third loss: score (train: trained), status worker_lost   Retire ─┘

Invariants, held after every event (tests/protocol/test_ledger_properties.py)
* I1: a submitted task ends once, each stage accepts one result, `submitted == finished + live`.
* I2: nothing is dispatched to `compile` or `bench` when `policy_version - version > max_lag`.
* I4: what a worker refuses or loses is tried again, and ends as `worker_lost`, never as a result.
* A worker gets only what its capabilities cover, and what nobody can do holds nothing else up.
* Back-pressure meets new submissions only; the hand-over from stage to stage is never refused.

Example::

    ledger = Ledger()
    ledger.handle(FromProducer(b"p", Submit("t1", "compile")), now=0.0)        # Store, SubmitAck
    hello = Hello("farm-1", "a", ["compile"], slots=1)
    *_, dispatch = ledger.handle(FromWorker(b"w", hello), now=0.1)             # Welcome, Update, Dispatch
    result = Result("t1", dispatch.task.lease_id, next_stage="bench")
    ledger.handle(FromWorker(b"w", result), now=0.2)                           # Append, Ack
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from protocols import events as ev
from protocols import messages as msg
from protocols.leases import Fence, Lease, LiveTask, Worker, WorkerPool, backends_of, lease_id, parse_lease_id
from protocols.limits import COUNTERS, LedgerOptions, StageOptions
from protocols.messages import Stage, Status
from protocols.queues import STAGES, Ended, TaskTable
from protocols.quiet import QuietDesk, Sends
from protocols.standing import standing, unserved

__all__ = ["Ledger", "LedgerOptions", "StageOptions"]

_PLACE = {stage: place for place, stage in enumerate(STAGES)}
_DRAIN_FIRST = tuple(reversed(STAGES))
_AGED_STAGES = frozenset({Stage.COMPILE, Stage.BENCH})
_MAX_PASSED_OVER = 32
"""Tasks that a free worker has refused and that are passed over in one search. A worker that refuses everything
therefore gets nothing more once so many tasks wait for somebody else, which bounds both the search and the harm."""


_FROM_WORKERS = (
    msg.Hello,
    msg.Beat,
    msg.Result,
    msg.Nack,
    msg.Bye,
    msg.QuietRequest,
    msg.QuietDone,
    msg.Paused,
)


class Ledger:
    """See the module's docstring for the states of a task, the invariants and an example."""

    def __init__(self, options: LedgerOptions | None = None, epoch: int = 1) -> None:
        self.options = options or LedgerOptions()
        self.epoch = epoch
        self.policy_version = 0
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.tasks = TaskTable(self.options.finished_limit)
        self.pool = WorkerPool(STAGES)
        self.quiet = QuietDesk(self.options.quiet)
        self._stages = {stage: self.options.stage(stage) for stage in STAGES}
        self._fence = Fence()
        self.unserved: dict[tuple[str, str], float] = {}
        """Stage and need for which there are workers but none that can do it, and since when."""
        self._next_lease = 1
        self._draining = False
        self._now = 0.0
        self._out: list[ev.Action] = []
        self._on: Mapping[type, Callable[..., None]] = {
            ev.FromProducer: self._from_producer,
            ev.FromWorker: self._from_worker,
            ev.Tick: self._tick,
            ev.PeerLost: self._peer_lost,
            ev.PeerFull: self._peer_full,
            ev.StartDrain: self._start_drain,
        }
        self._on_message: Mapping[type, Callable[..., None]] = {
            msg.Submit: self._submit,
            msg.Retire: self._retire,
            msg.Hello: self._hello,
            msg.Beat: self._beat,
            msg.Result: self._result,
            msg.Nack: self._nack,
            msg.Bye: self._bye,
            msg.QuietRequest: self._quiet_message(self.quiet.request),
            msg.QuietDone: self._quiet_message(self.quiet.done),
            msg.Paused: self._quiet_message(self.quiet.paused),
        }

    def restore(self, snapshot: ev.Snapshot, now: float) -> None:
        """Start from what the journal remembers; tasks that somebody may work on wait in grace for one lease."""
        assert not self.tasks.live
        self.tasks.restore(snapshot, now, {stage: options.ttl_s for stage, options in self._stages.items()})
        self.policy_version = snapshot.policy_version
        self.counters |= snapshot.counters
        self.counters["submitted"] = self.counters["finished"] + len(self.tasks.live)

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Everything that follows from the event, in the order in which it is to be done."""
        self._now = now
        self._out = []
        self._on[type(event)](event)
        while not self._draining and self._dispatch():
            pass
        return self._out

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────────

    def _from_producer(self, event: ev.FromProducer) -> None:
        if isinstance(event.message, msg.Submit | msg.Retire):
            self._on_message[type(event.message)](event.route, event.message)

    def _from_worker(self, event: ev.FromWorker) -> None:
        worker = self.pool.by_route.get(event.route)
        if worker is not None:
            worker.last_seen = self._now
            if worker.suspect:
                worker.suspect = False
                self.pool.refresh(worker)
        if isinstance(event.message, _FROM_WORKERS):
            self._on_message[type(event.message)](event.route, event.message)

    def _tick(self, _: ev.Tick) -> None:
        heartbeat_s = self.options.heartbeat_s
        for worker in list(self.pool.by_id.values()):
            silent_s = self._now - worker.last_seen
            if silent_s > self.options.missed_beats * heartbeat_s:
                self._suspect(worker)
            if not worker.leases and silent_s > 60 * heartbeat_s:
                self._remove(worker)
                continue
            self._send(worker, msg.Beat(0, epoch=self.epoch))
        self._expire()
        self._end_unserved()
        self._say(self.quiet.tick(self._now))

    def _expire(self) -> None:
        due = [lease for lease in self._leases() if lease.expires_at <= self._now]
        for lease in sorted(due, key=lambda lease: -lease.task.order):
            self.counters["expired"] += 1
            self._lose(lease)
        for task in sorted(self.tasks.out_of_grace(self._now), key=lambda task: -task.order):
            self.tasks.take_out(task)
            self.tasks.give_back(task)
            self._out.append(ev.Update(task.row()))

    def _end_unserved(self) -> None:
        """Notice what nobody can do, and end what has waited for it too long."""
        lanes = {(stage, needs) for stage, queue in self.tasks.queues.items() for needs in queue.lanes}
        unserved = {key for key in lanes if not self.pool.is_served(*key)}
        self.unserved = {key: self.unserved.get(key, self._now) for key in sorted(unserved)}
        limit_s = self.options.no_worker_s
        for (stage, needs), since in self.unserved.items():
            waiting = self.tasks.queues[stage].lanes[needs].values()
            for task in [task for task in waiting if max(since, task.entered_at) + limit_s <= self._now]:
                self.counters["unserved"] += 1
                self.tasks.take_out(task)
                self._give_up(task, Status.NO_WORKER)

    def _peer_lost(self, event: ev.PeerLost) -> None:
        worker = self.pool.by_route.get(event.route)
        if worker is not None:
            self._remove(worker)

    def _peer_full(self, event: ev.PeerFull) -> None:
        worker = self.pool.by_route.get(event.route)
        if worker is not None:
            self._suspect(worker)

    def _start_drain(self, event: ev.StartDrain) -> None:
        self._draining = True
        self._say(self.quiet.drain(self._now))
        for worker in self.pool.by_id.values():
            self._send(worker, msg.Drain(event.reason))

    # ── producers ─────────────────────────────────────────────────────────────────────────────────────────────

    def _submit(self, route: bytes, submit: msg.Submit) -> None:
        reply: msg.Message
        if self.tasks.knows(submit):
            reply = msg.SubmitAck(submit.task_id, duplicate=True)
        elif self._is_full(submit.stage, submit.needs):
            self.counters["busy"] += 1
            reply = msg.Busy(submit.task_id, self.options.busy_retry_s)
        else:
            self.counters["submitted"] += 1
            self._out.append(ev.Store(self.tasks.add(submit, self._now).row()))
            reply = msg.SubmitAck(submit.task_id)
        self._out.append(ev.ToProducer(route, reply))

    def _is_full(self, stage: str, needs: str) -> bool:
        """A stage that does not exist is always full: the producer checks its name, so this is another version."""
        if self._draining or stage not in self._stages:
            return True
        return self.tasks.queues[stage].waiting(needs) >= self._stages[stage].queue_limit

    def _retire(self, route: bytes, retire: msg.Retire) -> None:
        for task_id in self.tasks.group(retire.group_id):
            task = self.tasks.live.get(task_id)
            if task is not None:
                self._withdraw(task, "group retired")
                self.counters["retired"] += 1
                self.counters["finished"] += 1
            seq = task.seq if task is not None else self.tasks.ended[task_id].seq
            self.tasks.forget(task_id)
            self._out.append(ev.Forget(seq, task_id))
        closed = self.tasks.close(retire.group_id)
        if closed is not None:
            self._out.append(ev.Update(closed[0]))
            self._out.extend(ev.Forget(ended.seq, ended.task_id) for ended in closed[1])
        self._out.append(ev.ToProducer(route, msg.SubmitAck("", group_id=retire.group_id)))

    # ── workers ───────────────────────────────────────────────────────────────────────────────────────────────

    def _hello(self, route: bytes, hello: msg.Hello) -> None:
        if not self._fence.admits(hello.worker_id, hello.incarnation):
            self._out.append(ev.ToWorker(route, msg.Drain(f"fenced: a newer process is {hello.worker_id}")))
            return
        worker = self._introduce(route, hello)
        adopted = [held for held in hello.held if self._readopt(worker, held)]
        for lease in [lease for held, lease in worker.leases.items() if held not in adopted]:
            # A task that went out just now crosses this Hello on its way; if it is lost, its lease runs out.
            if lease.granted_at <= self._now - self.options.heartbeat_s:
                self._revoke(lease, "not held")
                self._requeue(lease.task)
        self._send(worker, self._welcome(worker, adopted))
        if self._draining:
            self._send(worker, msg.Drain("broker drains"))
        if hello.policy_version > self.policy_version:
            self._set_policy(hello.policy_version)
        self._say(self.quiet.hello(hello.worker_id, hello.caps, self._now))

    def _introduce(self, route: bytes, hello: msg.Hello) -> Worker:
        stages = tuple(stage for stage in hello.stages if stage in self._stages)
        known = self.pool.by_id.get(hello.worker_id)
        leases: dict[str, Lease] = {}
        if known is not None and known.incarnation != hello.incarnation:
            self._remove(known, fenced=True)
        elif known is not None:
            leases = known.leases
            self.pool.remove(known)
        other = self.pool.by_route.get(route)
        if other is not None:
            self._remove(other)
        worker = Worker(
            hello.worker_id,
            hello.incarnation,
            route,
            stages,
            hello.slots,
            hello.slots,
            self._now,
            leases=leases,
            backends=backends_of(hello.caps),
        )
        for lease in leases.values():
            lease.worker = worker
        self.pool.add(worker)
        return worker

    def _welcome(self, worker: Worker, adopted: list[str]) -> msg.Welcome:
        lease_s = min((self._stages[stage].ttl_s for stage in worker.stages), default=30.0)
        return msg.Welcome(self.epoch, self.options.heartbeat_s, lease_s, self.policy_version, adopted)

    def _beat(self, route: bytes, beat: msg.Beat) -> None:
        worker = self.pool.by_route.get(route)
        if worker is None or beat.epoch not in (0, self.epoch):
            self._out.append(ev.ToWorker(route, msg.Beat(0)))
            return
        worker.load = beat.load
        worker.credit = beat.credit_total
        for held in beat.leases:
            if not self._readopt(worker, held):
                self.counters["revoked"] += 1
                self._send(worker, msg.Revoke(held, "no longer leased"))
        self.pool.refresh(worker)

    def _readopt(self, worker: Worker, held: str) -> bool:
        """Renew a lease that the worker says it holds, reviving it where its task still waits for somebody."""
        lease = worker.leases.get(held)
        if lease is None:
            task = self._waiting_task_of(held)
            if task is None or len(worker.leases) >= worker.slots:
                return False
            self.tasks.take_out(task)
            lease = self._grant(task, worker, held)
            self._out.append(ev.Update(task.row()))
        lease.expires_at = self._now + self._stages[lease.task.stage].ttl_s
        return True

    def _waiting_task_of(self, held: str) -> LiveTask | None:
        stage, task_id = parse_lease_id(held) or ("", "")
        task = self.tasks.live.get(task_id)
        if task is None or task.stage != stage or task.lease is not None or held in task.fenced:
            return None
        return task

    def _result(self, route: bytes, result: msg.Result) -> None:
        task = self.tasks.live.get(result.task_id)
        refusal = self._refusal(task, result)
        if task is None or refusal:
            self.counters["duplicates"] += refusal == "duplicate"
            ack = msg.Ack(result.task_id, result.lease_id, accepted=False, reason=refusal)
            self._out.append(ev.ToWorker(route, ack))
            return
        self.counters["results"] += 1
        if task.lease is not None and task.lease.lease_id == result.lease_id:
            self.pool.release(task.lease)
        else:
            self._withdraw(task, "superseded")
        self._advance(task, result)
        self._out.append(ev.ToWorker(route, msg.Ack(result.task_id, result.lease_id)))

    def _refusal(self, task: LiveTask | None, result: msg.Result) -> str:
        """Why the result is not needed; empty where it is the first of its stage."""
        if task is None:
            return "duplicate" if result.task_id in self.tasks.ended else "unknown task"
        stage, task_id = parse_lease_id(result.lease_id) or ("", "")
        if task_id != task.task_id or stage not in _PLACE:
            return "invalid lease"
        if stage != task.stage:
            return "duplicate"
        if result.lease_id in task.fenced:
            return "fenced"
        # Forward only: a stage that a task could enter twice could not tell a late result from a new one.
        if result.next_stage and _PLACE.get(result.next_stage, -1) <= _PLACE[stage]:
            return f"stage {result.next_stage} does not come after {stage}"
        return ""

    def _advance(self, task: LiveTask, result: msg.Result) -> None:
        if task.stage == Stage.GENERATE:
            task.version = result.policy_version
        elif task.stage == Stage.TRAIN and result.policy_version > self.policy_version:
            self._set_policy(result.policy_version)
        task.status = Status.OK
        if result.next_stage:
            self.tasks.enter(task, result.next_stage, self._now)
            self._out.append(ev.Append(task.row()))
        else:
            self._finish(task)

    def _finish(self, task: LiveTask) -> None:
        self.counters["finished"] += 1
        forgotten: list[Ended] = self.tasks.end(task)
        self._out.append(ev.Finish(msgspec.structs.replace(task.row(), stage="")))
        self._out.extend(ev.Forget(ended.seq, ended.task_id) for ended in forgotten)

    def _nack(self, route: bytes, nack: msg.Nack) -> None:
        worker = self.pool.by_route.get(route)
        lease = worker.leases.get(nack.lease_id) if worker is not None else None
        if lease is not None:
            self.counters["nacked"] += 1
            lease.task.excluded |= {lease.worker.worker_id}
            self._lose(lease)

    def _bye(self, route: bytes, _: msg.Bye) -> None:
        worker = self.pool.by_route.get(route)
        if worker is None:
            return
        for lease in list(worker.leases.values()):
            self.pool.release(lease)
            self._requeue(lease.task)
        self._remove(worker)

    def _quiet_message(self, handle: Callable[[str, Any, float], Sends]) -> Callable[[bytes, Any], None]:
        def on_message(route: bytes, message: Any) -> None:
            worker = self.pool.by_route.get(route)
            if worker is not None:
                self._say(handle(worker.worker_id, message, self._now))

        return on_message

    # ── the ways of a task and of a worker ────────────────────────────────────────────────────────────────────

    def _dispatch(self) -> bool:
        """Lease what can be leased, late stages first; True where an old task has moved on and needs another look."""
        moved = False
        for stage in _DRAIN_FIRST:
            passed_over: list[LiveTask] = []
            while len(passed_over) < _MAX_PASSED_OVER and (task := self._next_task(stage)) is not None:
                self.tasks.take_out(task)
                if self._is_stale(task):
                    moved = True
                    self.counters["stale"] += 1
                    self._divert(task, Stage.SCORE, Status.STALE)
                elif (worker := self.pool.take(task)) is None:
                    passed_over.append(task)
                else:
                    self._lease(task, worker)
            for task in reversed(passed_over):
                self.tasks.give_back(task)
        return moved

    def _next_task(self, stage: str) -> LiveTask | None:
        """The oldest task among those that some free worker can do."""
        queue = self.tasks.queues[stage]
        return queue.oldest(needs for needs in queue.lanes if self.pool.has_free(stage, needs))

    def _is_stale(self, task: LiveTask) -> bool:
        if task.stage not in _AGED_STAGES or task.max_lag < 0 or task.version < 0:
            return False
        return self.policy_version - task.version > task.max_lag

    def _lease(self, task: LiveTask, worker: Worker) -> None:
        held = lease_id(self.epoch, self._next_lease, task.stage, task.task_id)
        self._next_lease += 1
        self._grant(task, worker, held)
        self.counters["dispatched"] += 1
        header = msg.Task(
            task.task_id,
            held,
            task.stage,
            task.losses + 1,
            self._stages[task.stage].ttl_s,
            self.policy_version,
            task.status,
            task.group_id,
        )
        self._out.append(ev.Update(task.row()))
        self._out.append(ev.Dispatch(worker.route, header))

    def _grant(self, task: LiveTask, worker: Worker, held: str) -> Lease:
        assert task.lease is None
        lease = Lease(held, task, worker, self._now, self._now + self._stages[task.stage].ttl_s)
        task.lease = lease
        self.pool.hold(worker, lease)
        return lease

    def _divert(self, task: LiveTask, stage: str, status: str) -> None:
        task.status = status
        self.tasks.enter(task, stage, self._now)
        self._out.append(ev.Update(task.row()))

    def _lose(self, lease: Lease) -> None:
        """The work under a lease is lost: try again in front of the queue, or give up after too many losses."""
        task = lease.task
        self.pool.release(lease)
        task.losses += 1
        self.counters["lost"] += 1
        limit = self._stages[task.stage].max_losses
        if limit is not None and task.losses >= limit:
            self.counters["poisoned"] += 1
            self._give_up(task, Status.WORKER_LOST)
        else:
            self._requeue(task)

    def _give_up(self, task: LiveTask, status: str) -> None:
        self._divert(task, Stage.TRAINED if task.stage == Stage.TRAIN else Stage.SCORE, status)

    def _requeue(self, task: LiveTask) -> None:
        self.tasks.give_back(task)
        self._out.append(ev.Update(task.row()))

    def _withdraw(self, task: LiveTask, reason: str) -> None:
        """Take the task from wherever it is; whoever works on it is told to stop."""
        if task.lease is not None:
            self._revoke(task.lease, reason)
        self.tasks.take_out(task)

    def _revoke(self, lease: Lease, reason: str) -> None:
        self.counters["revoked"] += 1
        self._send(lease.worker, msg.Revoke(lease.lease_id, reason))
        self.pool.release(lease)

    def _remove(self, worker: Worker, *, fenced: bool = False) -> None:
        """The worker is gone: its leases are lost, and where it was replaced their results are refused for good."""
        self.pool.remove(worker)
        self._say(self.quiet.gone(worker.worker_id, self._now))
        for lease in sorted(worker.leases.values(), key=lambda lease: -lease.task.order):
            self._lose(lease)
            if fenced:
                lease.task.fenced |= {lease.lease_id}

    def _suspect(self, worker: Worker) -> None:
        worker.suspect = True
        self.pool.refresh(worker)

    def _set_policy(self, version: int) -> None:
        self.policy_version = version
        self._out.append(ev.SetPolicy(version))

    def _send(self, worker: Worker, message: msg.Message) -> None:
        self._out.append(ev.ToWorker(worker.route, message))

    def _say(self, sends: Sends) -> None:
        for worker_id, message in sends:
            worker = self.pool.by_id.get(worker_id)
            if worker is not None:
                self._send(worker, message)

    def _leases(self) -> list[Lease]:
        return [lease for worker in self.pool.by_id.values() for lease in worker.leases.values()]

    # ── what it knows of itself ───────────────────────────────────────────────────────────────────────────────

    def stats(self, now: float) -> dict[str, object]:
        """Depths, ages, counters and workers, as written to `metrics/system.jsonl`."""
        return {
            "policy_version": self.policy_version,
            **standing(self.tasks, self.pool, now),
            "counters": {**self.counters, "live": len(self.tasks.live)},
            "unserved": unserved(self.unserved, self.tasks, now),
            "quiet": self.quiet.stats(now),
        }
