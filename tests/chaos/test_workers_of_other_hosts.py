"""`kbrl worker`: a farm and a bench that share no folder with the broker build, verify and time a real candidate."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from kbrl_async.keyring import Keyring
from kbrl_async.runs.config import agreed, load
from protocols import messages as msg
from protocols.auth import Role
from protocols.limits import LedgerOptions
from protocols.records import (
    BenchReport,
    BuildReport,
    Candidate,
    Fault,
    Generation,
    Problem,
    RolloutRequest,
    SamplingParams,
)
from protocols.rollout import Record
from services.broker.options import BrokerOptions
from services.broker.server import BrokerServer
from services.runtime import HandlerOutcome, Producer, Worker
from tests.brokers import endpoints, serving, until, working
from tests.candidates import affine, elementwise

PROBLEM = Problem("L1/01_double", 1, "double", affine(shape="64, 256"))
CANDIDATE = Candidate(elementwise("2 * x[i] + 1"), "c")
ANY = "tcp://0.0.0.0:*"
PATIENCE_S = 250.0


def start_worker(kind: str, site: Path, address: str, keys: Path) -> subprocess.Popen[bytes]:
    """In a folder of its own, as on another host."""
    home = site / kind
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KBRL_")}
    command = [
        sys.executable, "-m", "kbrl_async", "worker", kind, "--connect", address, "--keys", str(keys),
        f"cache_path={home / 'cache'}",
    ]  # fmt: skip
    output = (home / "output").open("wb")
    try:
        return subprocess.Popen(
            command, env={**environment, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    finally:
        output.close()


def test_a_candidate_is_built_on_one_host_and_timed_on_another(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys")
    ring.new(Role.AGGREGATOR, "local")
    issued = {kind: ring.new(Role(kind), f"host-{kind}") for kind in ("compile", "bench")}
    scored: asyncio.Future[list[bytes]] | None = None

    async def score(_: msg.Task, frames: list[bytes]) -> HandlerOutcome:
        assert scored is not None
        scored.set_result(frames)
        return HandlerOutcome()

    async def play() -> list[bytes]:
        nonlocal scored
        scored = asyncio.get_running_loop().create_future()
        run = load(overrides=["timing_bench.cap_s=0.02", "timing_bench.deadline_s=20", "timing_bench.max_pairs=9"])
        ledger = LedgerOptions(settings=agreed.encode(run))
        options = BrokerOptions(str(tmp_path / "run"), ANY, ANY, keys=str(ring.folder), ledger=ledger)
        async with serving(BrokerServer(options)) as broker:
            submit, work = endpoints(broker)
            local = ring.local(Role.AGGREGATOR)
            async with working(Worker(work, "local.agg", ["score"], 1, score, keys=local)):
                workers = [start_worker(kind, tmp_path, work, folder) for kind, folder in issued.items()]
                try:
                    async with asyncio.timeout(PATIENCE_S), Producer(submit, keys=local) as producer:
                        await producer.submit("g1.r0.t0", "compile", record(), "g1", needs="c")
                        frames = await scored
                        for worker in workers:
                            worker.send_signal(signal.SIGTERM)
                        await until(lambda: broker.ledger.pool.by_id.keys() <= {"local.agg"})
                finally:
                    for worker in workers:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(worker.pid, signal.SIGKILL)
                        worker.wait()
            assert broker.ledger.counters["lost"] == 0, "they have left in good order"
            return frames

    _, _, built, judged = asyncio.run(play())
    build, report = msgspec.msgpack.decode(built, type=BuildReport), msgspec.msgpack.decode(judged, type=BenchReport)
    assert build.fault is Fault.OK
    assert report.verdict.fault is Fault.OK, report.verdict
    assert report.timing is not None
    assert report.timing.n <= 9, "the run's settings, which came from the broker"
    assert build.worker_id.startswith("host-compile.")
    assert report.worker_id.startswith("host-bench.")
    (address,) = set(build.artifacts.values())
    places = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob(f"{address}.so")}
    assert places == {"run", "compile", "bench"}, "it travelled by hash, through the broker"


def record() -> list[bytes]:
    request = RolloutRequest("g1.r0", "g1", PROBLEM, "prompt", "c", SamplingParams(64))
    written = Generation(0, [1], [2], [-0.5], "text", "stop", CANDIDATE)
    return Record.of(request, written).encode()
