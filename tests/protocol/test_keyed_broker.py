"""A broker on a keyed TCP socket: who gets in, what a stolen key can do, and that a revoked one is out at once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kbrl_async.errors import HostError, UserError
from kbrl_async.keyring import client_keys
from protocols import framing
from protocols import messages as msg
from protocols.auth import Role
from protocols.sockets import ClientKeys, connect_dealer
from services.broker.options import BrokerOptions
from services.broker.server import BrokerServer
from services.runtime import HandlerOutcome, Producer
from tests.brokers import ends, until, working
from tests.protocol.keyed import ANY, Site, scenario


@pytest.fixture(autouse=True)
def _small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.sockets.MAX_REMOTE_BYTES", 1 << 20)


async def judges(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
    return HandlerOutcome("score", [b"report"])


HELLO = msg.Hello("host7.1", "a1", ["bench"], 1)


@scenario
async def test_a_task_goes_its_way_between_keyed_processes(site: Site) -> None:
    aggregator = site.ring.local(Role.AGGREGATOR)
    workers = [
        site.worker("host7.1", "bench", site.guest, judges),
        site.worker("local.agg", "score", aggregator, ends),
    ]
    async with working(*workers), Producer(site.submit, keys=aggregator) as producer:
        assert await producer.submit("t1", "bench", [b"request"])
        await until(lambda: site.broker.ledger.counters["finished"] == 1)


@scenario
async def test_a_stranger_gets_no_answer(site: Site) -> None:
    stranger = ClientKeys(*zmq.curve_keypair(), site.guest.server)
    assert await site.is_ignored(site.dealer(stranger), HELLO)
    assert not site.broker.ledger.pool.by_id
    gate = site.broker.gate
    assert gate is not None
    await until(lambda: gate.handshakes_refused > 0)


@scenario
async def test_a_peer_that_expects_another_broker_says_nothing_to_this_one(site: Site) -> None:
    fooled = ClientKeys(site.guest.public, site.guest.secret, zmq.curve_keypair()[0])
    assert await site.is_ignored(site.dealer(fooled), HELLO)


@scenario
async def test_nobody_gets_in_without_encryption(site: Site) -> None:
    plain = connect_dealer(site.context, site.work.replace("0.0.0.0", "127.0.0.1"), b"route")
    assert await site.is_ignored(plain, HELLO)
    assert await site.is_ignored(plain, HELLO), "nor once its connection was taken away"


@scenario
async def test_a_bench_key_opens_no_groups_and_ends_none(site: Site) -> None:
    dealer = site.dealer(site.guest, site.submit)
    assert await site.is_ignored(dealer, msg.Submit("forged", "train", "g1"), (b"batch",))
    assert await site.is_ignored(dealer, msg.Retire("g1"))
    assert "forged" not in site.broker.ledger.tasks.live


@scenario
async def test_a_bench_key_publishes_no_policy(site: Site) -> None:
    dealer = site.dealer(site.guest)
    assert await site.answer(dealer, msg.Hello("host7.1", "a1", ["bench"], 1, policy_version=99)) == "Drain"
    assert await site.is_ignored(dealer, msg.Result("b1", "1.1:train:b1", "trained", 99))
    assert site.broker.ledger.policy_version == 0


@scenario
async def test_a_worker_with_the_wrong_key_ends_and_says_why(site: Site) -> None:
    worker = site.worker("host7.1", "compile", site.guest, judges)
    with pytest.raises(HostError, match=r"a bench does not work on .*kbrl keys new ROLE"):
        await worker.run()


@scenario
async def test_a_key_can_not_pose_as_a_worker_of_another(site: Site) -> None:
    assert await site.answer(site.dealer(site.guest), msg.Hello("local.1", "a1", ["bench"], 1)) == "Drain"
    assert not site.broker.ledger.pool.by_id


@scenario
async def test_a_revoked_key_is_out_within_seconds_and_without_a_restart(site: Site) -> None:
    dealer = site.dealer(site.guest)
    async with Producer(site.submit, keys=site.ring.local(Role.AGGREGATOR)) as producer:
        await producer.submit("t1", "bench", [b"request"])
    assert await site.answer(dealer, HELLO) == "Welcome"  # with work at once: who is idle and silent is forgotten
    assert site.broker.ledger.tasks.live["t1"].lease is not None
    site.ring.revoke(Role.BENCH, "host7")
    await until(lambda: not site.broker.ledger.pool.by_id)
    assert "t1" in site.broker.ledger.tasks.queues["bench"], "another gets what it was given"
    assert await site.answer(dealer, msg.Hello("host7.1", "a2", ["bench"], 1)) != "Welcome"
    assert site.broker.gate is not None
    gate = site.broker.gate
    await until(lambda: gate.guard.refused["unknown key"] > 0)
    assert not site.broker.ledger.pool.by_id
    assert await site.is_ignored(site.dealer(site.guest), HELLO), "it does not get in again either"


@scenario
async def test_a_new_key_is_let_in_without_a_restart(site: Site) -> None:
    keys = client_keys(site.ring.new(Role.BENCH, "late"))
    worker = site.worker("late.1", "bench", keys, judges)
    async with working(worker):
        await until(lambda: "late.1" in site.broker.ledger.pool.by_id)


@scenario
async def test_a_key_that_floods_is_throttled_and_others_are_served(site: Site) -> None:
    flood = site.dealer(site.guest)
    assert await site.answer(flood, HELLO) == "Welcome"
    for _ in range(2000):
        flood.send_multipart(framing.encode(msg.Beat(1)))
    assert await site.answer(site.dealer(site.ring.local(Role.BENCH)), msg.Hello("local.1", "a", ["bench"], 1))
    assert site.broker.gate is not None
    gate = site.broker.gate
    await until(lambda: gate.guard.refused["rate"] > 100)


@scenario
async def test_a_frame_beyond_the_limit_cuts_the_connection_and_nothing_else(site: Site) -> None:
    async with Producer(site.submit, keys=site.ring.local(Role.AGGREGATOR)) as producer:
        site.dealer(site.guest).send_multipart(framing.encode(HELLO, [b"x" * (2 << 20)]))
        assert await producer.submit("t1", "bench", [])
    assert not site.broker.ledger.pool.by_id


@scenario
async def test_connections_are_counted_and_beyond_the_limit_refused(site: Site) -> None:
    gate = site.broker.gate
    assert gate is not None
    first = site.dealer(site.guest)
    assert await site.answer(first, HELLO) == "Welcome"
    await until(lambda: gate.connections == 1)
    gate.max_connections = 1
    assert await site.is_ignored(site.dealer(site.ring.local(Role.BENCH)), msg.Hello("local.1", "a", ["bench"], 1))
    first.close()
    await until(lambda: gate.connections <= 1)


@scenario
async def test_viewers_and_workers_keep_to_their_own_doors(site: Site) -> None:
    viewer = site.ring.local(Role.OBSERVER)
    assert await site.answer(site.dealer(viewer, site.status), msg.StatusRequest("x")) == "StatusReport"
    assert await site.is_ignored(site.dealer(viewer), msg.StatusRequest("x"))
    assert await site.is_ignored(site.dealer(site.guest, site.status), msg.StatusRequest("x"))


@scenario
async def test_no_secret_is_in_what_the_broker_writes(site: Site) -> None:
    await site.answer(site.dealer(site.guest), HELLO)
    await until(lambda: (site.folder / "metrics" / "system.jsonl").exists())
    written = b"".join(path.read_bytes() for path in site.folder.glob("*") if path.is_file())
    written += (site.folder / "metrics" / "system.jsonl").read_bytes()
    for secret in _secrets(site):
        assert secret not in written


def _secrets(site: Site) -> Iterator[bytes]:
    yield site.guest.secret
    yield site.ring.server().secret
    for role in Role:
        yield site.ring.local(role).secret


def test_no_secret_is_in_the_log_of_a_broker_process(tmp_path: Path) -> None:
    site = Site(tmp_path)
    code = (
        "import asyncio, sys\n"
        "from services.broker.options import BrokerOptions\nfrom services.broker.server import BrokerServer\n"
        "from kbrl_async.runs.telemetry import logs\nfrom pathlib import Path\n"
        "logs.configure('broker', Path(sys.argv[1]), 'debug')\n"
        f"b = BrokerServer(BrokerOptions(sys.argv[1], {ANY!r}, {ANY!r}, keys=sys.argv[1] + '/keys'))\n"
        "async def main():\n"
        "    stop = asyncio.Event()\n    asyncio.get_running_loop().call_later(0.5, stop.set)\n    await b.run(stop)\n"
        "    print(b.options, b.gate.keys, b.gate.guard.peers)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=True, timeout=60)
    site.context.term()
    logged = b"".join(path.read_bytes() for path in (tmp_path / "logs").glob("*"))
    assert b"broker ready" in logged
    for secret in _secrets(site):
        assert secret not in done.stdout + done.stderr + logged


def test_a_broker_whose_folder_has_no_keys_says_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="kbrl keys new all"):
        asyncio.run(BrokerServer(BrokerOptions(str(tmp_path), ANY, ANY, keys=str(tmp_path))).run())
