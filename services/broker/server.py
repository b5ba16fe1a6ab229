"""The broker's shell: sockets in, ledger, journal, sockets out; one turn of the loop is one commit.

    submit ROUTER ─┐                                                      ┌─▶ replies to producers
                   ├─ drain ─▶ decode ─▶ Ledger.handle ─▶ Journal.commit ─┤
    work ROUTER ───┘                                                      └─▶ tasks, Acks … to workers
    keyed sockets: every message passes the Gate first (see `gate`)
    status ROUTER ── StatusDesk ─▶ reports to viewers, who can change nothing (see `status`)

Invariants
* Nothing leaves before the commit of the turn that caused it, so a peer never knows more than the journal.
* Whatever a peer sends, the broker goes on: frames that are no message are counted and dropped.
* An error of the journal or a bug ends the process with nothing half done; its nanny starts it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import SystemRandom

import msgspec
import structlog
import zmq

from kbrl_async.errors import AddressTaken, UserError
from protocols import events as ev
from protocols import framing
from protocols import messages as msg
from protocols.ledger import Ledger
from protocols.messages import Load, StatusReport
from protocols.sockets import VIEWERS_DOMAIN, ZAP_DOMAIN, AddressError, BoundRouter, Socket
from services.broker.artifact_exchange import ArtifactExchange
from services.broker.awake import AwakeClock
from services.broker.gate import Gate
from services.broker.journal import Journal
from services.broker.metrics import MetricsFile
from services.broker.opinions import Opinions
from services.broker.options import BrokerOptions
from services.broker.status import RecentRates, StatusDesk, Troubles
from services.runtime.channel import drain, readable, send_frames
from services.runtime.meters import LoadMeter
from services.runtime.pulse import serving

LONGEST_TURN = 2.0
"""In heartbeats. A turn comes with each of them; what is longer counts as so much, before anybody has missed three."""
log = structlog.get_logger()


class BrokerServer:
    """`await Broker(options).run(stop)` serves until `stop` is set; raises `HostError`s of its address and journal."""

    def __init__(self, options: BrokerOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options
        self._clock = clock
        self.awake = AwakeClock(clock, LONGEST_TURN * options.ledger.heartbeat_s)
        """The ledger's time."""
        self._turned_at = self.awake()
        self._events: list[ev.Event] = [ev.Tick()]
        self.malformed = 0
        """Messages that were none and have been dropped."""
        self.depot: ArtifactExchange | None = None
        self.opinions = Opinions(options.quarantine, options.ledger.checks.tolerance)
        self._scheduled = False
        self._quiet_at: tuple[float, asyncio.TimerHandle] | None = None
        """When the ledger is to look at its quiet windows, by its own time."""
        self._alerted: set[tuple[str, str]] = set()
        self._troubles = Troubles()
        self._rates = RecentRates()
        self.load = Load()
        """Of the broker itself, as last measured."""
        self.standing: StatusReport | None = None
        """What a viewer would have got a moment ago; for threads, which must not look at the ledger."""

    async def run(self, stop: asyncio.Event | None = None) -> None:
        serving()
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._context: zmq.Context[Socket] = zmq.Context()
        try:
            self._bind()
        except AddressError as error:
            self._context.term()
            raise AddressTaken(error.cause, error.cure) from None
        except UserError:
            self._context.term()
            raise
        try:
            self._restore()
            await self._serve(stop)
        finally:
            self._close()

    def _bind(self) -> None:
        options = self.options
        self.bound: list[BoundRouter] = []
        self.gate = (
            Gate(self._context, options.keys, options.limits, self._clock, options.max_connections)
            if options.keys
            else None
        )
        keys = self.gate.keys if self.gate else None
        wanted = [(options.submit_address, ZAP_DOMAIN), (options.work_address, ZAP_DOMAIN)]
        if options.status_address:
            wanted.append((options.status_address, VIEWERS_DOMAIN))
        try:
            for address, domain in wanted:
                self.bound.append(BoundRouter(self._context, address, keys=keys, domain=domain))
        except AddressError:
            self._unbind()
            raise
        for router in self.bound:
            if self.gate is not None and router.keyed:
                self.gate.watch(router)
        self._submit, self._work, *viewers = self.bound
        self.desk = StatusDesk(viewers[0].socket, self.status, self._clock) if viewers else None
        self._journal: Journal | None = None

    def _restore(self) -> None:
        self._journal = Journal(self.options.journal_path, self.options.max_journal_pages)
        self._metrics = MetricsFile(self.options.metrics_path)
        self._meter = LoadMeter(self._clock)
        self._born = self._clock()
        snapshot, self._records = self._journal.load()
        self.ledger = Ledger(
            self.options.ledger, self._journal.epoch, self.gate.seal if self.gate else None, SystemRandom()
        )
        self.ledger.checks.quarantined |= self.opinions.quarantined()
        self.ledger.restore(snapshot, self.awake())
        log.info("broker ready", epoch=self._journal.epoch, live=len(self.ledger.tasks.live))

    async def _serve(self, stop: asyncio.Event | None) -> None:
        fds = [router.socket.fileno() for router in self.bound]
        for fd, callback in zip(fds, (self._turn, self._turn, self._answer_viewers), strict=False):
            self._loop.add_reader(fd, callback)
        if self.gate is not None:
            fds.append(self.gate.zap.fileno())
            self._loop.add_reader(fds[-1], self._answer_handshakes)
        timers = [asyncio.create_task(self._beat()), asyncio.create_task(self._report())]
        if stop is not None:
            timers.append(asyncio.create_task(self._drain_when(stop)))
        try:
            await self._done
        finally:
            if self._quiet_at is not None:
                self._quiet_at[1].cancel()
            for fd in fds:
                self._loop.remove_reader(fd)
            for timer in timers:
                timer.cancel()
            await asyncio.gather(*timers, return_exceptions=True)

    def _unbind(self) -> None:
        for router in self.bound:
            if self.gate is not None and router.keyed:
                self.gate.unwatch(router)
            router.close()
        if self.gate is not None:
            self.gate.close()

    def _close(self) -> None:
        self._unbind()
        if self._journal is not None:
            self._journal.close()
        self._context.term()

    # ── one turn ──────────────────────────────────────────────────────────────────────────────────────────────

    def _turn(self) -> None:
        """Take what is there, decide, journal, answer."""
        self._scheduled = False
        if self._done.done():
            return
        self._meter.enter()
        try:
            self._take_turn()
        except Exception as error:  # supervisor: see `_fail`
            self._fail(error)
        finally:
            self._meter.leave()

    def _fail(self, error: Exception) -> None:
        """The loop would swallow it; `run` raises it and the process ends."""
        if not self._done.done():
            self._done.set_exception(error)

    def _take_turn(self) -> None:
        assert self._journal is not None
        sends: list[tuple[Socket, bytes, list[bytes]]] = []
        now, self._turned_at = self._clock(), self.awake()
        events, self._events = self._events, []
        for event in events:
            if not isinstance(event, ev.Tick):
                self._handle(event, [], sends)
        for public, frames in self._arrived(self._work, now):
            self._decode(ev.FromWorker, public, frames, now, sends)
        for public, frames in self._arrived(self._submit, now):
            self._decode(ev.FromProducer, public, frames, now, sends)
        # Whoever beat while this loop was held up, by a slow disk say, is heard before anybody is judged to be silent.
        for event in events:
            if isinstance(event, ev.Tick):
                self._handle(event, [], sends)
        self._journal.commit(self.ledger.counters)
        for socket, route, frames in sends:
            self._send(socket, route, frames)
        self._wake_for_quiet()
        if self._events or readable(self._work.socket) or readable(self._submit.socket):
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _wake_for_quiet(self) -> None:
        """Between two heartbeats: a rest of a few milliseconds is over in so many."""
        due = self.ledger.quiet.due()
        if self._quiet_at is not None and self._quiet_at[0] == due:
            return
        if self._quiet_at is not None:
            self._quiet_at[1].cancel()
        self._quiet_at = None
        if due is not None:
            timer = self._loop.call_later(max(0.0, due - self.awake()), self._look_at_quiet)
            self._quiet_at = due, timer

    def _look_at_quiet(self) -> None:
        self._quiet_at = None
        self._events.append(ev.QuietDue())
        self._turn()

    def _arrived(self, router: BoundRouter, now: float) -> Iterable[tuple[str, list[bytes]]]:
        """Messages with the key of their sender, which is empty on sockets that only this host can reach."""
        if self.gate is not None and router.keyed:
            return self.gate.take(router.socket, now)
        return (("", frames) for frames in drain(router.socket))

    def _decode(
        self,
        kind: type[ev.FromWorker] | type[ev.FromProducer],
        public: str,
        frames: list[bytes],
        now: float,
        sends: list[tuple[Socket, bytes, list[bytes]]],
    ) -> None:
        try:
            message, payload = framing.decode(frames[1:])
        except framing.FrameError as error:
            self.malformed += 1
            if self.malformed == 1:
                log.warning("dropped a malformed message; further ones are only counted", cause=str(error))
            return
        if public and self._is_refused(public, frames[0], message, payload, now, sends):
            return
        owner = self.gate.guard.owner(public) if self.gate and public else ""
        if isinstance(message, msg.Want | msg.Offer):
            sends.append((self._work.socket, frames[0], self._transfer(owner, message, payload)))
        elif kind is ev.FromWorker:
            self._handle(ev.FromWorker(frames[0], message, owner), payload, sends)
        else:
            self._handle(ev.FromProducer(frames[0], message), payload, sends)

    def _transfer(self, owner: str, message: msg.Want | msg.Offer, payload: list[bytes]) -> list[bytes]:
        """A piece of an artifact, from or for a host that shares no disk."""
        if self.depot is None:
            options = self.options
            self.depot = ArtifactExchange(options.artifacts, options.store_max_bytes, self._clock, options.policies)
        if isinstance(message, msg.Want):
            return framing.encode(*self.depot.want(message))
        return framing.encode(self.depot.offer(owner, message, payload))

    def _is_refused(
        self,
        public: str,
        route: bytes,
        message: msg.Message,
        payload: list[bytes],
        now: float,
        sends: list[tuple[Socket, bytes, list[bytes]]],
    ) -> bool:
        assert self.gate is not None
        reason = self.gate.admit(public, route, message, payload, now)
        if reason and isinstance(message, msg.Hello):
            # An honest worker with the wrong key ends with this reason, instead of waiting for ever.
            sends.append((self._work.socket, route, framing.encode(msg.Drain(f"refused: {reason}"))))
        return bool(reason)

    def _handle(self, event: ev.Event, payload: list[bytes], sends: list[tuple[Socket, bytes, list[bytes]]]) -> None:
        assert self._journal is not None
        self._troubles.saw(event, self.ledger)
        for action in self.ledger.handle(event, self._turned_at):
            match action:
                case ev.Dispatch(route, task):
                    sends.append((self._work.socket, route, framing.encode(task, self._records[task.task_id])))
                case ev.ToWorker(route, message):
                    sends.append((self._work.socket, route, framing.encode(message)))
                case ev.ToProducer(route, message):
                    sends.append((self._submit.socket, route, framing.encode(message)))
                case ev.Opinion(task_id, place):
                    self.opinions.put(task_id, place, payload)
                case ev.Compare(task_id):
                    for who, what in self.opinions.drifting(task_id, self.ledger.checks.cases[task_id].principals):
                        self._troubles.add(who, what)
                    self._handle(ev.Compared(task_id, self.opinions.agreeing(task_id)), [], sends)
                case ev.Settle(row, opinion):
                    settled = self.opinions.of(row.task_id, opinion)
                    self._journal.perform(ev.Append(row), settled)
                    self._keep(ev.Append(row), settled)
                case ev.Quarantine(principal):
                    self.opinions.quarantine(principal)
                    self._troubles.add(principal, "is quarantined: its results differ from those of others")
                case _:
                    self._journal.perform(action, payload)
                    self._keep(action, payload)

    def _keep(self, action: ev.Action, payload: list[bytes]) -> None:
        """Records of live tasks are held in memory as well; queue limits bound them."""
        self.opinions.settled_by(action)
        match action:
            case ev.Store(row):
                self._records[row.task_id] = payload
            case ev.Append(row):
                self._records[row.task_id] = [*self._records[row.task_id], *payload]
            case ev.Finish(row):
                del self._records[row.task_id]
            case ev.Forget(_, task_id):
                self._records.pop(task_id, None)

    def _send(self, socket: Socket, route: bytes, frames: list[bytes]) -> None:
        try:
            send_frames(socket, [route, *frames])
        except zmq.Again:
            if socket is self._work.socket:
                self._events.append(ev.PeerFull(route))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if socket is self._work.socket:
                self._events.append(ev.PeerLost(route))

    def _answer_handshakes(self) -> None:
        if self.gate is not None and not self._done.done():
            self.gate.serve()

    # ── viewers ───────────────────────────────────────────────────────────────────────────────────────────────

    def _answer_viewers(self) -> None:
        if self.desk is not None and not self._done.done() and self.desk.serve():
            self._loop.call_soon(self._answer_viewers)

    def status(self) -> StatusReport:
        """How the system stands; what viewers get."""
        now = self._clock()
        report = msgspec.structs.replace(
            self.ledger.status(self.awake()),
            at=round(time.time(), 3),
            uptime_s=round(now - self._born, 1),
            broker=self.load,
            troubles=self._troubles.listed(),
            run=Path(self.options.run_dir).name,
        )
        return msgspec.structs.replace(report, rates=self._rates.of(report))

    # ── timers ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _beat(self) -> None:
        """Time for the ledger, and the fallback for a lost edge of the sockets' descriptors."""
        while True:
            due = self._clock() + self.options.ledger.heartbeat_s
            await asyncio.sleep(self.options.ledger.heartbeat_s)
            self._meter.saw_lag(self._clock() - due)
            try:
                self._look_around()
            except Exception as error:  # supervisor: see `_fail`
                self._fail(error)

    def _look_around(self) -> None:
        self._events.append(ev.Tick())
        if self.gate is not None:
            self._events += [ev.PeerLost(route) for route in self.gate.poll(self._clock())]
            self._answer_handshakes()
        self._turn()
        self._answer_viewers()

    async def _report(self) -> None:
        while not self._done.done():
            await asyncio.sleep(self.options.metrics_s)
            try:
                self._alert()
                self._troubles.counted(self.ledger.counters)
                self._metrics.write(self.figures())
                self.standing = self.status()
                self._rates.add(self.standing)
            except Exception as error:  # supervisor: see `_fail`
                self._fail(error)

    def _alert(self) -> None:
        """Say once what nobody can do; it ends as `no_worker` if nobody comes."""
        unserved = set(self.ledger.unserved)
        for stage, needs in sorted(unserved - self._alerted):
            log.warning(
                f"no worker can do backend {needs} at stage {stage}",
                waiting=self.ledger.tasks.queues[stage].waiting(needs),
                ends_after_s=self.options.ledger.no_worker_s,
                cure=f"start a worker of that stage on a host that has what {needs} needs",
            )
        self._alerted = unserved

    def figures(self) -> dict[str, object]:
        stats = self.ledger.stats(self.awake())
        self.load = load = self._meter.take()
        counters = {**self.ledger.counters, "live": len(self._records), "malformed": self.malformed}
        if self.gate is not None:
            stats["gate"] = self.gate.stats()
        if drift := self.opinions.drift.stats():
            stats["drift"] = drift
        own = {"busy": load.busy, "lag_ms": load.lag_ms, "rss_mb": load.rss_mb, "cpu": load.cpu}
        return {"t": time.time(), **stats, "counters": counters, "broker": own}

    async def _drain_when(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._events.append(ev.StartDrain("the broker stops"))
        self._turn()
        until = self._clock() + self.options.drain_s
        while self.ledger.pool.by_id and self._clock() < until:
            await asyncio.sleep(0.02)
        if not self._done.done():
            self._done.set_result(None)
