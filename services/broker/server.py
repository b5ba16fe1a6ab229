"""The broker's shell: sockets in, ledger, journal, sockets out; one turn of the loop is one commit.

    submit ROUTER ─┐                                                      ┌─▶ replies to producers
                   ├─ drain ─▶ decode ─▶ Ledger.handle ─▶ Journal.commit ─┤
    work ROUTER ───┘                                                      └─▶ tasks, Acks … to workers

Invariants
* Nothing leaves before the commit of the turn that caused it, so a peer never knows more than the journal.
* Whatever a peer sends, the broker goes on: frames that are no message are counted and dropped.
* An error of the journal or a bug ends the process with nothing half done; its nanny starts it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog
import zmq

from kbrl_async.errors import AddressTaken
from protocols import events as ev
from protocols import framing
from protocols.ledger import Ledger
from protocols.sockets import AddressError, BoundRouter, Socket
from services.broker.journal import Journal
from services.broker.metrics import MetricsFile
from services.broker.options import BrokerOptions
from services.runtime.channel import drain, readable, send_frames
from services.runtime.meters import LoadMeter

log = structlog.get_logger()


class Broker:
    """`await Broker(options).run(stop)` serves until `stop` is set; raises `HostError`s of its address and journal."""

    def __init__(self, options: BrokerOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options
        self._clock = clock
        self._events: list[ev.Event] = [ev.Tick()]
        self.malformed = 0
        """Messages that were none and have been dropped."""
        self._scheduled = False
        self._alerted: set[tuple[str, str]] = set()

    async def run(self, stop: asyncio.Event | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._context: zmq.Context[Socket] = zmq.Context()
        try:
            self._bind()
        except AddressError as error:
            self._context.term()
            raise AddressTaken(error.cause, error.cure) from None
        try:
            self._restore()
            await self._serve(stop)
        finally:
            self._close()

    def _bind(self) -> None:
        options = self.options
        self._submit = BoundRouter(self._context, options.submit_address, allow_remote=options.allow_remote)
        try:
            self._work = BoundRouter(self._context, options.work_address, allow_remote=options.allow_remote)
        except AddressError:
            self._submit.close()
            raise
        self._journal: Journal | None = None

    def _restore(self) -> None:
        self._journal = Journal(self.options.journal_path, self.options.max_journal_pages)
        self._metrics = MetricsFile(self.options.metrics_path)
        self._meter = LoadMeter(self._clock)
        snapshot, self._records = self._journal.load()
        self.ledger = Ledger(self.options.ledger, self._journal.epoch)
        self.ledger.restore(snapshot, self._clock())
        log.info("broker ready", epoch=self._journal.epoch, live=len(self.ledger.tasks.live))

    async def _serve(self, stop: asyncio.Event | None) -> None:
        fds = [router.socket.fileno() for router in (self._submit, self._work)]
        for fd in fds:
            self._loop.add_reader(fd, self._turn)
        timers = [asyncio.create_task(self._beat()), asyncio.create_task(self._report())]
        if stop is not None:
            timers.append(asyncio.create_task(self._drain_when(stop)))
        try:
            await self._done
        finally:
            for fd in fds:
                self._loop.remove_reader(fd)
            for timer in timers:
                timer.cancel()
            await asyncio.gather(*timers, return_exceptions=True)

    def _close(self) -> None:
        for router in (self._submit, self._work):
            router.close()
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
        except Exception as error:  # the loop would swallow it; `run` raises it and the process ends
            self._done.set_exception(error)
        finally:
            self._meter.leave()

    def _take_turn(self) -> None:
        assert self._journal is not None
        sends: list[tuple[Socket, bytes, list[bytes]]] = []
        now = self._clock()
        events, self._events = self._events, []
        for event in events:
            self._handle(event, [], now, sends)
        for frames in drain(self._work.socket):
            self._decode(ev.FromWorker, frames, now, sends)
        for frames in drain(self._submit.socket):
            self._decode(ev.FromProducer, frames, now, sends)
        self._journal.commit(self.ledger.counters)
        for socket, route, frames in sends:
            self._send(socket, route, frames)
        if self._events or readable(self._work.socket) or readable(self._submit.socket):
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _decode(
        self,
        kind: type[ev.FromWorker] | type[ev.FromProducer],
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
        self._handle(kind(frames[0], message), payload, now, sends)

    def _handle(
        self, event: ev.Event, payload: list[bytes], now: float, sends: list[tuple[Socket, bytes, list[bytes]]]
    ) -> None:
        assert self._journal is not None
        for action in self.ledger.handle(event, now):
            match action:
                case ev.Dispatch(route, task):
                    sends.append((self._work.socket, route, framing.encode(task, self._records[task.task_id])))
                case ev.ToWorker(route, message):
                    sends.append((self._work.socket, route, framing.encode(message)))
                case ev.ToProducer(route, message):
                    sends.append((self._submit.socket, route, framing.encode(message)))
                case _:
                    self._journal.perform(action, payload)
                    self._keep(action, payload)

    def _keep(self, action: ev.Action, payload: list[bytes]) -> None:
        """Records of live tasks are held in memory as well; queue limits bound them."""
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

    # ── timers ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _beat(self) -> None:
        """Time for the ledger, and the fallback for a lost edge of the sockets' descriptors."""
        while True:
            due = self._clock() + self.options.ledger.heartbeat_s
            await asyncio.sleep(self.options.ledger.heartbeat_s)
            self._meter.saw_lag(self._clock() - due)
            self._events.append(ev.Tick())
            self._turn()

    async def _report(self) -> None:
        while not self._done.done():
            await asyncio.sleep(self.options.metrics_s)
            try:
                self._alert()
                self._metrics.write(self._line())
            except Exception as error:  # as in `_turn`: `run` raises it
                if not self._done.done():
                    self._done.set_exception(error)

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

    def _line(self) -> dict[str, object]:
        stats = self.ledger.stats(self._clock())
        load = self._meter.take()
        counters = {**self.ledger.counters, "live": len(self._records), "malformed": self.malformed}
        own = {"busy": load.busy, "lag_ms": load.lag_ms, "rss_mb": load.rss_mb}
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
