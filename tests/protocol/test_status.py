"""A viewer sees how the system stands, over its own socket, and can change nothing whatever it sends."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kbrl_async.cli.top import Watcher
from kbrl_async.errors import UserError
from kbrl_async.keyring import Keyring, client_keys
from kbrl_async.runs.status_client import StatusClient
from protocols import events as ev
from protocols import framing
from protocols import messages as msg
from protocols.auth import Role
from protocols.ledger import Ledger, LedgerOptions
from protocols.messages import Stage
from protocols.sockets import connect_dealer
from services.broker.options import BrokerOptions
from services.broker.server import BrokerServer
from services.broker.status import StatusDesk, Troubles
from services.runtime import Producer, Worker, addresses
from tests.brokers import beside, endpoints, serving

DEADLINE_S = 100.0


def options(folder: Path, metrics_s: float = 0.05) -> BrokerOptions:
    ledger = LedgerOptions(heartbeat_s=0.05, missed_beats=1000)
    return beside(folder, ledger=ledger, metrics_s=metrics_s, status_address=addresses(folder).status)


@contextlib.asynccontextmanager
async def watched(folder: Path, **more: float) -> AsyncIterator[BrokerServer]:
    async with serving(BrokerServer(options(folder, **more))) as broker, asyncio.timeout(DEADLINE_S):
        yield broker


async def ask(folder: Path) -> msg.StatusReport:
    with StatusClient(addresses(folder).status) as client:
        report = await asyncio.to_thread(client.ask, DEADLINE_S)
    assert report is not None
    return report


def test_a_viewer_sees_queues_workers_and_what_a_worker_tells(tmp_path: Path) -> None:
    async def play() -> msg.StatusReport:
        async def hangs(_: msg.Task, __: list[bytes]) -> None:
            await asyncio.sleep(60)

        async with watched(tmp_path) as broker, Producer(addresses(tmp_path).submit) as producer:
            worker = Worker(addresses(tmp_path).work, "farm-1", [Stage.COMPILE], 2, hangs)
            worker.meter.facts["reward_mean"] = 0.25
            working = asyncio.create_task(worker.run())
            for number in range(3):
                await producer.submit(f"t{number}", Stage.COMPILE, [b"x"])
            while not (broker.ledger.pool.by_id and broker.ledger.pool.by_id["farm-1"].load.facts):
                await asyncio.sleep(0.01)
            report = await ask(tmp_path)
            worker.drain_s = 0
            worker.stop()
            await working
            return report

    report = asyncio.run(play())
    compile_stage = next(stage for stage in report.stages if stage.stage == "compile")
    assert (compile_stage.queued, compile_stage.in_flight, compile_stage.workers, compile_stage.credit) == (1, 2, 1, 2)
    (worker,) = report.workers
    assert (worker.worker_id, worker.leases, worker.suspect) == ("farm-1", 2, False)
    assert worker.load.facts == {"reward_mean": 0.25}
    assert worker.load.cpu >= 0
    assert report.counters["submitted"] == 3
    assert report.run == tmp_path.name


FORBIDDEN: list[msg.Message] = [
    msg.Submit("t9", "generate"),
    msg.Retire("g1"),
    msg.Hello("evil", "i", ["compile", "train"], 64, policy_version=99),
    msg.Beat(64),
    msg.Result("t1", "1.1:train:t1", "trained", policy_version=99),
    msg.Nack("1.1:compile:t1", "no"),
    msg.Bye(),
    msg.QuietRequest("q", "host/gpu0", 60.0),
    msg.Drain("stop"),
]


def test_a_viewer_can_neither_submit_nor_credit_nor_publish(tmp_path: Path) -> None:
    async def play() -> None:
        async with watched(tmp_path) as broker, Producer(addresses(tmp_path).submit) as producer:
            await producer.submit("t1", Stage.COMPILE, [b"x"], group_id="g1")
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            viewer = connect_dealer(context, addresses(tmp_path).status, secrets.token_hex(8).encode())
            for message in FORBIDDEN:
                viewer.send_multipart(framing.encode(message, [b"payload"]))
            viewer.send_multipart([b"no", b"message"])
            viewer.send_multipart(framing.encode(msg.StatusRequest("last")))
            ready = await asyncio.to_thread(viewer.poll, DEADLINE_S * 1000)
            answer, _ = framing.decode(viewer.recv_multipart())
            assert ready
            assert isinstance(answer, msg.StatusReport)
            assert answer.token == "last", "nothing but the request was answered"
            assert viewer.poll(0) == 0
            assert broker.desk is not None
            assert broker.desk.refused == len(FORBIDDEN) + 1
            assert not broker.ledger.pool.by_id
            assert list(broker.ledger.tasks.live) == ["t1"]
            assert (broker.ledger.policy_version, broker.ledger.counters["submitted"]) == (0, 1)
            viewer.close(linger=0)
            context.term()

    asyncio.run(play())


def story() -> list[ev.Event]:
    """A task that is leased, handed on, lost and refused, with a worker that comes and goes."""
    hello = msg.Hello("farm-1", "a", ["compile", "bench"], 1)
    return [
        ev.FromProducer(b"p", msg.Submit("t1", "compile", "g1")),
        ev.FromProducer(b"p", msg.Submit("t2", "compile", "g1")),
        ev.FromWorker(b"w", hello),
        ev.FromWorker(b"w", msg.Beat(1, [], msg.Load(0.5))),
        ev.FromWorker(b"w", msg.Result("t1", "1.1:compile:t1", "bench")),
        ev.FromWorker(b"w", msg.Nack("1.2:bench:t1", "no space left")),
        ev.Tick(),
        ev.PeerLost(b"w"),
        ev.FromWorker(b"v", msg.Hello("farm-2", "b", ["compile", "bench"], 2)),
        ev.FromProducer(b"p", msg.Retire("g1")),
    ]


def test_asking_changes_nothing_in_the_ledger() -> None:
    asked, left_alone = Ledger(), Ledger()
    for second, event in enumerate(story()):
        asked.status(float(second))
        assert asked.handle(event, float(second)) == left_alone.handle(event, float(second))
        asked.status(float(second))
        assert asked.stats(float(second)) == left_alone.stats(float(second))


def test_what_a_worker_refuses_is_told_with_its_reason_and_only_counts_up_when_repeated() -> None:
    ledger, troubles = Ledger(), Troubles(lambda: 7.0)
    for event in story():
        troubles.saw(event, ledger)
        ledger.handle(event, 0.0)
    nack, lost = troubles.listed()
    assert (nack.who, nack.what, nack.at) == ("farm-1", "gave a task back: no space left", 7.0)
    assert lost.what.startswith("is gone without a word")
    for _ in range(3):
        troubles.add("x", "again")
    assert [trouble.what for trouble in troubles.listed()][-1] == "again (×3)"


def test_growing_counters_are_troubles_and_what_was_before_is_not() -> None:
    troubles = Troubles()
    troubles.counted({"expired": 5})
    troubles.counted({"expired": 5})
    assert troubles.listed() == []
    troubles.counted({"expired": 7})
    assert [trouble.what for trouble in troubles.listed()] == ["a lease ran out: no heartbeat came any more (×2)"]


def test_however_many_ask_a_report_is_made_once_in_a_while() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, viewer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.bind("inproc://status")
    viewer.connect("inproc://status")
    made: list[int] = []
    now = 0.0

    def report() -> msg.StatusReport:
        made.append(1)
        return msg.StatusReport()

    desk = StatusDesk(router, report, lambda: now)
    for number in range(50):
        viewer.send_multipart(framing.encode(msg.StatusRequest(str(number))))
    until = time.monotonic() + DEADLINE_S
    answers: list[str] = []
    while len(answers) < 50 and time.monotonic() < until:
        desk.serve()
        while viewer.poll(0):
            answer, _ = framing.decode(viewer.recv_multipart())
            assert isinstance(answer, msg.StatusReport)
            answers.append(answer.token)
    viewer.close()
    router.close()
    context.term()
    assert answers == [str(number) for number in range(50)]
    assert len(made) == 1


def test_top_says_that_the_broker_is_away_and_goes_on_with_the_next_one(tmp_path: Path) -> None:
    async def play() -> list[str]:
        seen = []
        with StatusClient(addresses(tmp_path).status) as client:
            watcher = Watcher(client.ask, None, "x")
            async with watched(tmp_path):
                seen.append((await asyncio.to_thread(watcher.look, DEADLINE_S)).state)
            seen.append((await asyncio.to_thread(watcher.look, 0.2)).state)
            async with watched(tmp_path, metrics_s=600.0):  # it has measured nothing yet
                view = await asyncio.to_thread(watcher.look, DEADLINE_S)
                seen += [view.state, str(view.epoch), str(view.rates)]
        return seen

    assert asyncio.run(play()) == ["running", "away", "running", "2", "None"]


def test_a_drained_broker_that_answers_no_more_has_stopped() -> None:
    reports = [msg.StatusReport(draining=True, run="x"), None]
    watcher = Watcher(lambda _: reports.pop(0), None)
    assert [watcher.look().state, watcher.look().state] == ["stopping", "stopped"]


def test_over_tcp_an_observer_with_its_key_sees_and_a_worker_with_its_own_does_not(tmp_path: Path) -> None:
    async def play() -> tuple[msg.StatusReport | None, msg.StatusReport | None]:
        ring = Keyring(tmp_path / "keys")
        observer, worker = (client_keys(ring.new(role, "host7")) for role in (Role.OBSERVER, Role.BENCH))
        address = "tcp://127.0.0.1:*"
        keyed = msgspec.structs.replace(options(tmp_path), status_address=address, keys=str(ring.folder))
        async with serving(BrokerServer(keyed)) as broker:
            address = endpoints(broker)[-1]
            with StatusClient(address, observer) as viewer, StatusClient(address, worker) as intruder:
                seen = await asyncio.to_thread(viewer.ask, DEADLINE_S)
                return seen, await asyncio.to_thread(intruder.ask, 0.3)

    seen, refused = asyncio.run(play())
    assert seen is not None
    assert seen.run == tmp_path.name
    assert refused is None


def test_whoever_has_no_key_gets_no_answer_and_waits_no_longer_than_asked(tmp_path: Path) -> None:
    """Once its handshake was refused libzmq has no connection left, and a plain send would wait for one for ever."""

    async def play() -> msg.StatusReport | None:
        keyed = msgspec.structs.replace(options(tmp_path), status_address="tcp://127.0.0.1:*", keys=str(ring.folder))
        async with serving(BrokerServer(keyed)) as broker:
            with StatusClient(endpoints(broker)[-1]) as plain:
                await asyncio.sleep(0.3)
                return await asyncio.wait_for(asyncio.to_thread(plain.ask, 0.2), DEADLINE_S)

    ring = Keyring(tmp_path / "keys")
    ring.new(Role.OBSERVER, "host7")
    assert asyncio.run(play()) is None


@pytest.mark.parametrize("address", ["nonsense", "tcp://"])
def test_a_wrong_address_is_an_error_with_a_cure(address: str) -> None:
    with pytest.raises(UserError):
        StatusClient(address)
