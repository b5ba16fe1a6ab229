"""The other ends of the wire as pure state machines: what a worker and a producer do with messages, silence and time.

A worker's connection::

            Welcome                      Beat from the broker
    silent ─────────▶ welcomed ─────────────────────────────▶ welcomed
      ▲  │ Hello, back-off .25 → 8 s          │
      └──┴── three silent heartbeats, another epoch, "I don't know you" ◀┘

Both machines are driven by `handle` (a message came), `tick` (time has passed) and calls of their owner, and answer
with effects. Nothing here sleeps, sends or reads a clock.

Invariants
* A result leaves the outbox only when its `Ack` has come; it is sent again after every Welcome and when an Ack is late.
* A lease is in exactly one place: running, outbox, or forgotten.
* A submission is pending until the broker has journaled it; `Busy` and silence only delay it.
"""

from __future__ import annotations

import random

import msgspec

from protocols import messages as msg

FIRST_BACKOFF_S = 0.25
LAST_BACKOFF_S = 8.0


class Emit(msgspec.Struct, frozen=True):
    """Send this to the broker."""

    message: msg.Message
    payload: list[bytes] = msgspec.field(default_factory=list)


class Start(msgspec.Struct, frozen=True):
    """Work on this task."""

    task: msg.Task
    payload: list[bytes]


class Abandon(msgspec.Struct, frozen=True):
    """Stop working on this lease; its result is not wanted any more."""

    lease_id: str
    reason: str


class Drained(msgspec.Struct, frozen=True):
    """The broker asks to finish what runs and to leave."""

    reason: str


class Submitted(msgspec.Struct, frozen=True):
    """The broker has journaled this submission."""

    task_id: str
    duplicate: bool


class Retired(msgspec.Struct, frozen=True):
    group_id: str


Effect = Emit | Start | Abandon | Drained
ProducerEffect = Emit | Submitted | Retired


class Backoff:
    """Waits that double from `FIRST_BACKOFF_S` to `LAST_BACKOFF_S`, each drawn from its upper half."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._wait_s = FIRST_BACKOFF_S

    def next_s(self) -> float:
        wait_s = self._wait_s * self._rng.uniform(0.5, 1.0)
        self._wait_s = min(self._wait_s * 2, LAST_BACKOFF_S)
        return wait_s

    def reset(self) -> None:
        self._wait_s = FIRST_BACKOFF_S


class _Unacked(msgspec.Struct):
    result: msg.Result
    payload: list[bytes]
    resend_at: float


class WorkerSession:
    """The worker's side of the protocol; see the module's docstring.

    Example::

        session = WorkerSession("bench-0", "a1b2", ["bench"], slots=2, rng=random.Random(0))
        session.tick(now=0.0)                                   # [Emit(Hello)]
        session.handle(Welcome(1, 1.0, 30.0, 0), [], now=0.1)   # []
        session.handle(task, frames, now=0.2)                   # [Start(task)]
        session.finish(Result(...), [report], now=0.9)          # [Emit(Result)], again until its Ack
    """

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        stages: list[str],
        slots: int,
        rng: random.Random,
        caps: dict[str, str] | None = None,
        policy_version: int = -1,
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.stages = stages
        self.slots = slots
        self.caps = caps or {}
        self.policy_version = policy_version
        """The learner keeps it current; it is told with each Hello."""
        self.credit = slots
        """Leases wanted for now, at most `slots`; told with each beat."""
        self.running: dict[str, msg.Task] = {}
        self.draining = False
        self.epoch = 0
        """Epoch of the last Welcome; 0 while not welcomed."""
        self.heartbeat_s = 1.0
        self.welcome: msg.Welcome | None = None
        self._outbox: dict[str, _Unacked] = {}
        self._backoff = Backoff(rng)
        self._hello_at = 0.0
        self._beat_at = 0.0
        self._last_heard = 0.0
        self._asked: frozenset[str] = frozenset()
        """What the last Hello said is held: a task that came since is not in its Welcome."""

    @property
    def held(self) -> list[str]:
        return [*self.running, *self._outbox]

    @property
    def unacked(self) -> int:
        return len(self._outbox)

    def tick(self, now: float, load: msg.Load | None = None, *, alive: bool = True) -> list[Effect]:
        """What is due by now; call it several times a heartbeat. `alive=False` withholds beats: the work is wedged."""
        if self.epoch and now - self._last_heard > 3 * self.heartbeat_s:
            self._lose_connection(now)
        if not self.epoch:
            return [self._say_hello(now)] if now >= self._hello_at else []
        out: list[Effect] = []
        if now >= self._beat_at and alive:
            self._beat_at = now + self.heartbeat_s
            out.append(Emit(self._beat(load)))
        late = [unacked for unacked in self._outbox.values() if now >= unacked.resend_at]
        return [*out, *(self._send_result(unacked, now) for unacked in late)]

    def beat_due(self, now: float) -> bool:
        return bool(self.epoch) and now >= self._beat_at

    def _beat(self, load: msg.Load | None) -> msg.Beat:
        credit = 0 if self.draining else min(self.credit, self.slots)
        return msg.Beat(credit, self.held, load or msg.Load(), self.epoch)

    def _lose_connection(self, now: float) -> None:
        self.epoch = 0
        self._hello_at = now
        self._backoff.reset()

    def _say_hello(self, now: float) -> Emit:
        self._hello_at = now + self._backoff.next_s()
        self._asked = frozenset(self.held)
        hello = msg.Hello(
            self.worker_id,
            self.incarnation,
            self.stages,
            self.slots,
            self.held,
            self.caps,
            self.policy_version,
            min(self.credit, self.slots),
        )
        return Emit(hello)

    def handle(self, message: msg.Message, payload: list[bytes], now: float) -> list[Effect]:
        self._last_heard = now
        match message:
            case msg.Welcome():
                return self._welcomed(message, now)
            case msg.Beat():
                return self._heard_beat(message, now)
            case msg.Task():
                return self._take(message, payload)
            case msg.Ack():
                self._outbox.pop(message.lease_id, None)
                return []
            case msg.Revoke():
                return self._drop(message.lease_id, message.reason)
            case msg.Drain():
                return [*self.drain(), Drained(message.reason)]
            case _:
                return []

    def _welcomed(self, welcome: msg.Welcome, now: float) -> list[Effect]:
        self.welcome = welcome
        self.epoch = welcome.epoch
        self.heartbeat_s = welcome.heartbeat_s
        self._beat_at = now
        self._backoff.reset()
        abandoned = [lease for lease in self.running if lease in self._asked and lease not in welcome.adopted]
        out: list[Effect] = []
        for lease in abandoned:
            out += self._drop(lease, "not adopted")
        return [*out, *(self._send_result(unacked, now) for unacked in self._outbox.values())]

    def _heard_beat(self, beat: msg.Beat, now: float) -> list[Effect]:
        if not self.epoch or beat.epoch == self.epoch:
            return []
        self._lose_connection(now)
        return self.tick(now)

    def _take(self, task: msg.Task, payload: list[bytes]) -> list[Effect]:
        # While draining, a task that was on its way is left alone: Bye gives it back without a loss.
        if self.draining or task.lease_id in self.running or task.lease_id in self._outbox:
            return []
        self.running[task.lease_id] = task
        return [Start(task, payload)]

    def _drop(self, lease_id: str, reason: str) -> list[Effect]:
        if self.running.pop(lease_id, None) is None:
            return []
        return [Abandon(lease_id, reason)]

    def finish(self, result: msg.Result, payload: list[bytes], now: float) -> list[Effect]:
        """The work under a lease is done; a lease that was revoked meanwhile is ignored."""
        if self.running.pop(result.lease_id, None) is None:
            return []
        unacked = self._outbox[result.lease_id] = _Unacked(result, payload, now)
        return [self._send_result(unacked, now)] if self.epoch else []

    def _send_result(self, unacked: _Unacked, now: float) -> Emit:
        unacked.resend_at = now + 3 * self.heartbeat_s
        return Emit(unacked.result, unacked.payload)

    def refuse(self, lease_id: str, reason: str) -> list[Effect]:
        """The work could not be done for a reason of ours (I4)."""
        if self.running.pop(lease_id, None) is None:
            return []
        return [Emit(msg.Nack(lease_id, reason[:500]))]

    def drain(self) -> list[Effect]:
        """Take nothing more; the broker is told at once."""
        if self.draining:
            return []
        self.draining = True
        return [Emit(self._beat(None))] if self.epoch else []

    def bye(self, reason: str = "") -> list[Effect]:
        """Leave; what still runs or waits for its Ack is given back."""
        self.running.clear()
        return [Emit(msg.Bye(reason))]


class _Pending(msgspec.Struct):
    message: msg.Submit | msg.Retire
    payload: list[bytes]
    resend_at: float
    backoff: Backoff


class ProducerSession:
    """The producer's side: submissions and retirements that are repeated until the broker has journaled them."""

    def __init__(self, rng: random.Random, silence_s: float = 1.0) -> None:
        self._rng = rng
        self._silence_s = silence_s
        """How long an answer may take before the back-off starts."""
        self._submits: dict[str, _Pending] = {}
        self._retires: dict[str, _Pending] = {}

    @property
    def pending(self) -> int:
        return len(self._submits) + len(self._retires)

    def submit(self, submit: msg.Submit, payload: list[bytes], now: float) -> list[ProducerEffect]:
        pending = self._submits[submit.task_id] = self._new(submit, payload)
        return [self._send(pending, now)]

    def retire(self, group_id: str, now: float) -> list[ProducerEffect]:
        """End a group; submissions of it that still wait count as done, or a late repetition would revive them."""
        mine = [key for key, pending in self._submits.items() if _group(pending) == group_id]
        done: list[ProducerEffect] = [Submitted(task_id, duplicate=False) for task_id in mine]
        for task_id in mine:
            del self._submits[task_id]
        pending = self._retires[group_id] = self._new(msg.Retire(group_id), [])
        return [*done, self._send(pending, now)]

    def cancel(self, task_id: str) -> None:
        """Repeat the submission no longer; it may have arrived all the same."""
        self._submits.pop(task_id, None)

    def handle(self, message: msg.Message, now: float) -> list[ProducerEffect]:
        match message:
            case msg.SubmitAck(task_id="", group_id=group_id):
                return [Retired(group_id)] if self._retires.pop(group_id, None) else []
            case msg.SubmitAck():
                known = self._submits.pop(message.task_id, None)
                return [Submitted(message.task_id, message.duplicate)] if known else []
            case msg.Busy() if message.task_id in self._submits:
                pending = self._submits[message.task_id]
                pending.backoff.reset()
                pending.resend_at = now + message.retry_s * self._rng.uniform(1.0, 1.5)
        return []

    def tick(self, now: float) -> list[ProducerEffect]:
        """Send again what has waited too long for its answer."""
        waiting = (*self._submits.values(), *self._retires.values())
        return [self._send(pending, now) for pending in waiting if now >= pending.resend_at]

    def _new(self, message: msg.Submit | msg.Retire, payload: list[bytes]) -> _Pending:
        return _Pending(message, payload, 0.0, Backoff(self._rng))

    def _send(self, pending: _Pending, now: float) -> Emit:
        pending.resend_at = now + self._silence_s + pending.backoff.next_s()
        return Emit(pending.message, pending.payload)


def _group(pending: _Pending) -> str:
    return pending.message.group_id
