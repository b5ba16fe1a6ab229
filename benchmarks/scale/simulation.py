"""A discrete-event simulation of a run: real ledger, sessions and group book; simulated work, deaths and clock.

::

    RolloutBuffer ─ room ─▶ ProducerSession ─▶ Ledger ─▶ WorkerSession ─▶ busy for a heavy-tailed time ─┐
        ▲                                   ▲  ▲                                                    │
        └── scored, trained ── aggregator ──┘  └──────────────── Result, Beat, Hello ◀──────────────┘

The clock is a number that jumps to the next event, messages arrive at once, and the journal is left out: what is left
is scheduling, and what it costs the ledger. Learner and aggregator never die; every other worker may, of `kill -9`
(its connection breaks) or with its host (it falls silent and its leases run out), and a successor comes.

Invariants, `SimulationError` where one breaks
* I1: each stage of a task accepts one result and a task ends once; `submitted == finished + live`, in the end none.
* I2: nothing goes to `compile` or `bench` that is older than its `max_staleness` allows.
"""

from __future__ import annotations

import random
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush

import msgspec

from kbrl_async.rollouts.buffer.buffer import RolloutBuffer, rollout_ids
from kbrl_async.rollouts.buffer.events import Admitted, BatchMade, Change
from kbrl_async.rollouts.buffer.rules import BufferRules
from kbrl_async.rollouts.settings import BestOfN
from protocols import events as ev
from protocols import messages as msg
from protocols.ledger import Ledger, LedgerOptions
from protocols.messages import Stage, Status
from protocols.records import TrainSample
from protocols.session import Effect, Emit, ProducerSession, Start, WorkerSession

CLOCK = time.thread_time_ns
"""CPU time of this thread: what the ledger costs does not depend on who else uses the machine."""
HARDWARE = ("h100", "h200")
STARTS_S = 1.0
"""Workers join within this time."""


class SimulationError(AssertionError):
    """The ledger broke an invariant."""


class Scenario(msgspec.Struct, frozen=True):
    """A quarter of the workers sample, a half compiles, a quarter times: each stage can do workers / 16 a second."""

    workers: int
    batches: int
    limit_s: float = float("inf")
    """Stop at this simulated time, whatever is under way then."""
    group_size: int = 8
    groups_per_batch: int = 0
    """P; 0: an eighth of the workers, so that the window holds two rollouts for each worker."""
    max_staleness: int = 1
    """S."""
    hold_s: float = 20.0
    mean_s: tuple[float, float, float] = (16.0, 8.0, 4.0)
    """Of generate (four slots a worker; lognormal, σ = 1), compile (lognormal, σ = 1) and bench (Pareto, α = 1.6)."""
    train_s: float = 5.0
    lifetime_s: float = 3600.0
    """Mean time between two deaths of a worker; infinite: nobody dies."""
    wrong: float = 0.3
    """Of answers that don't compile and go from there to their score."""
    refused: float = 0.002
    """Of tasks that a worker hands back for a reason of its own."""
    seed: int = 0

    @property
    def p(self) -> int:
        return self.groups_per_batch or max(2, self.workers // 8)


class SimulatedWorker:
    """One name with the process that bears it now."""

    def __init__(self, name: str, stages: list[str], slots: int, caps: dict[str, str], rng: random.Random) -> None:
        self.name, self.stages, self.slots, self.caps, self._rng = name, stages, slots, caps, rng
        self.lives = 0
        self.is_alive = self.is_silent = False
        self.deaths = 0
        self.served = 0
        self.born()

    def born(self) -> None:
        self.lives += 1
        self.route = f"{self.name}#{self.lives}".encode()
        self.session = WorkerSession(self.name, str(self.lives), self.stages, self.slots, self._rng, self.caps)
        self.is_alive, self.is_silent = True, False


class Simulation:
    """`Simulation(scenario).run()`; what there is to know stands in its attributes afterwards."""

    def __init__(self, scenario: Scenario, ledger: Ledger | None = None) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed)
        self.ledger = ledger or Ledger(LedgerOptions(), rng=random.Random(scenario.seed))
        self.book = RolloutBuffer(
            BufferRules(
                batch_size=scenario.p,
                max_steps=scenario.batches,
                max_staleness=scenario.max_staleness,
                advantage="leave_one_out",
                scale_advantages=True,
                truncated="negative",
                best_of_n=BestOfN(),
                hold_s=scenario.hold_s,
                bench_after=1 << 30,
            )
        )
        self.now = 0.0
        self.event_ns: dict[str, array[int]] = {}
        """CPU time of each `Ledger.handle`, by kind of event."""
        self.accepted: Counter[tuple[str, str]] = Counter()
        self.lags: Counter[int] = Counter()
        """Of trained samples: version that trains on it − version that wrote it."""
        self.group_s: list[float] = []
        """From admission to the last score."""
        self.waits_s: dict[str, list[float]] = {stage: [] for stage in (Stage.GENERATE, Stage.COMPILE, Stage.BENCH)}
        """In the queue, by stage."""
        self.results_at: list[float] = []
        self.scored_at: list[float] = []
        self.trained_at: list[float] = []
        self.deaths = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._pushed = 0
        self._inbox: deque[ev.Event] = deque()
        self._producer = ProducerSession(self.rng)
        self._admitted_at: dict[str, float] = {}
        self._written: dict[str, int] = {}
        self._busy: dict[tuple[bytes, str], msg.Task] = {}
        self._ended: set[str] = set()
        self.workers = [*self._fleet(), *self._singles()]
        self._by_route: dict[bytes, SimulatedWorker] = {}

    def _fleet(self) -> list[SimulatedWorker]:
        count, made = self.scenario.workers, []
        for n in range(count):
            part = n % 4
            stage = (Stage.GENERATE, Stage.COMPILE, Stage.COMPILE, Stage.BENCH)[part]
            caps = {msg.BACKENDS: "c" if part == 1 else "c, triton"} if stage != Stage.GENERATE else {}
            if stage == Stage.BENCH:
                caps[msg.HARDWARE] = HARDWARE[n // 4 % 2]
            made.append(SimulatedWorker(f"{stage}.{n}", [stage], 4 if part == 0 else 1, caps, self.rng))
        return made

    def _singles(self) -> list[SimulatedWorker]:
        aggregator = SimulatedWorker("aggregator", [Stage.SCORE, Stage.TRAINED], 256, {}, self.rng)
        return [aggregator, SimulatedWorker("learner", [Stage.TRAIN], 1, {}, self.rng)]

    # ── the clock ───────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Until all batches are trained and every task has ended, or the scenario's time is over."""
        for worker in self.workers:
            self._by_route[worker.route] = worker
            self._at(self.rng.uniform(0.0, STARTS_S), self._living(worker, partial(self._beat, worker)))
            if worker.name not in ("aggregator", "learner"):
                self._at(self.scenario.lifetime_s * self.rng.expovariate(1.0), partial(self._die, worker))
        self._at(0.0, self._tick)
        self._at(STARTS_S, self._admit)
        while self.now < self.scenario.limit_s and not self.is_over:
            self.now, _, act = heappop(self._heap)
            act()
            self._settle()
        self.check()

    @property
    def is_over(self) -> bool:
        return self.book.is_done and not self._producer.pending and not self.ledger.tasks.live

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._pushed += 1
        heappush(self._heap, (when, self._pushed, act))

    def _living(self, worker: SimulatedWorker, act: Callable[[], None]) -> Callable[[], None]:
        """What happens only if this process of the worker still lives then."""
        life = worker.lives

        def later() -> None:
            if worker.is_alive and worker.lives == life:
                act()

        return later

    def _tick(self) -> None:
        self._inbox.append(ev.Tick())
        for effect in self._producer.tick(self.now):
            self._submit(effect)
        self._poll()  # once a beat: it looks at every open group
        self._at(self.now + self.ledger.options.heartbeat_s, self._tick)

    # ── the broker ──────────────────────────────────────────────────────────────────────────────────────────────

    def _settle(self) -> None:
        """Deliver until nobody has anything more to say."""
        while self._inbox:
            event = self._inbox.popleft()
            kind = type(event.message if isinstance(event, ev.FromWorker | ev.FromProducer) else event).__name__
            started = CLOCK()
            actions = self.ledger.handle(event, self.now)
            self.event_ns.setdefault(kind, array("q")).append(CLOCK() - started)
            for action in actions:
                self._perform(event, action)

    def _perform(self, event: ev.Event, action: ev.Action) -> None:
        match action:
            case ev.ToWorker(route, message):
                self._deliver(route, message)
            case ev.Dispatch(route, task):
                self._check_age(task)
                live = self.ledger.tasks.live[task.task_id]
                if task.stage in self.waits_s:
                    self.waits_s[task.stage].append(self.now - live.entered_at)
                self._by_route[route].served += 1
                self._deliver(route, task)
            case ev.ToProducer(_, message):
                self._producer.handle(message, self.now)
            case ev.Append() | ev.Finish():
                self._accept(event, action)

    def _deliver(self, route: bytes, message: msg.Message) -> None:
        worker = self._by_route.get(route)
        if worker is None or not worker.is_alive or worker.route != route:
            if worker is None or not worker.is_silent:
                self._inbox.append(ev.PeerLost(route))
            return
        self._do(worker, worker.session.handle(message, [], self.now))

    def _accept(self, event: ev.Event, action: ev.Append | ev.Finish) -> None:
        assert isinstance(event, ev.FromWorker)
        assert isinstance(event.message, msg.Result)
        stage = event.message.lease_id.split(":", 2)[1]
        self.results_at.append(self.now)
        self.accepted[stage, action.row.task_id] += 1
        if self.accepted[stage, action.row.task_id] > 1:
            raise SimulationError(f"I1: two results of {action.row.task_id} at {stage}")
        if stage == Stage.GENERATE:
            self._written[action.row.task_id] = event.message.policy_version
        if isinstance(action, ev.Finish):
            if action.row.task_id in self._ended:
                raise SimulationError(f"I1: {action.row.task_id} ended twice")
            self._ended.add(action.row.task_id)

    def _check_age(self, task: msg.Task) -> None:
        if task.stage not in (Stage.COMPILE, Stage.BENCH):
            return
        lag = self.ledger.policy_version - self._written[task.task_id]
        if lag > self.scenario.max_staleness:
            raise SimulationError(f"I2: {task.task_id} goes to {task.stage} {lag} versions late")

    def check(self) -> None:
        """What must hold at the end."""
        self.book.check()
        counters, live = self.ledger.counters, len(self.ledger.tasks.live)
        if counters["submitted"] != counters["finished"] + live:
            raise SimulationError(f"I1: the counters do not add up: {counters}, {live} live")
        if max(self.lags, default=0) > self.scenario.max_staleness:
            raise SimulationError(f"I2: trained on samples of {max(self.lags)} versions ago")

    # ── workers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _beat(self, worker: SimulatedWorker) -> None:
        self._do(worker, worker.session.tick(self.now))
        self._at(self.now + self.ledger.options.heartbeat_s, self._living(worker, lambda: self._beat(worker)))

    def _do(self, worker: SimulatedWorker, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Emit):
                self._inbox.append(ev.FromWorker(worker.route, effect.message))
            elif isinstance(effect, Start):
                self._begin(worker, effect.task)

    def _begin(self, worker: SimulatedWorker, task: msg.Task) -> None:
        takes_s = self._takes_s(task.stage)
        self._at(self.now + takes_s, self._living(worker, lambda: self._end(worker, task)))

    def _takes_s(self, stage: str) -> float:
        generate_s, compile_s, bench_s = self.scenario.mean_s
        match stage:
            case Stage.GENERATE:
                return generate_s * self.rng.lognormvariate(-0.5, 1.0)
            case Stage.COMPILE:
                return compile_s * self.rng.lognormvariate(-0.5, 1.0)
            case Stage.BENCH:
                return bench_s * (0.6 / 1.6) * self.rng.paretovariate(1.6)
            case Stage.TRAIN:
                return self.scenario.train_s
        return 0.0

    def _end(self, worker: SimulatedWorker, task: msg.Task) -> None:
        if task.lease_id not in worker.session.running:
            return
        if task.stage in self.waits_s and self.rng.random() < self.scenario.refused:
            self._do(worker, worker.session.refuse(task.lease_id, "not today"))
            return
        version, following = -1, ""
        match task.stage:
            case Stage.GENERATE:
                version, following = task.policy_version, Stage.COMPILE
            case Stage.COMPILE:
                following = Stage.SCORE if self.rng.random() < self.scenario.wrong else Stage.BENCH
            case Stage.BENCH:
                following = Stage.SCORE
            case Stage.TRAIN:
                version, following = self.ledger.policy_version + 1, Stage.TRAINED
            case Stage.SCORE:
                self._score(task)
            case Stage.TRAINED:
                self._trained(task)
        result = msg.Result(task.task_id, task.lease_id, following, version, task.group_id)
        self._do(worker, worker.session.finish(result, [], self.now))

    def _die(self, worker: SimulatedWorker) -> None:
        """Half of the deaths leave the broker a broken connection, the others only silence."""
        self.deaths += 1
        worker.deaths += 1
        worker.is_alive, worker.is_silent = False, self.rng.random() < 0.5
        self._at(self.now + self.rng.uniform(0.5, 10.0), lambda: self._reborn(worker))
        self._at(self.now + 10.0 + self.scenario.lifetime_s * self.rng.expovariate(1.0), lambda: self._die(worker))

    def _reborn(self, worker: SimulatedWorker) -> None:
        del self._by_route[worker.route]
        worker.born()
        self._by_route[worker.route] = worker
        self._beat(worker)

    # ── producer and aggregator ─────────────────────────────────────────────────────────────────────────────────

    def _submit(self, effect: object) -> None:
        if isinstance(effect, Emit):
            self._inbox.append(ev.FromProducer(b"producer", effect.message))

    def _admit(self) -> None:
        for _ in range(self.book.room()):
            problem = f"p{self.rng.randrange(1000)}"
            change = self.book.take(self.book.admission(problem, 1, self.scenario.group_size, self.now))
            if not isinstance(change.event, Admitted):
                return
            group_id = change.event.group_id
            self._admitted_at[group_id] = self.now
            needs = "triton" if self.rng.random() < 0.3 else "c"
            for rollout_id in rollout_ids(group_id, self.scenario.group_size):
                submit = msg.Submit(rollout_id, Stage.GENERATE, group_id, self.scenario.max_staleness, needs)
                for effect in self._producer.submit(submit, [], self.now):
                    self._submit(effect)

    def _score(self, task: msg.Task) -> None:
        group_id = task.group_id
        self.scored_at.append(self.now)
        if task.status == Status.OK:
            version, reward = self._written[task.task_id], self.rng.random()
            sample = TrainSample(task.task_id, [], [], [], 0.0, reward, version)
            change = self.book.take(self.book.scored(group_id, task.task_id, [sample], self.now))
        else:
            change = self.book.take(self.book.lost(group_id, task.task_id, str(task.status), self.now))
        self._after(change)

    def _trained(self, task: msg.Task) -> None:
        for batch in self.book.outstanding():
            if batch.batch_id == task.task_id:
                self._count_lags(batch)
        self.trained_at.append(self.now)
        self._after(self.book.take(self.book.trained(task.task_id, self.ledger.policy_version, self.now)))

    def _count_lags(self, batch: BatchMade) -> None:
        for group_id in batch.group_ids:
            for rollout_id in rollout_ids(group_id, self.scenario.group_size):
                if (version := self._written.get(rollout_id)) is not None:
                    self.lags[batch.index - version] += 1

    def _poll(self) -> None:
        while (change := self.book.take(self.book.poll(self.now))).event is not None:
            self._after(change)
            if isinstance(change.event, BatchMade):
                for effect in self._producer.submit(msg.Submit(change.event.batch_id, Stage.TRAIN), [], self.now):
                    self._submit(effect)

    def _after(self, change: Change) -> None:
        for closed in change.closed:
            self.group_s.append(self.now - self._admitted_at.pop(closed.group_id))
            for effect in self._producer.retire(closed.group_id, self.now):
                self._submit(effect)
        if change.closed:
            self._admit()
