"""Slow disks, clocks that jump, names that do not resolve, and peers that vanish without a word."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import math
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest

from protocols import messages as msg
from protocols.auth import Role
from protocols.names import unresolved
from services.broker.journal import Journal
from services.broker.server import BrokerServer
from services.broker.status import WINDOW_S, RecentRates
from services.runtime import HandlerOutcome, Producer, Worker
from tests.brokers import endpoints, until
from tests.links import Host, LinkError
from tests.protocol.keyed import Site
from tests.protocol.live import LEDGER, TTL_S, Run, scenario

ROOT = Path(__file__).resolve().parents[2]
STALL_S = 2.0
assert STALL_S > TTL_S


# ── a slow disk ───────────────────────────────────────────────────────────────────────────────────────────────────


@scenario
async def test_workers_that_beat_while_the_disk_held_the_broker_up_keep_their_leases(run: Run) -> None:
    attempts = []

    async def works(task: msg.Task, __: list[bytes]) -> HandlerOutcome:
        attempts.append(task.attempt)
        await asyncio.to_thread(time.sleep, 0.01)
        return HandlerOutcome()

    process = await _elsewhere(run.work)
    try:
        async with Producer(run.submit) as producer:
            await producer.submit("slow", "bench", [])
            await until(lambda: any(w.leases for w in run.broker.ledger.pool.by_id.values()))
            run.broker.awake.most_s = math.inf  # it is enough that who has beaten is heard first
            commit = Journal.commit
            stalls: list[float] = []

            def stalled(journal: Journal, counters: dict[str, int]) -> None:
                if not stalls:
                    stalls.append(STALL_S)
                    time.sleep(STALL_S)  # a disk whose fsync takes this long holds the broker's own loop
                commit(journal, counters)

            with patch.object(Journal, "commit", stalled):
                async with run.running(run.worker("farm", "compile", works)):
                    await producer.submit("t1", "compile", [])
                    await until(lambda: run.count("finished") == 1)
                (process.stdin or _nobody()).write(b"go\n")
                await until(lambda: run.count("finished") == 2)
        assert stalls
        # not `duplicates`: a result that waits for its Ack is sent again
        assert (run.count("expired"), run.count("lost"), run.count("finished")) == (0, 0, 2)
        assert attempts == [1], "nothing was done twice"
    finally:
        process.kill()
        await process.wait()


BENCH = """
import asyncio, sys
from services.runtime import HandlerOutcome, Worker
async def work(task, frames):
    await asyncio.to_thread(sys.stdin.readline)
    return HandlerOutcome()
asyncio.run(Worker(sys.argv[1], "bench", ["bench"], 1, work).run())
"""


async def _elsewhere(address: str) -> asyncio.subprocess.Process:
    """A worker with a loop of its own: that of the test stands still with the broker."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", BENCH, address, env=environment, stdin=asyncio.subprocess.PIPE
    )


def _nobody() -> asyncio.StreamWriter:
    raise AssertionError("it was started with a pipe")


@scenario
async def test_time_in_which_the_broker_itself_stood_still_costs_nobody_a_lease(run: Run) -> None:
    """Whoever stood still with it, such as all of a host that is overloaded, can't have beaten meanwhile."""
    stood_s, held = [0.0], asyncio.Event()

    async def works(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
        await held.wait()
        return HandlerOutcome()

    await run.crash()
    run.clock = lambda: time.monotonic() + stood_s[0]
    await run.start()
    async with run.running(run.worker("farm", "compile", works)), Producer(run.submit) as producer:
        await producer.submit("t1", "compile", [])
        await until(lambda: any(w.leases for w in run.broker.ledger.pool.by_id.values()))
        for _ in range(3):
            stood_s[0] += 3600.0
            await asyncio.sleep(4 * LEDGER.heartbeat_s)
        held.set()
        await until(lambda: run.count("finished") == 1)
    assert (run.count("expired"), run.count("lost")) == (0, 0)


# ── clocks ────────────────────────────────────────────────────────────────────────────────────────────────────────

STAMPS = {
    "kbrl_async/lab/self_test.py": "when a benchmark was made",
    "kbrl_async/kernels/backends/building/store.py": "files have no other time than the host's; six hours of margin",
    "kbrl_async/cli/logs.py": "--since is a time of day",
    "kbrl_async/lab/workbench.py": "when a kernel was verified, as an agent's history shows it",
    "kbrl_async/runs/telemetry/sinks.py": "when a figure was taken, as other services want it",
    "services/verification/desk.py": "when a question was asked; it may have been before a restart",
    "services/verification/executors.py": "when a question was asked, in its record",
    "kbrl_async/cli/runs.py": "how long ago a run began",
    "kbrl_async/cli/launch.py": "what is shown as left of a phase, by another process's stamp",
    "kbrl_async/runs/telemetry/progress.py": "when a phase's share was told, for other processes to show",
    "kbrl_async/cli/problems.py": "the date of an audit",
    "kbrl_async/learning/policies/exporting.py": "when an export was made",
    "kbrl_async/learning/policies/versions.py": "when a version was published",
    "kbrl_async/kernels/sandbox/scratch.py": "files have no other time than the host's; a folder may be kept longer",
    "kbrl_async/sampling/openai/engine.py": "stamps, and Retry-After as a date",
    "kbrl_async/sampling/tinker.py": "when an answer began and ended",
    "kbrl_async/sampling/transformers/engine.py": "when an answer began and ended",
    "kbrl_async/sampling/vllm/engine.py": "when an answer began and ended",
    "kbrl_async/runs/telemetry/tensorboard.py": "wall time of events",
    "kbrl_async/kernels/timing/peaks.py": "when peaks were measured",
    "kbrl_async/kernels/funnel/build.py": "when a build began and ended",
    "kbrl_async/kernels/verify/bench.py": "when a verdict began and ended",
    "services/broker/artifact_exchange.py": "how old a file of an upload is; files have no other time than the host's",
    "services/broker/server.py": "stamps of reports and metrics",
    "services/broker/status.py": "when a trouble was seen",
    "services/evaluator/outputs.py": "when an evaluation ended",
    "services/learner/actor.py": "when an update began and ended",
    "services/reward_aggregator/metrics_writer.py": "places the run's own clock among the broker's lines",
    "kbrl_async/runs/archive/recorder.py": "when a turn was scored",
    "kbrl_async/rollouts/manager.py": "when a rollout was asked for",
    "services/sampler/actor.py": "when an answer ended",
}
"""Modules that may ask for the time of day, and what for: never how long something takes or when it is due."""


def test_the_time_of_day_is_for_stamps_only_and_nothing_waits_for_it() -> None:
    found = {
        str(path.relative_to(ROOT))
        for room in ("kbrl_async", "protocols", "services")
        for path in (ROOT / room).rglob("*.py")
        if _asks_for_the_time_of_day(path.read_text())
    }
    assert found - STAMPS.keys() == set(), (
        "measure and wait by time.monotonic(); a stamp belongs in STAMPS, with its use"
    )
    assert STAMPS.keys() - found == set(), "these do not ask any more: take them out of STAMPS"


def _asks_for_the_time_of_day(source: str) -> bool:
    if not any(words in source for words in ("time.time", "from time", "datetime")):
        return False
    wall = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "today"), ("datetime", "utcnow")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "time" and {n.name for n in node.names} & {"time"}:
            return True
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if (owner, node.attr) in wall:
                return True
    return False


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_rates_and_their_window_do_not_follow_a_clock_that_jumps(jump_s: float) -> None:
    recent = RecentRates()

    def report(second: float) -> msg.StatusReport:
        load = msg.Load(done=round(10 * second))
        scorer = msg.WorkerStanding("a", stages=["score"], load=load)
        at = 1e9 + second + (jump_s if second > 5 else 0.0)
        return msg.StatusReport(at=at, uptime_s=second, workers=[scorer])

    for second in range(1, 100):
        recent.add(report(float(second)))
    found = recent.of(report(100.0))
    assert found["rollouts_per_s"] == pytest.approx(10.0)
    assert len(recent.reports) <= WINDOW_S + 2


@scenario
async def test_leases_and_deadlines_hold_while_the_time_of_day_jumps(run: Run) -> None:
    real = time.time
    patched = pytest.MonkeyPatch()
    held = asyncio.Event()

    async def works(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
        await held.wait()
        return HandlerOutcome()

    try:
        async with run.running(run.worker("farm", "compile", works)), Producer(run.submit) as producer:
            await producer.submit("t1", "compile", [])
            await until(lambda: any(w.leases for w in run.broker.ledger.pool.by_id.values()))
            for jump_s in (3600.0, -3600.0):
                patched.setattr(time, "time", lambda jump_s=jump_s: real() + jump_s)
                await asyncio.sleep(0.3)
            held.set()
            await until(lambda: run.count("finished") == 1)
        assert (run.count("expired"), run.count("lost")) == (0, 0)
    finally:
        patched.undo()


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_name_that_is_not_known_is_told_with_the_reason_of_the_resolver() -> None:
    def fails(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    told = unresolved("tcp://broker.example:5756", fails)
    assert told == "the name broker.example can't be resolved: Temporary failure in name resolution"
    assert unresolved("tcp://127.0.0.1:5756") == ""
    assert unresolved("tcp://[::1]:5756", lambda *_, **__: []) == ""
    assert unresolved("ipc:///tmp/a:b", fails) == ""


LATE = """
import asyncio, sys
from protocols import sockets
from services.runtime import HandlerOutcome, Worker, worker
worker.LONELY_S = 0.3
sockets.needs_keys = lambda address: False  # the name stands for loopback here
async def work(task, frames):
    return HandlerOutcome()
asyncio.run(Worker(sys.argv[1], "late", ["compile"], 1, work).run())
"""


def _may_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _may_unshare(), reason="a file of names of its own needs a mount namespace")
def test_a_worker_whose_brokers_name_resolves_late_says_so_and_joins_then(tmp_path: Path) -> None:
    names = tmp_path / "hosts"
    names.write_text("127.0.0.1 localhost\n")

    async def play() -> None:
        run = Run(tmp_path)
        run.options = msgspec.structs.replace(run.options, work_address="tcp://127.0.0.1:*")
        await run.start()
        await until(lambda: hasattr(run.broker, "ledger"))
        port = _port(run.broker)
        inside = 'mount --bind "$1" /etc/hosts && exec "$2" -c "$3" "$4"'
        words = [names, sys.executable, LATE, f"tcp://late.invalid:{port}"]
        process = await asyncio.create_subprocess_exec(
            "unshare", "-rm", "sh", "-c", inside, "sh", *map(str, words),
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(200), Producer(run.submit) as producer:
                assert process.stdout is not None
                line = (await process.stdout.readline()).decode()
                assert "the name late.invalid can't be resolved" in line
                await producer.submit("t1", "compile", [])
                with names.open("a") as file:
                    file.write("127.0.0.1 late.invalid\n")
                await until(lambda: run.count("finished") == 1)
        finally:
            process.kill()
            await process.wait()
            await run.crash()

    asyncio.run(asyncio.wait_for(play(), 200))


def _port(broker: BrokerServer) -> int:
    return int(endpoints(broker)[1].rpartition(":")[2])


# ── a peer that vanishes ──────────────────────────────────────────────────────────────────────────────────────────


class Line:
    """A TCP line to a local port that can go dead: nothing passes, not even an end, and nobody is told."""

    def __init__(self, port: int) -> None:
        self.is_dead = self._is_over = False
        self._far = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._other: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._relay)

    def __enter__(self) -> Line:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()
        for one in [self._listener, *self._other]:
            one.close()

    def is_called(self) -> bool:
        """Whether somebody wants a new line; a dead one does not answer."""
        return bool(select.select([self._listener], [], [], 0)[0])

    def _relay(self) -> None:
        while not self._is_over:
            if self.is_dead:
                time.sleep(0.02)
                continue
            for ready in select.select([self._listener, *self._other], [], [], 0.02)[0]:
                if ready is self._listener:
                    near, far = ready.accept()[0], socket.create_connection(self._far)
                    self._other |= {near: far, far: near}
                elif ready in self._other:
                    self._pass_on(ready)

    def _pass_on(self, ready: socket.socket) -> None:
        data = b""
        with contextlib.suppress(ConnectionError):
            data = ready.recv(65536)
            self._other[ready].sendall(data)
        if not data:
            other = self._other.pop(ready)
            del self._other[other]
            ready.close()
            other.close()


def _open_sockets() -> int:
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return found


def test_a_peer_that_vanishes_without_a_word_loses_its_lease_and_finds_back_without_a_second_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocols.sockets.HEARTBEAT_MS", 100)
    monkeypatch.setattr("protocols.sockets.HEARTBEAT_TIMEOUT_MS", 3000)

    async def play() -> None:
        site = Site(tmp_path)
        site.broker.options = msgspec.structs.replace(site.broker.options, ledger=LEDGER)
        await site.start()
        hang, done = asyncio.Event(), []

        async def waits(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
            await hang.wait()
            return HandlerOutcome("score", [b"late"])

        async def judges(task: msg.Task, __: list[bytes]) -> HandlerOutcome:
            done.append(task.attempt)
            return HandlerOutcome("score", [b"report"])

        try:
            with Line(int(site.work.rpartition(":")[2])) as line:
                keys = site.ring.local(Role.BENCH)
                gone = Worker(f"tcp://127.0.0.1:{line.port}", "local.gone", ["bench"], 1, waits, keys=keys)
                other = site.worker("local.other", "bench", keys, judges)
                tasks = [asyncio.create_task(gone.run())]
                producer_keys = site.ring.local(Role.AGGREGATOR)
                async with Producer(site.submit, keys=producer_keys) as producer:
                    await producer.submit("t1", "bench", [])
                    await until(lambda: any(w.leases for w in site.broker.ledger.pool.by_id.values()))
                    tasks.append(asyncio.create_task(other.run()))
                    await until(lambda: other.welcomed)
                    gate = site.broker.gate
                    assert gate is not None
                    await until(lambda: gate.connections == 3)
                    sockets = _open_sockets()
                    line.is_dead = True
                    await until(lambda: len(done) == 1)
                    assert done == [2], "the second attempt is somebody else's"
                    await until(line.is_called)  # it has given up its old line
                    line.is_dead = False
                    await until(lambda: gone.welcomed and gate.connections == 3)  # it finds back; its old line is gone
                    await until(lambda: _open_sockets() <= sockets)
                    hang.set()
                    await until(lambda: not any(w.leases for w in site.broker.ledger.pool.by_id.values()))
                    counters = site.broker.ledger.counters
                    assert counters["lost"] == 1, "by its time to live, or as soon as its line was found dead"
                    assert counters["finished"] + len(site.broker.ledger.tasks.live) == 1
                gone.stop()
                other.stop()
                await asyncio.gather(*tasks)
        finally:
            await site.stop()

    asyncio.run(asyncio.wait_for(play(), 200))


QUIETLY = """
import asyncio, sys
from kbrl_async.keyring import client_keys
from services.runtime import HandlerOutcome, Worker
async def work(task, frames):
    await asyncio.sleep(3600)
asyncio.run(Worker(sys.argv[1], "away.bench", ["bench"], 1, work, keys=client_keys(sys.argv[2])).run())
"""


def test_a_host_that_is_cut_off_for_good_leaves_no_connection_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocols.sockets.KEEPALIVE_S", (1, 1, 1))
    monkeypatch.setattr("protocols.sockets.UNSENT_MS", 1000)
    host = Host(7)
    try:
        host.open()
    except LinkError as error:
        host.close()
        pytest.skip(f"no host of our own: {error}")

    async def play() -> None:
        site = Site(tmp_path)
        key = site.ring.new(Role.BENCH, "away")
        await site.start()
        gate = site.broker.gate
        assert gate is not None
        try:
            address = f"tcp://{host.link.here}:{site.work.rpartition(':')[2]}"
            words = (sys.executable, "-c", QUIETLY, address, str(key))
            host.start(*words, environment={**os.environ, "PYTHONPATH": str(ROOT)})
            await until(lambda: bool(site.broker.ledger.pool.by_id))
            assert gate.connections == 1
            host.link.partition()
            await until(lambda: gate.connections == 0)
        finally:
            await site.stop()

    try:
        asyncio.run(asyncio.wait_for(play(), 200))
    finally:
        host.close()
