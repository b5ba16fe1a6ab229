"""The asyncio shell of a worker: it takes leases, runs the actor's handler, and reports until the broker has it.

Beats are sent by this loop, so a loop that hangs is noticed by the broker; where the work runs in a thread, `wedge_s`
withholds beats once nobody has called `progress` for so long while work is in flight.

    HandlerOutcome          ─▶ Result, again until its Ack      InfraError ─▶ Nack (tried elsewhere, never scored)
    handler returns None    ─▶ the actor calls `finish` later   Revoke     ─▶ the handler is cancelled
    RecordError             ─▶ Nack: a worker before this one appended what is no frame
    any other error         ─▶ Nack, and `run` raises it: the process ends and its nanny decides

A worker that fails task after task tells each failure later (`setbacks`), or it would use up all attempts there are.

With a `prefetch` it holds as many leases as keep it busy over a long line (`protocols.prefetch`). `before` fetches what
a task needs while others run, `after` hands over what belongs to a result while the next one runs: neither takes one
of the `concurrency` places.

Quiet windows: a worker whose caps say that it shares something stands still when a bench asks. Jobs start through its
gate, and a thread that works for long calls `breathe` between its steps. A bench asks through `quiet_windows`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import structlog

from kbrl_async.errors import ConfigError, HostError, InfraError, KbrlError
from protocols import messages as msg
from protocols.names import unresolved
from protocols.prefetch import Prefetch
from protocols.rollout import RecordError
from protocols.session import Abandon, Drained, Effect, Emit, Start, WorkerSession
from protocols.sockets import ClientKeys
from services.runtime.channel import Channel
from services.runtime.meters import LoadMeter
from services.runtime.pulse import serving
from services.runtime.quiet import PauseGate, QuietWindows
from services.runtime.setbacks import Setbacks
from services.runtime.transfers import Transfers

LONELY_S = 20.0
log = structlog.get_logger()


class HandlerOutcome(msgspec.Struct, frozen=True):
    """What a handler made of a task: the stage that comes next (empty: it ends here) and the frames to append."""

    next_stage: str = ""
    frames: list[bytes] = msgspec.field(default_factory=list)
    policy_version: int = -1
    tokens: int = 0
    """Added to the worker's count of tokens."""
    chance: float = 0.0
    """See `protocols.messages.Result`."""


Handler = Callable[[msg.Task, list[bytes]], Awaitable[HandlerOutcome | None]]
Before = Callable[[msg.Task, list[bytes]], Awaitable[None]]
After = Callable[[HandlerOutcome], Awaitable[None]]


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker may choose beside its handler; see the module's docstring."""

    caps: Mapping[str, str] = msgspec.field(default_factory=dict)
    """What it says of itself in its Hello."""
    policy_version: int = -1
    """Of a learner: the version that it has."""
    concurrency: int | None = None
    """Tasks that run at once; None: all that are held."""
    prefetch: Prefetch | None = None
    """Says how many leases are held, by what it measures."""
    before: Before | None = None
    after: After | None = None
    wedge_s: float | None = None
    drain_s: float = 3.0
    """What is running when it is told to leave has so long to end."""
    differs: Callable[[str], list[str]] | None = None
    """In which settings of the run (`Welcome.settings`) this worker is another; it then ends with `ConfigError`."""


class Worker:
    """See the module's docstring.

    Example::

        async def build(task: Task, frames: list[bytes]) -> HandlerOutcome:
            report = await compile_candidate(frames)
            return HandlerOutcome("bench", [encode(report)])

        await Worker(addresses(run_dir).work, "farm-1", ["compile"], slots=4, handler=build).run(stop)
    """

    def __init__(
        self,
        address: str,
        worker_id: str,
        stages: list[str],
        slots: int,
        handler: Handler,
        options: WorkerOptions | None = None,
        *,
        keys: ClientKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """`slots` leases are held at most, of which `options.concurrency` run and the rest is prefetched."""
        self._address, self._keys = address, keys
        self._handler = handler
        self._clock = clock
        self._options = options = options or WorkerOptions()
        self._prefetch = options.prefetch
        self.drain_s = options.drain_s
        self._running_now = asyncio.Semaphore(options.concurrency or slots)
        self._setbacks = Setbacks(free=2 * slots)
        self.meter = LoadMeter(clock)
        self.session = WorkerSession(
            worker_id,
            secrets.token_hex(8),
            [msg.Stage(stage) for stage in stages],
            self._prefetch.most if self._prefetch else slots,
            rng or random.Random(),
            dict(options.caps),
            options.policy_version,
        )
        if self._prefetch is not None:
            self.session.credit = self._prefetch.credit
        self._handed_in: dict[str, float] = {}
        """Results that wait for their first Ack, and since when."""
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._last_progress = clock()
        self._lonely_since = clock()
        self._channel: Channel | None = None
        self._failure: BaseException | None = None
        self._wake = asyncio.Event()
        self.welcomes = 0
        """How often the broker has taken us in: from the second time on it, or the way to it, was away meanwhile."""
        self._begun: set[str] = set()
        """Leases whose handler has begun; it may end before the work does, see `finish`."""
        self.gate = PauseGate(clock, self._say, lambda: self._begun.isdisjoint(self.session.running))
        self._windows: dict[str, QuietWindows] = {}
        self.transfers = Transfers(self._carry, clock)
        """Artifacts, for a worker that shares no disk with the broker."""

    # ── for the actor ─────────────────────────────────────────────────────────────────────────────────────────

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Work until `stop` is set or the broker drains us; then finish or give back what is held, and leave.

        Raises what a handler raised (other than `InfraError`), and `KbrlError` where a newer process has our id.
        """
        serving()
        self._lonely_since = self._clock()  # a sampler is made long before there is a policy to work with
        self._channel = Channel(self._address, secrets.token_hex(8).encode(), self._received, self._keys)
        helpers = [asyncio.create_task(self._pulse())]
        if stop is not None:
            helpers.append(asyncio.create_task(self._stop_when(stop)))
        for helper in helpers:
            helper.add_done_callback(self._helper_ended)
        try:
            await self._until(lambda: self.session.draining or self._failure is not None, None)
            await self._until(lambda: self._failure is not None or not self.session.held, self.drain_s)
        finally:
            await self._leave(helpers)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Drain: take nothing more, finish what runs within `drain_s`, leave."""
        self._perform(self.session.drain())
        self._wake.set()

    def finish(self, task: msg.Task, outcome: HandlerOutcome) -> None:
        """Report a task whose handler returned None."""
        result = msg.Result(
            task.task_id, task.lease_id, outcome.next_stage, outcome.policy_version, task.group_id, outcome.chance
        )
        self.meter.done += 1
        self.meter.tokens += outcome.tokens
        self._setbacks.worked()
        self._last_progress = now = self._clock()
        self._perform(self.session.finish(result, outcome.frames, now))
        if self._prefetch is not None and task.lease_id in self.session.held:
            self._handed_in[task.lease_id] = now
        self._wake.set()

    def refuse(self, task: msg.Task, reason: str) -> None:
        """Give a task back for a reason of ours (I4)."""
        self._last_progress = self._clock()
        self._perform(self.session.refuse(task.lease_id, reason))
        self._wake.set()

    def progress(self) -> None:
        """The work moves on; may be called from any thread."""
        self._last_progress = self._clock()

    def breathe(self) -> None:
        """Between two steps of long work, from its thread: counts as progress, waits while a quiet window is open."""
        self.progress()
        self.gate.breathe()
        self.progress()

    def quiet_windows(self, resource: str) -> QuietWindows:
        """For a bench: how its thread asks for quiet windows on `resource`. Call it on the loop, once `run` runs."""
        if resource not in self._windows:
            self._windows[resource] = QuietWindows(resource, self._clock, self._say)
        return self._windows[resource]

    @property
    def welcomed(self) -> bool:
        return self.session.epoch != 0

    # ── the machine ───────────────────────────────────────────────────────────────────────────────────────────

    async def _until(self, is_true: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait for a condition that changes only together with `_wake`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_true():
                    self._wake.clear()
                    await self._wake.wait()

    def _helper_ended(self, helper: asyncio.Task[None]) -> None:
        """Without its pulse a worker would be silent for ever, and look alive to its nanny."""
        if not helper.cancelled() and (error := helper.exception()) is not None:
            self._failure = self._failure or error
            self._wake.set()

    async def _stop_when(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.stop()

    async def _pulse(self) -> None:
        while True:
            period_s = min(0.1, self.session.heartbeat_s / 4)
            due = self._clock() + period_s
            await asyncio.sleep(period_s)
            self.meter.saw_lag(self._clock() - due)
            self._tick()

    def _tick(self) -> None:
        assert self._channel is not None
        self._channel.poll()
        now = self._clock()
        alive = not self._is_wedged(now)
        load = self.meter.take(len(self.session.running)) if alive and self.session.beat_due(now) else None
        self._perform(self.session.tick(now, load, alive=alive))
        self.transfers.tick()
        self._warn_if_lonely(now)

    def _warn_if_lonely(self, now: float) -> None:
        """A key that is not allowed is not told so: nobody answers. Then somebody has to look, here or there."""
        if self.welcomed:
            self._lonely_since = now
        elif now - self._lonely_since >= LONELY_S:
            self._lonely_since = now
            has_keys = self._keys is not None
            asyncio.get_running_loop().run_in_executor(None, tell, self._address, LONELY_S, has_keys)

    def _is_wedged(self, now: float) -> bool:
        wedge_s = self._options.wedge_s
        if wedge_s is None or not self.session.running or not self.gate.is_open:
            return False
        return now - self._last_progress > wedge_s

    def _received(self, message: msg.Message, payload: list[bytes]) -> None:
        self.welcomes += isinstance(message, msg.Welcome)
        if isinstance(message, msg.Welcome) and self._options.differs is not None:
            self._compare(self._options.differs(message.settings))
        self._perform(self.session.handle(message, payload, self._clock()))
        if isinstance(message, msg.Pause | msg.Resume):
            self.gate.handle(message)
        elif isinstance(message, msg.QuietGrant) and message.resource in self._windows:
            self._windows[message.resource].handle(message)
        elif isinstance(message, msg.Chunk | msg.Kept):
            self.progress()
            self.transfers.handle(message, payload)
        if isinstance(message, msg.Ack):
            self._acked(message.lease_id)
            self._wake.set()

    def _compare(self, differences: list[str]) -> None:
        """Another run may have taken the broker's address over: its work is not done by the settings of the last."""
        if differences:
            self._failure = ConfigError("; ".join(differences), "Start this worker again: it asks for the settings")
            self._wake.set()

    def _acked(self, lease_id: str) -> None:
        since = self._handed_in.pop(lease_id, None)
        if self._prefetch is not None and since is not None:
            self._prefetch.acked(self._clock() - since)
            self.session.credit = self._prefetch.credit

    def _say(self, message: msg.Message) -> None:
        if self._channel is not None and self.session.epoch:
            self._channel.send(message, [])

    def _carry(self, message: msg.Message, payload: list[bytes]) -> None:
        if self._channel is not None and self.session.epoch:
            self._channel.send(message, payload)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Emit() if self._channel is not None:
                    self._channel.send(effect.message, effect.payload)
                case Start():
                    self._start(effect.task, effect.payload)
                case Abandon():
                    self._abandon(effect.lease_id)
                case Drained():
                    self._drained(effect.reason)

    def _start(self, task: msg.Task, frames: list[bytes]) -> None:
        if len(self.session.running) == 1:
            self._last_progress = self._clock()
        self._jobs[task.lease_id] = asyncio.create_task(self._work(task, frames), name=task.task_id)

    def _abandon(self, lease_id: str) -> None:
        job = self._jobs.get(lease_id)
        if job is not None:
            job.cancel()
        self._wake.set()

    def _drained(self, reason: str) -> None:
        if reason.startswith("fenced"):
            cause = f"another process has introduced itself as worker {self.session.worker_id}"
            # Not a HostError: if it was a late Hello of our own dead predecessor, the nanny's next child settles it.
            self._failure = KbrlError(cause, "Give every worker an id of its own")
        elif reason.startswith("refused"):
            cause = f"the broker has refused worker {self.session.worker_id}: {reason.removeprefix('refused: ')}"
            self._failure = HostError(cause, "Use a key of the right role: kbrl keys new ROLE --name NAME")
        self._wake.set()

    async def _work(self, task: msg.Task, frames: list[bytes]) -> None:
        try:
            await self._fetch(task, frames)
            async with self._running_now:
                await self.gate.opened()
                self._begun.add(task.lease_id)
                begun = self._clock()
                with self.meter.busy():
                    outcome = await self._handler(task, frames)
                if self._prefetch is not None:
                    self._prefetch.worked(self._clock() - begun)
            if outcome is not None:
                await self._hand_over(outcome)
        except (InfraError, RecordError) as error:
            await asyncio.sleep(self._setbacks.failed())
            if self._setbacks.is_worth_telling:
                log.warning("a task is given back", cause=str(error), in_a_row=self._setbacks.row, task_id=task.task_id)
            self.refuse(task, str(error))
        except Exception as error:  # the supervisor of handlers: the error ends the process, see the docstring
            self._failure = error
            self.refuse(task, f"{type(error).__name__}: {error}")
        else:
            if outcome is not None:
                self.finish(task, outcome)
        finally:
            del self._jobs[task.lease_id]
            self._begun &= self.session.running.keys()
            self.gate.look()

    async def _fetch(self, task: msg.Task, frames: list[bytes]) -> None:
        if self._options.before is not None:
            began = self._clock()
            await self._options.before(task, frames)
            if self._prefetch is not None:
                self._prefetch.fetched(self._clock() - began)

    async def _hand_over(self, outcome: HandlerOutcome) -> None:
        if self._options.after is not None:
            began = self._clock()
            await self._options.after(outcome)
            if self._prefetch is not None:
                self._prefetch.handed(self._clock() - began)

    async def _leave(self, helpers: list[asyncio.Task[None]]) -> None:
        assert self._channel is not None
        jobs = list(self._jobs.values())
        for job in (*jobs, *helpers):
            job.cancel()
        await asyncio.gather(*jobs, *helpers, return_exceptions=True)
        self._perform(self.session.bye())
        self._channel.close()


def tell(address: str, silent_s: float, has_keys: bool) -> None:
    """One warning. May block on a name server: not for an event loop."""
    said = f"no answer from the broker at {address} for {silent_s:.0f} s"
    if reason := unresolved(address):
        log.warning(f"{said}: {reason}", cure="correct the name or this host's DNS; it is tried again all the while")
        return
    cure = "see that it runs and can be reached" + ("; is this key on its allow-list?" if has_keys else "")
    log.warning(said, cure=cure)
