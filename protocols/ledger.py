"""The broker's brain as a pure state machine: `Ledger.handle(event, now) -> [action]`, no socket, clock or file.

The parts, which share the state that `Moves` holds::

    event ─▶ Ledger: producers, time ─▶ WorkerMessages ─▶ SecondOpinions
                       └───────────────────────┴──────────────────┴─▶ Moves: what can become of a task and of a worker

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
* I2: nothing is dispatched to `compile` or `bench` when `policy_version - version > max_staleness`.
* I4: what a worker refuses or loses is tried again, and ends as `worker_lost`, never as a result.
* A worker gets only what its capabilities cover, and what nobody can do holds nothing else up.
* A lease of a keyed worker carries a seal of its owner: nobody else can hold, finish or refuse it, restarts included.
* The results of a group come from one kind of hardware (`queues.HardwarePins`).
* Where second opinions are asked for (`checking`), a farm's or a bench's result waits, in no queue and under no lease,
  until somebody else's agrees; a restart has it done again.
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

import random
from collections.abc import Callable, Mapping

from protocols import events as ev
from protocols import messages as msg
from protocols.auth import Seal
from protocols.leases import ON, Lease, LiveTask
from protocols.limits import LedgerOptions, StageOptions
from protocols.messages import Status
from protocols.moves import Moves
from protocols.second_opinions import SecondOpinions
from protocols.standing import stages, standing, unserved, workers
from protocols.worker_messages import WorkerMessages

__all__ = ["Ledger", "LedgerOptions", "StageOptions"]


class Ledger:
    """See the module's docstring for the states of a task, the invariants and an example."""

    def __init__(
        self,
        options: LedgerOptions | None = None,
        epoch: int = 1,
        seal: Seal | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.options = options or LedgerOptions()
        self.epoch = epoch
        self._moves = Moves(self.options, epoch, seal, rng or random.Random())
        self._opinions = SecondOpinions(self._moves)
        self._workers = WorkerMessages(self._moves, self._opinions)
        self.counters, self.tasks, self.pool = self._moves.counters, self._moves.tasks, self._moves.pool
        self.quiet, self.checks = self._moves.quiet, self._moves.checks
        self.unserved: dict[tuple[str, str], float] = {}
        """Stage and need for which there are workers but none that can do it, and since when."""
        self._on: Mapping[type, Callable[..., None]] = {
            ev.FromProducer: self._from_producer,
            ev.FromWorker: self._workers.handle,
            ev.Tick: self._tick,
            ev.QuietDue: self._quiet_due,
            ev.PeerLost: self._peer_lost,
            ev.PeerFull: self._peer_full,
            ev.StartDrain: self._start_drain,
            ev.Compared: self._opinions.compared,
        }

    @property
    def policy_version(self) -> int:
        return self._moves.policy_version

    def restore(self, snapshot: ev.Snapshot, now: float) -> None:
        """Start from what the journal remembers; tasks that somebody may work on wait in grace for who holds them."""
        assert not self.tasks.live
        most_s = self.options.reconnect_s
        grace_s = {stage: min(options.ttl_s, most_s) for stage, options in self._moves.stages.items()}
        self.tasks.restore(snapshot, now, grace_s)
        self._moves.policy_version = snapshot.policy_version
        self.counters |= snapshot.counters
        self.counters["submitted"] = self.counters["finished"] + len(self.tasks.live)

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Everything that follows from the event, in the order in which it is to be done."""
        self._moves.begin(now)
        self._on[type(event)](event)
        while not self._moves.draining and self._moves.dispatch():
            pass
        return self._moves.out

    # ── producers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _from_producer(self, event: ev.FromProducer) -> None:
        if isinstance(event.message, msg.Submit):
            self._submit(event.route, event.message)
        elif isinstance(event.message, msg.Retire):
            self._retire(event.route, event.message)

    def _submit(self, route: bytes, submit: msg.Submit) -> None:
        reply: msg.Message
        if self.tasks.knows(submit):
            reply = msg.SubmitAck(submit.task_id, duplicate=True)
        elif self._is_full(submit.stage, submit.needs):
            self.counters["busy"] += 1
            reply = msg.Busy(submit.task_id, self.options.busy_retry_s)
        else:
            self.counters["submitted"] += 1
            self._moves.out.append(ev.Store(self.tasks.add(submit, self._moves.now).row()))
            reply = msg.SubmitAck(submit.task_id)
        self._moves.out.append(ev.ToProducer(route, reply))

    def _is_full(self, stage: str, needs: str) -> bool:
        """A stage that does not exist is always full: the producer checks its name, so this is another version."""
        if self._moves.draining or stage not in self._moves.stages:
            return True
        return self.tasks.queues[stage].waiting(needs) >= self._moves.stages[stage].queue_limit

    def _retire(self, route: bytes, retire: msg.Retire) -> None:
        for task_id in self.tasks.group(retire.group_id):
            task = self.tasks.live.get(task_id)
            if task is not None:
                self._moves.withdraw(task, "group retired")
                self.counters["retired"] += 1
                self.counters["finished"] += 1
            seq = task.seq if task is not None else self.tasks.ended[task_id].seq
            self.tasks.forget(task_id)
            self.checks.forget(task_id)
            self._moves.out.append(ev.Forget(seq, task_id))
        self.tasks.pins.drop(retire.group_id)
        closed = self.tasks.close(retire.group_id)
        if closed is not None:
            self._moves.out.append(ev.Update(closed[0]))
            self._moves.out.extend(ev.Forget(ended.seq, ended.task_id) for ended in closed[1])
        self._moves.out.append(ev.ToProducer(route, msg.SubmitAck("", group_id=retire.group_id)))

    # ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tick(self, _: ev.Tick) -> None:
        heartbeat_s = self.options.heartbeat_s
        for worker in list(self.pool.by_id.values()):
            silent_s = self._moves.now - worker.last_seen
            if silent_s > self.options.missed_beats * heartbeat_s:
                self._moves.suspect(worker)
            if not worker.leases and silent_s > 60 * heartbeat_s:
                self._moves.remove(worker)
                continue
            self._moves.send(worker, msg.Beat(0, epoch=self.epoch))
        self._expire()
        self._opinions.look_after()
        self._end_unserved()
        self._moves.say(self.quiet.tick(self._moves.now))

    def _quiet_due(self, _: ev.QuietDue) -> None:
        self._moves.say(self.quiet.tick(self._moves.now))

    def _expire(self) -> None:
        due = [lease for lease in self._leases() if lease.expires_at <= self._moves.now]
        for lease in sorted(due, key=lambda lease: -lease.task.order):
            self.counters["expired"] += 1
            self._moves.lose(lease)
        for task in sorted(self.tasks.out_of_grace(self._moves.now), key=lambda task: -task.order):
            self.tasks.take_out(task)
            self.tasks.give_back(task)
            self._moves.out.append(ev.Update(task.row()))

    def _leases(self) -> list[Lease]:
        return [lease for worker in self.pool.by_id.values() for lease in worker.leases.values()]

    def _end_unserved(self) -> None:
        """Notice what nobody can do, and end what has waited for it too long."""
        lanes = {(stage, needs) for stage, queue in self.tasks.queues.items() for needs in queue.lanes}
        unserved = {key for key in lanes if not self.pool.is_served(*key)}
        self.unserved = {key: self.unserved.get(key, self._moves.now) for key in sorted(unserved)}
        limit_s = self.options.no_worker_s
        for (stage, needs), since in self.unserved.items():
            waiting = self.tasks.queues[stage].lanes[needs].values()
            if ON in needs:
                self._end_unpinnable(list(waiting), since)
                continue
            for task in [task for task in waiting if max(since, task.entered_at) + limit_s <= self._moves.now]:
                self.counters["unserved"] += 1
                self.tasks.take_out(task)
                self._moves.give_up(task, Status.NO_WORKER)

    def _end_unpinnable(self, waiting: list[LiveTask], since: float) -> None:
        """No bench of their hardware is left: groups without a timing start anew on what there is, others end here."""
        limit_s = self.options.hardware_wait_s
        for task in [task for task in waiting if max(since, task.entered_at) + limit_s <= self._moves.now]:
            if not task.hardware:
                continue
            if self.tasks.pins.of(task.group_id) != task.hardware or self.tasks.pins.lift(task.group_id):
                self.tasks.repin(task.group_id, self.tasks.pins.of(task.group_id))
                continue
            self.counters["unserved"] += 1
            self.tasks.take_out(task)
            self._moves.give_up(task, Status.NO_WORKER)

    # ── connections, and the end ────────────────────────────────────────────────────────────────────────────────────

    def _peer_lost(self, event: ev.PeerLost) -> None:
        worker = self.pool.by_route.get(event.route)
        if worker is not None:
            self._moves.remove(worker)

    def _peer_full(self, event: ev.PeerFull) -> None:
        worker = self.pool.by_route.get(event.route)
        if worker is not None:
            self._moves.suspect(worker)

    def _start_drain(self, event: ev.StartDrain) -> None:
        self._moves.draining = True
        self._moves.say(self.quiet.drain(self._moves.now))
        for worker in self.pool.by_id.values():
            self._moves.send(worker, msg.Drain(event.reason))

    # ── what it knows of itself ─────────────────────────────────────────────────────────────────────────────────────

    def stats(self, now: float) -> dict[str, object]:
        """Depths, ages, counters and workers, as written to `metrics/system.jsonl`."""
        return {
            "policy_version": self._moves.policy_version,
            **standing(self.tasks, self.pool, now),
            "counters": {**self.counters, "live": len(self.tasks.live)},
            "unserved": unserved(self.unserved, self.tasks, now),
            "quiet": self.quiet.stats(now),
            "checks": {**self.checks.counters, "open": len(self.checks.cases), "strikes": self.checks.strikes},
        }

    def status(self, now: float) -> msg.StatusReport:
        """The same for a viewer. Like `stats` it reads only."""
        return msg.StatusReport(
            epoch=self.epoch,
            policy_version=self._moves.policy_version,
            draining=self._moves.draining,
            stages=stages(self.tasks, self.pool, self._moves.policy_version, now),
            workers=workers(self.pool, now),
            counters={**self.counters, "live": len(self.tasks.live)},
        )
