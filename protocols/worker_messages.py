"""The ledger's part for workers: what each of their messages means. Pure.

Invariants
* A message counts only where it comes from whoever introduced the worker: its route's owner.
* A result is taken once per stage, from a lease that was granted to its sender and was not fenced since.
* What a worker says it holds is believed only while its task still waits for somebody.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import Any

from protocols import events as ev
from protocols import messages as msg
from protocols.leases import Fence, Lease, LiveTask, PoolWorker, backends_of, parse_lease_id, unseal_lease
from protocols.messages import HARDWARE, Stage
from protocols.moves import Moves
from protocols.queues import STAGES
from protocols.quiet import Sends
from protocols.second_opinions import QUARANTINED, SecondOpinions

_PLACE = {stage: place for place, stage in enumerate(STAGES)}


class WorkerMessages:
    """See the module's docstring."""

    def __init__(self, moves: Moves, opinions: SecondOpinions) -> None:
        self._moves, self._opinions = moves, opinions
        self._counters, self._tasks, self._pool = moves.counters, moves.tasks, moves.pool
        self._quiet, self._checks = moves.quiet, moves.checks
        self._fence = Fence()
        self._owner = ""
        """Of the event's sender."""
        self._on: Mapping[type, Callable[[bytes, Any], None]] = {
            msg.Hello: self._hello,
            msg.Beat: self._beat,
            msg.Result: self._result,
            msg.Nack: self._nack,
            msg.Bye: self._bye,
            msg.QuietRequest: self._quiet_message(self._quiet.request),
            msg.QuietDone: self._quiet_message(self._quiet.done),
            msg.Paused: self._quiet_message(self._quiet.paused),
        }

    def handle(self, event: ev.FromWorker) -> None:
        worker = self._pool.by_route.get(event.route)
        if worker is not None and worker.owner != event.owner:
            return
        self._owner = event.owner
        if worker is not None:
            worker.last_seen = self._moves.now
            if worker.suspect:
                worker.suspect = False
                self._pool.refresh(worker)
        on_message = self._on.get(type(event.message))
        if on_message is not None:
            on_message(event.route, event.message)

    # ── who is there, and what it holds ─────────────────────────────────────────────────────────────────────────────

    def _hello(self, route: bytes, hello: msg.Hello) -> None:
        if not self._fence.admits(hello.worker_id, hello.incarnation):
            self._moves.out.append(ev.ToWorker(route, msg.Drain(f"fenced: a newer process is {hello.worker_id}")))
            return
        if (self._owner or hello.worker_id) in self._checks.quarantined:
            self._moves.out.append(ev.ToWorker(route, msg.Drain(QUARANTINED)))
            return
        worker = self._introduce(route, hello)
        adopted = [held for held in hello.held if self._readopt(worker, held)]
        for lease in [lease for held, lease in worker.leases.items() if held not in adopted]:
            # A task that went out just now crosses this Hello on its way; if it is lost, its lease runs out.
            if lease.granted_at <= self._moves.now - self._moves.options.heartbeat_s:
                self._moves.revoke(lease, "not held")
                self._moves.requeue(lease.task)
        self._moves.send(worker, self._welcome(worker, adopted))
        if self._moves.draining:
            self._moves.send(worker, msg.Drain("broker drains"))
        if hello.policy_version > self._moves.policy_version:
            self._moves.set_policy(hello.policy_version)
        self._moves.say(self._quiet.hello(hello.worker_id, hello.caps, self._moves.now))

    def _introduce(self, route: bytes, hello: msg.Hello) -> PoolWorker:
        stages = tuple(stage for stage in hello.stages if stage in self._moves.stages)
        known = self._pool.by_id.get(hello.worker_id)
        leases: dict[str, Lease] = {}
        if known is not None and known.incarnation != hello.incarnation:
            self._moves.remove(known, fenced=True)
        elif known is not None:
            leases = known.leases
            self._pool.remove(known)
        other = self._pool.by_route.get(route)
        if other is not None:
            self._moves.remove(other)
        worker = PoolWorker(
            hello.worker_id,
            hello.incarnation,
            route,
            stages,
            hello.slots,
            hello.slots if hello.credit < 0 else hello.credit,
            self._moves.now,
            leases=leases,
            backends=backends_of(hello.caps),
            owner=self._owner,
            hardware=hello.caps.get(HARDWARE, ""),
        )
        for lease in leases.values():
            lease.worker = worker
        self._pool.add(worker)
        return worker

    def _welcome(self, worker: PoolWorker, adopted: list[str]) -> msg.Welcome:
        moves = self._moves
        lease_s = min((moves.stages[stage].ttl_s for stage in worker.stages), default=30.0)
        options = moves.options
        return msg.Welcome(moves.epoch, options.heartbeat_s, lease_s, moves.policy_version, adopted, options.settings)

    def _beat(self, route: bytes, beat: msg.Beat) -> None:
        worker = self._pool.by_route.get(route)
        if worker is None or beat.epoch not in (0, self._moves.epoch):
            self._moves.out.append(ev.ToWorker(route, msg.Beat(0)))
            return
        worker.load = beat.load
        worker.credit = beat.credit_total
        for held in beat.leases:
            if not self._readopt(worker, held):
                self._counters["revoked"] += 1
                self._moves.send(worker, msg.Revoke(held, "no longer leased"))
        self._pool.refresh(worker)

    def _readopt(self, worker: PoolWorker, held: str) -> bool:
        """Renew a lease that the worker says it holds, reviving it where its task still waits for somebody."""
        lease = worker.leases.get(held)
        if lease is None:
            task = self._waiting_task_of(held)
            if task is None or not self._is_sealed(held) or len(worker.leases) >= worker.slots:
                return False
            self._tasks.take_out(task)
            lease = self._moves.grant(task, worker, held)
            self._moves.out.append(ev.Update(task.row()))
        lease.expires_at = self._moves.now + self._moves.stages[lease.task.stage].ttl_s
        return True

    def _waiting_task_of(self, held: str) -> LiveTask | None:
        stage, task_id = parse_lease_id(held) or ("", "")
        task = self._tasks.live.get(task_id)
        if task is None or task.stage != stage or task.lease is not None or held in task.fenced:
            return None
        return task

    # ── what has become of its work ─────────────────────────────────────────────────────────────────────────────────

    def _result(self, route: bytes, result: msg.Result) -> None:
        task = self._tasks.live.get(result.task_id)
        refusal = self._refusal(route, task, result)
        if task is None or refusal:
            self._counters["duplicates"] += refusal == "duplicate"
            ack = msg.Ack(result.task_id, result.lease_id, accepted=False, reason=refusal)
            self._moves.out.append(ev.ToWorker(route, ack))
            return
        self._counters["results"] += 1
        if task.lease is not None and task.lease.lease_id == result.lease_id:
            self._pool.release(task.lease)
        else:
            self._moves.withdraw(task, "superseded")
        if task.stage == Stage.BENCH:
            self._moves.timed(task, self._pool.by_route.get(route))
        if not self._opinions.is_checked(task, result, self._principal(route)):
            self._moves.advance(task, result)
        self._moves.out.append(ev.ToWorker(route, msg.Ack(result.task_id, result.lease_id)))

    def _refusal(self, route: bytes, task: LiveTask | None, result: msg.Result) -> str:
        """Why the result is not needed; empty where it is the first of its stage."""
        if task is None:
            return "duplicate" if result.task_id in self._tasks.ended else "unknown task"
        stage, task_id = parse_lease_id(result.lease_id) or ("", "")
        if task_id != task.task_id or stage not in _PLACE:
            return "invalid lease"
        if stage != task.stage:
            return "duplicate"
        if result.lease_id in task.fenced:
            return "fenced"
        if not self._is_sealed(result.lease_id):
            return "not your lease"
        principal = self._principal(route)
        if principal in self._checks.quarantined:
            return QUARANTINED
        if principal in task.barred:
            return "duplicate"
        worker = self._pool.by_route.get(route)
        if stage == Stage.BENCH and worker is not None and task.hardware not in ("", worker.hardware):
            return "its group is timed on other hardware"
        # Forward only: a stage that a task could enter twice could not tell a late result from a new one.
        if result.next_stage and _PLACE.get(result.next_stage, -1) <= _PLACE[stage]:
            return f"stage {result.next_stage} does not come after {stage}"
        return ""

    def _is_sealed(self, held: str) -> bool:
        """Was this lease granted to the event's sender? Processes of this host are believed."""
        if self._moves.seal is None or not self._owner:
            return True
        plain, tag = unseal_lease(held)
        return hmac.compare_digest(tag.encode(), self._moves.seal.tag(self._owner, plain).encode())

    def _principal(self, route: bytes) -> str:
        worker = self._pool.by_route.get(route)
        return self._owner or (worker.worker_id if worker is not None else "")

    def _nack(self, route: bytes, nack: msg.Nack) -> None:
        worker = self._pool.by_route.get(route)
        lease = worker.leases.get(nack.lease_id) if worker is not None else None
        if lease is not None:
            self._counters["nacked"] += 1
            lease.task.excluded |= {lease.worker.worker_id}
            self._moves.lose(lease)

    def _bye(self, route: bytes, _: msg.Bye) -> None:
        worker = self._pool.by_route.get(route)
        if worker is None:
            return
        for lease in list(worker.leases.values()):
            self._pool.release(lease)
            self._moves.requeue(lease.task)
        self._moves.remove(worker)

    # ── quiet windows ───────────────────────────────────────────────────────────────────────────────────────────────

    def _quiet_message(self, handle: Callable[[str, Any, float], Sends]) -> Callable[[bytes, Any], None]:
        def on_message(route: bytes, message: Any) -> None:
            worker = self._pool.by_route.get(route)
            if worker is not None:
                self._moves.say(handle(worker.worker_id, message, self._moves.now))

        return on_message
