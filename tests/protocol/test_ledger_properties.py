"""The ledger under a hostile network: messages lost, doubled, reordered and late; workers and brokers that die.

The machine below is a whole pipeline in one thread: real ledger, real worker and producer sessions, a journal that is
applied action by action, a network that is a list, and a clock that is a number. Each step checks I1, I2 and the
bookkeeping; at the end the network heals and everything must come to its end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocols import events as ev
from protocols import messages as msg
from protocols.ledger import Ledger, LedgerOptions, StageOptions
from protocols.session import Drained, Emit, ProducerSession, Start, Submitted, WorkerSession

STAGE_AFTER = {
    "generate": "compile",
    "compile": "bench",
    "bench": "score",
    "score": "",
    "train": "trained",
    "trained": "",
}
OPTIONS = LedgerOptions(
    heartbeat_s=1.0,
    generate=StageOptions(ttl_s=4.0, queue_limit=6),
    no_worker_s=6.0,
    compile=StageOptions(ttl_s=4.0, queue_limit=1),
    bench=StageOptions(ttl_s=3.0),
    score=StageOptions(ttl_s=4.0, max_losses=None),
    train=StageOptions(ttl_s=4.0, queue_limit=2),
    trained=StageOptions(ttl_s=4.0, max_losses=None),
)
WORKERS = {
    "sampler": (["generate"], 3),
    "farm-1": (["compile"], 1),
    "farm-2": (["compile"], 2),
    "bench": (["bench"], 2),
    "aggregator": (["score", "trained"], 4),
    "learner": (["train"], 1),
}
CAPS = {"farm-1": {"backends": "c"}, "farm-2": {"backends": "c, triton"}}
picks = st.integers(min_value=0, max_value=10_000)
names = st.sampled_from(sorted(WORKERS))


class SimulatedWorker:
    def __init__(self, worker_id: str, incarnation: int) -> None:
        stages, slots = WORKERS[worker_id]
        self.route = f"{worker_id}#{incarnation}".encode()
        self.session = WorkerSession(
            worker_id, str(incarnation), stages, slots, random.Random(incarnation), CAPS.get(worker_id)
        )


class Pipeline(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.now = 100.0
        self.epoch = 1
        self.incarnations = 0
        self.version = 0
        self.submissions = 0
        self.ledger = Ledger(OPTIONS, epoch=1)
        self.producer = ProducerSession(random.Random(0))
        self.to_broker: list[ev.Event] = []
        self.to_workers: list[tuple[bytes, msg.Message]] = []
        self.to_producer: list[msg.Message] = []
        self.rows: dict[int, ev.TaskRow] = {}
        self.policy = 0
        self.counters: dict[str, int] = {}
        self.accepted: Counter[tuple[str, str]] = Counter()
        self.ended: Counter[str] = Counter()
        self.acked: set[str] = set()
        self.retired: set[str] = set()
        self.groups: dict[str, str] = {}
        self.written_by: dict[str, int] = {}
        self.workers = {name: self._spawn(name) for name in WORKERS}
        self._settle(rounds=3)

    def _spawn(self, name: str) -> SimulatedWorker:
        self.incarnations += 1
        return SimulatedWorker(name, self.incarnations)

    # ── the broker: performs actions as the real one does ─────────────────────────────────────────────────────

    def _handle(self, event: ev.Event) -> None:
        before = {task.task_id: task.stage for task in self.ledger.tasks}
        for action in self.ledger.handle(event, self.now):
            self._perform(action, before)
            if isinstance(action, ev.Append | ev.Finish):
                self._count_result(event, action, before)
        self.counters = dict(self.ledger.counters)

    def _perform(self, action: ev.Action, before: dict[str, str]) -> None:
        match action:
            case ev.Store(row) | ev.Append(row) | ev.Update(row) | ev.Finish(row):
                self.rows[row.seq] = row
                if isinstance(action, ev.Finish):
                    self.ended[row.task_id] += 1
            case ev.Forget(seq, task_id):
                self.ended[task_id] += self.rows[seq].stage != ""
                del self.rows[seq]
            case ev.SetPolicy(version):
                assert version > self.policy
                self.policy = version
            case ev.ToProducer(_, message):
                self.to_producer.append(message)
            case ev.ToWorker(route, message):
                self.to_workers.append((route, message))
            case ev.Dispatch(route, task):
                self._check_dispatch(route, task)
                self.to_workers.append((route, task))

    def _count_result(self, event: ev.Event, action: ev.Append | ev.Finish, before: dict[str, str]) -> None:
        assert isinstance(event, ev.FromWorker)
        assert isinstance(event.message, msg.Result)
        stage = before[action.row.task_id]
        self.accepted[action.row.task_id, stage] += 1
        if stage == "generate":
            self.written_by[action.row.task_id] = event.message.policy_version

    def _check_dispatch(self, route: bytes, task: msg.Task) -> None:
        live = self.ledger.tasks.live[task.task_id]
        worker = self.ledger.pool.by_route[route]
        assert len(worker.leases) <= min(worker.slots, worker.credit)
        assert not worker.suspect
        offered = CAPS.get(worker.worker_id, {}).get("backends")
        assert not live.needs or offered is None or live.needs in offered
        written = self.written_by.get(task.task_id, -1)
        if task.stage in ("compile", "bench") and live.max_staleness >= 0 and written >= 0:
            assert self.ledger.policy_version - written <= live.max_staleness

    # ── the network ───────────────────────────────────────────────────────────────────────────────────────────

    def _deliver_to_broker(self, index: int) -> None:
        self._handle(self.to_broker.pop(index))

    def _deliver_to_worker(self, index: int) -> None:
        route, message = self.to_workers.pop(index)
        for worker in list(self.workers.values()):
            if worker.route == route:
                self._perform_worker(worker, worker.session.handle(message, [], self.now))

    def _deliver_to_producer(self, index: int) -> None:
        self._perform_producer(self.producer.handle(self.to_producer.pop(index), self.now))

    def _perform_worker(self, worker: SimulatedWorker, effects: Sequence[object]) -> None:
        for effect in effects:
            if isinstance(effect, Emit):
                self.to_broker.append(ev.FromWorker(worker.route, effect.message))
            elif isinstance(effect, Start):
                assert effect.task.lease_id in worker.session.running
            elif isinstance(effect, Drained):
                # A late Hello of a dead predecessor has fenced it: the process ends and its nanny starts the next.
                self.workers[worker.session.worker_id] = self._spawn(worker.session.worker_id)

    def _perform_producer(self, effects: Sequence[object]) -> None:
        for effect in effects:
            if isinstance(effect, Emit):
                self.to_broker.append(ev.FromProducer(b"producer", effect.message))
            elif isinstance(effect, Submitted):
                self.acked.add(effect.task_id)

    def _settle(self, rounds: int) -> None:
        """A healthy network for a while."""
        for _ in range(rounds):
            self._pass_time(0.5)
            while self.to_broker or self.to_workers or self.to_producer:
                for queue, deliver in (
                    (self.to_broker, self._deliver_to_broker),
                    (self.to_workers, self._deliver_to_worker),
                    (self.to_producer, self._deliver_to_producer),
                ):
                    while queue:
                        deliver(0)

    def _pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._handle(ev.Tick())
        for worker in self.workers.values():
            self._perform_worker(worker, worker.session.tick(self.now))
        self._perform_producer(self.producer.tick(self.now))

    # ── what may happen ───────────────────────────────────────────────────────────────────────────────────────

    @rule(
        stage=st.sampled_from(["generate", "generate", "compile", "train"]),
        group=st.integers(0, 9),
        lag=st.integers(-1, 2),
        needs=st.sampled_from(["", "c", "triton", "nobody builds this"]),
    )
    def submit(self, stage: str, group: int, lag: int, needs: str) -> None:
        self.submissions += 1
        submit = msg.Submit(f"t:{self.submissions}", stage, f"g{group}", lag, needs)
        self.groups[submit.task_id] = submit.group_id
        self._perform_producer(self.producer.submit(submit, [b"x"], self.now))

    @rule(group=st.integers(0, 9))
    def retire(self, group: int) -> None:
        self.retired.add(f"g{group}")
        self._perform_producer(self.producer.retire(f"g{group}", self.now))

    @rule(pick=picks)
    def deliver_some_to_the_broker(self, pick: int) -> None:
        if self.to_broker:
            self._deliver_to_broker(pick % len(self.to_broker))

    @rule(pick=picks)
    def deliver_some_to_a_worker(self, pick: int) -> None:
        if self.to_workers:
            self._deliver_to_worker(pick % len(self.to_workers))

    @rule(pick=picks)
    def lose_a_message(self, pick: int) -> None:
        queues: list[list[Any]] = [queue for queue in (self.to_broker, self.to_workers, self.to_producer) if queue]
        if queues:
            queue = queues[pick % len(queues)]
            del queue[pick % len(queue)]

    @rule(pick=picks)
    def double_a_message(self, pick: int) -> None:
        queues: list[list[Any]] = [queue for queue in (self.to_broker, self.to_workers, self.to_producer) if queue]
        if queues:
            queue = queues[pick % len(queues)]
            queue.append(queue[pick % len(queue)])

    @rule(rounds=st.integers(1, 2))
    def the_network_is_well(self, rounds: int) -> None:
        self._settle(rounds)

    @rule(seconds=st.sampled_from([0.3, 1.1, 4.5]))
    def time_passes(self, seconds: float) -> None:
        self._pass_time(seconds)

    @rule(name=names, pick=picks)
    def a_worker_finishes(self, name: str, pick: int) -> None:
        worker = self.workers[name]
        if worker.session.running:
            task = list(worker.session.running.values())[pick % len(worker.session.running)]
            self._finish(worker, task)

    def _finish(self, worker: SimulatedWorker, task: msg.Task) -> None:
        if task.stage == "train":
            self.version += 1
        version = self.version if task.stage in ("generate", "train") else -1
        result = msg.Result(task.task_id, task.lease_id, STAGE_AFTER[task.stage], version)
        self._perform_worker(worker, worker.session.finish(result, [b"y"], self.now))

    @rule(name=names, pick=picks)
    def a_worker_refuses(self, name: str, pick: int) -> None:
        session = self.workers[name].session
        if session.running:
            lease_id = list(session.running)[pick % len(session.running)]
            self._perform_worker(self.workers[name], session.refuse(lease_id, "gpu gone"))

    @rule(name=names, seen=st.booleans())
    def a_worker_is_killed_and_starts_again(self, name: str, seen: bool) -> None:
        if seen:
            self._handle(ev.PeerLost(self.workers[name].route))
        self.workers[name] = self._spawn(name)

    @rule(name=names)
    def a_worker_says_bye_and_starts_again(self, name: str) -> None:
        self._perform_worker(self.workers[name], self.workers[name].session.bye())
        self.workers[name] = self._spawn(name)

    @rule(name=names)
    def the_socket_loses_a_peer_that_lives(self, name: str) -> None:
        self._handle(ev.PeerLost(self.workers[name].route))

    @rule(name=names)
    def a_peer_does_not_read(self, name: str) -> None:
        self._handle(ev.PeerFull(self.workers[name].route))

    @rule()
    def the_learner_says_its_version(self) -> None:
        learner = self.workers["learner"]
        learner.session.policy_version = self.version
        hello = msg.Hello("learner", learner.session.incarnation, ["train"], 1, learner.session.held, {}, self.version)
        self.to_broker.append(ev.FromWorker(learner.route, hello))

    @rule(lose_mail=st.booleans())
    def the_broker_is_killed_and_starts_again(self, lose_mail: bool) -> None:
        self.epoch += 1
        self.ledger = Ledger(OPTIONS, self.epoch)
        self.ledger.restore(ev.Snapshot(list(self.rows.values()), self.policy, self.counters), self.now)
        if lose_mail:
            self.to_broker.clear()
            self.to_workers.clear()
            self.to_producer.clear()

    # ── what must hold ────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def counters_add_up(self) -> None:
        counters = self.ledger.counters
        assert counters["submitted"] == counters["finished"] + len(self.ledger.tasks.live)
        assert counters["finished"] == sum(self.ended.values())

    @invariant()
    def each_task_ends_once_and_each_stage_accepts_once(self) -> None:
        assert max(self.accepted.values(), default=0) <= 1
        assert max(self.ended.values(), default=0) <= 1

    @invariant()
    def each_live_task_is_in_one_place(self) -> None:
        tasks = self.ledger.tasks
        leased = [lease.task.task_id for worker in self.ledger.pool.by_id.values() for lease in worker.leases.values()]
        queued = [task_id for queue in tasks.queues.values() for task_id in queue]
        places = Counter([*leased, *queued, *tasks.grace])
        assert places == Counter(dict.fromkeys(tasks.live, 1))

    @invariant()
    def the_journal_knows_what_the_ledger_knows(self) -> None:
        live = {row.task_id: row for row in self.rows.values() if row.stage}
        assert live == {task.task_id: task.row() for task in self.ledger.tasks}
        ended = {row.task_id for row in self.rows.values() if not row.stage}
        assert ended == set(self.ledger.tasks.ended)

    @invariant()
    def nobody_is_idle_while_a_task_waits_that_they_can_do(self) -> None:
        for stage, queue in self.ledger.tasks.queues.items():
            for needs, lane in queue.lanes.items():
                free = self.ledger.pool.has_free(stage, needs)
                assert not free or all(task.excluded for task in lane.values())

    @invariant()
    def an_acknowledged_task_is_known_or_its_group_is_retired(self) -> None:
        for task_id in self.acked:
            known = task_id in self.ledger.tasks.live or self.ended[task_id] == 1
            assert known or self.groups[task_id] in self.retired

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for _ in range(600):  # one after the other, what nobody builds waits for its end in a queue of one
            if not self.ledger.tasks.live and not self.producer.pending:
                break
            self._settle(1)
            for worker in self.workers.values():
                for task in list(worker.session.running.values()):
                    self._finish(worker, task)
        self._settle(4)
        assert self.ledger.tasks.live == {}
        assert self.producer.pending == 0
        assert all(not worker.session.held for worker in self.workers.values())
        self.counters_add_up()
        self.each_task_ends_once_and_each_stage_accepts_once()


TestPipeline = Pipeline.TestCase
TestPipeline.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
