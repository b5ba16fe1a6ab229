"""Broker, workers and producers over real sockets: what happens when each of them dies, hangs or talks nonsense."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq

from kbrl_async.errors import AddressTaken, DiskFull, InfraError, KbrlError, PolicyMismatch
from protocols import framing
from protocols import messages as msg
from protocols.rollout import RecordError
from protocols.sockets import connect_dealer
from services.broker.options import BrokerOptions
from services.broker.server import BrokerServer
from services.broker.status import StatusDesk
from services.runtime import HandlerOutcome, Producer
from tests.brokers import PATIENCE_S, beside, ends, until
from tests.protocol.live import LEDGER, TTL_S, Run, patient_scenario, scenario

WEDGE_S = 0.6


async def hangs(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
    await asyncio.sleep(60)
    return HandlerOutcome()


def to(stage: str, frame: bytes) -> Callable[[msg.Task, list[bytes]], Awaitable[HandlerOutcome]]:
    async def handler(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
        return HandlerOutcome(stage, [frame])

    return handler


@scenario
async def test_a_record_grows_by_one_frame_a_stage(run: Run) -> None:
    seen: list[list[bytes]] = []

    async def scores(_: msg.Task, frames: list[bytes]) -> HandlerOutcome:
        seen.append(frames)
        return HandlerOutcome()

    farm = run.worker("farm", "compile", to("bench", b"build"))
    bench = run.worker("bench", "bench", to("score", b"timing"))
    async with run.running(farm, bench, run.worker("agg", "score", scores)), Producer(run.submit) as producer:
        assert await producer.submit("t1", "compile", [b"request"])
        await until(lambda: bool(seen))
    assert seen == [[b"request", b"build", b"timing"]]


@scenario
async def test_a_known_task_is_not_new(run: Run) -> None:
    async with Producer(run.submit) as producer:
        assert await producer.submit("t1", "compile", [])
        assert not await producer.submit("t1", "compile", [])


@scenario
async def test_a_broker_that_crashes_mid_work_loses_nothing(run: Run) -> None:
    done: list[str] = []

    async def works(task: msg.Task, frames: list[bytes]) -> HandlerOutcome:
        await asyncio.sleep(0.02)
        done.append(task.task_id)
        assert frames == [task.task_id.encode()]
        return HandlerOutcome()

    async with (
        run.running(run.worker("farm", "compile", works, slots=4)),
        Producer(run.submit, silence_s=0.1) as producer,
    ):
        names = [f"t{number}" for number in range(40)]
        submissions = [asyncio.create_task(producer.submit(name, "compile", [name.encode()])) for name in names]
        for crash_at in (10, 25):
            await until(lambda crash_at=crash_at: len(done) >= crash_at)  # type: ignore[misc]
            await run.crash()
            await run.start()
        await asyncio.gather(*submissions)
        await until(lambda: run.count("finished") == 40)
    assert set(done) == set(names)
    assert run.count("submitted") == 40
    assert run.broker.ledger.epoch == 3


@scenario
async def test_work_that_runs_through_a_broker_crash_is_adopted_and_not_done_twice(run: Run) -> None:
    release = asyncio.Event()
    started: list[str] = []

    async def waits(task: msg.Task, _: list[bytes]) -> HandlerOutcome:
        started.append(task.task_id)
        await release.wait()
        return HandlerOutcome()

    async with run.running(run.worker("farm", "compile", waits)), Producer(run.submit) as producer:
        await producer.submit("t1", "compile", [])
        await until(lambda: bool(started))
        await run.crash()
        await run.start()
        await asyncio.sleep(TTL_S + 0.4)  # nobody may lose what is beaten for
        release.set()
        await until(lambda: run.count("finished") == 1)
    assert started == ["t1"]


@patient_scenario
async def test_a_worker_that_is_killed_loses_its_task_to_another(run: Run) -> None:
    code = (
        "import asyncio, sys\nfrom services.runtime import Worker\n"
        "async def h(t, f):\n    print('got it', flush=True)\n    await asyncio.sleep(60)\n"
        "asyncio.run(Worker(sys.argv[1], 'victim', ['compile'], 1, h).run())\n"
    )
    victim = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, run.work, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    async with Producer(run.submit) as producer:
        await producer.submit("t1", "compile", [])
        assert victim.stdout is not None
        await victim.stdout.readline()
        victim.send_signal(signal.SIGKILL)
        await victim.wait()
        async with run.running(run.worker("farm", "compile", ends)):
            await until(lambda: run.count("finished") == 1)
    assert run.count("lost") == 1


@scenario
async def test_a_wedged_worker_is_suspected_and_its_task_done_elsewhere(run: Run) -> None:
    wedged = run.worker("wedged", "compile", hangs, wedge_s=0.1)
    async with run.running(wedged), Producer(run.submit) as producer:
        await producer.submit("t1", "compile", [])
        await until(lambda: bool(wedged.session.running))
        async with run.running(run.worker("farm", "compile", ends)):
            await until(lambda: run.broker.ledger.pool.by_id["wedged"].suspect)
            await until(lambda: run.count("finished") == 1)
        wedged.drain_s = 0.0


@scenario
async def test_work_that_reports_progress_is_not_wedged(run: Run) -> None:
    async def slow(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
        end = time.monotonic() + WEDGE_S + TTL_S + 0.4  # a wedged worker would have lost its lease by then
        while time.monotonic() < end:
            await asyncio.sleep(0.05)
            worker.progress()
        return HandlerOutcome()

    worker = run.worker("slow", "compile", slow, wedge_s=WEDGE_S)
    async with run.running(worker), Producer(run.submit) as producer:
        await producer.submit("t1", "compile", [])
        await until(lambda: run.count("finished") == 1)
    assert run.count("lost") == 0


@scenario
async def test_a_fault_of_ours_is_tried_elsewhere(run: Run) -> None:
    tried: list[str] = []
    failures = [InfraError("the gpu is gone"), RecordError("a frame can't be read")]

    def by(name: str) -> Callable[[msg.Task, list[bytes]], Awaitable[HandlerOutcome]]:
        async def handler(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
            tried.append(name)
            if failures:
                raise failures.pop()
            return HandlerOutcome()

        return handler

    workers = [run.worker(name, "bench", by(name)) for name in "abc"]
    async with run.running(*workers):
        await until(lambda: len(run.broker.ledger.pool.by_id) == 3)
        async with Producer(run.submit) as producer:
            await producer.submit("t1", "bench", [])
            await until(lambda: run.count("finished") == 1)
    assert sorted(tried) == ["a", "b", "c"]


@scenario
async def test_a_worker_that_fails_again_and_again_takes_its_time(run: Run) -> None:
    tried: list[float] = []

    async def fails(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
        tried.append(time.monotonic())
        if len(tried) == 5:
            return HandlerOutcome()
        raise InfraError("the gpu is gone")

    async with run.running(run.worker("a", "generate", fails)), Producer(run.submit) as producer:
        for number in range(5):
            await producer.submit(f"t{number}", "generate", [])
        await until(lambda: run.count("finished") >= 1)
    assert tried[4] - tried[0] >= 0.3  # nothing, nothing, 0.1 s, 0.2 s


@scenario
async def test_an_error_that_stops_the_run_leaves_the_worker(run: Run) -> None:
    async def finds(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
        raise PolicyMismatch("the sampler serves another policy")

    worker = asyncio.create_task(run.worker("sampler", "generate", finds).run())
    async with Producer(run.submit) as producer:
        await producer.submit("t1", "generate", [])
        with pytest.raises(PolicyMismatch):
            await worker
    await until(lambda: "t1" in run.broker.ledger.tasks.queues["generate"])


@scenario
async def test_retiring_a_group_cancels_its_handlers(run: Run) -> None:
    cancelled = asyncio.Event()

    async def notices(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return HandlerOutcome()

    worker = run.worker("farm", "compile", notices)
    async with run.running(worker), Producer(run.submit) as producer:
        await producer.submit("t1", "compile", [], group_id="g")
        await until(lambda: bool(worker.session.running))
        await producer.retire("g")
        await cancelled.wait()
    assert run.count("retired") == 1


@scenario
async def test_a_stopped_worker_gives_back_what_it_can_not_finish(run: Run) -> None:
    worker = run.worker("farm", "compile", hangs, drain_s=0.1)
    async with run.running(worker), Producer(run.submit) as producer:
        await producer.submit("t1", "compile", [])
        await until(lambda: bool(worker.session.running))
    await until(lambda: "t1" in run.broker.ledger.tasks.queues["compile"])
    assert run.count("lost") == 0


@scenario
async def test_a_worker_may_prefetch_more_than_it_works_on(run: Run) -> None:
    now = most = 0

    async def counts(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return HandlerOutcome()

    async with (
        run.running(run.worker("bench", "bench", counts, slots=3, concurrency=1)),
        Producer(run.submit) as producer,
    ):
        for number in range(6):
            await producer.submit(f"t{number}", "bench", [])
        await until(lambda: run.count("finished") == 6)
    assert most == 1


@scenario
async def test_two_processes_with_one_worker_id_are_told_apart(run: Run) -> None:
    first = asyncio.create_task(run.worker("same", "compile", ends).run())
    await until(lambda: "same" in run.broker.ledger.pool.by_id)
    async with run.running(run.worker("same", "compile", ends)):
        with pytest.raises(KbrlError, match="id of its own"):
            await first


@scenario
async def test_nonsense_on_the_wire_hurts_nobody(run: Run) -> None:
    with zmq.Context() as context:
        for address in (run.submit, run.work):
            with connect_dealer(context, address, secrets.token_bytes(4).hex().encode()) as dealer:
                dealer.setsockopt(zmq.LINGER, 30_000)  # all of it is to arrive
                for frames in ([b""], [b"\x01\x01", b"\xc1"], [b"\x02\x01", b""], [b"\x01\x63", b"\x90"], [b"x"] * 40):
                    dealer.send_multipart(frames)
                dealer.send_multipart(framing.encode(msg.Welcome(1, 1.0, 1.0, 0)))
    async with Producer(run.submit) as producer, run.running(run.worker("farm", "compile", ends)):
        await producer.submit("t1", "compile", [])
        await until(lambda: run.count("finished") == 1)
        await until(lambda: run.broker.malformed == 10)


@scenario
async def test_a_second_broker_of_a_run_names_cause_and_cure(run: Run) -> None:
    with pytest.raises(AddressTaken, match=r"held by process \d+. Stop that broker"):
        await BrokerServer(run.options).run()


@scenario
async def test_the_broker_writes_what_it_knows_once_a_period(run: Run) -> None:
    async with run.running(run.worker("farm", "compile", ends)), Producer(run.submit) as producer:
        await producer.submit("t1", "compile", [])
        await until(lambda: run.count("finished") == 1)
        path = run.options.metrics_path
        await until(lambda: path.exists() and "farm" in path.read_text().splitlines()[-1])
    line = json.loads(path.read_text().splitlines()[-1])
    assert line["counters"]["submitted"] == line["counters"]["finished"] + line["counters"]["live"] == 1
    assert {"t", "policy_version", "queues", "in_flight", "oldest_s", "workers", "broker"} <= line.keys()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_stops_the_broker_and_what_it_acknowledged_is_there_afterwards(tmp_path: Path) -> None:
    acked: list[str] = []

    async def fill(run: Run) -> None:
        broker = asyncio.create_task(run.broker.run())
        async with Producer(run.submit) as producer:
            for number in range(200):
                submission = asyncio.create_task(producer.submit(f"t{number}", "compile", [b"x" * 2000]))
                await asyncio.wait({broker, submission}, return_when=asyncio.FIRST_COMPLETED)
                if broker.done():
                    submission.cancel()
                    break
                acked.append((await submission and f"t{number}") or "")
        with pytest.raises(DiskFull, match="Free some space"):
            await broker

    run = Run(tmp_path)
    run.options = BrokerOptions(str(tmp_path), run.submit, run.work, LEDGER, max_journal_pages=60)
    run.broker = BrokerServer(run.options)
    asyncio.run(fill(run))

    async def look() -> None:
        again = Run(tmp_path)
        await again.start()
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: set(acked) <= set(again.broker.ledger.tasks.live))
        await again.crash()

    assert 5 < len(acked) < 200
    asyncio.run(look())


def test_a_broker_whose_timer_fails_ends_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        def broken(_: StatusDesk) -> None:
            raise OSError("too many open files")

        broker = BrokerServer(beside(tmp_path, ledger=LEDGER, status_address=f"ipc://{tmp_path}/status"))
        monkeypatch.setattr(StatusDesk, "serve", broken)
        await asyncio.wait_for(broker.run(), PATIENCE_S)

    with pytest.raises(OSError, match="too many open files"):
        asyncio.run(play())


@scenario
async def test_a_worker_whose_pulse_fails_ends_with_the_reason(run: Run) -> None:
    def broken() -> None:
        raise OSError("too many open files")

    worker = run.worker("farm", "compile", ends)
    worker.transfers.tick = broken  # type: ignore[method-assign]
    with pytest.raises(OSError, match="too many open files"):
        await worker.run()
