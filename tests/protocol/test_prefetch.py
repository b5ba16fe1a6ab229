"""How many leases a worker asks for: enough to be busy over a long line, few over a short one, never without bound."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from protocols import messages as msg
from protocols.events import FromProducer, FromWorker
from protocols.ledger import Ledger
from protocols.prefetch import LONGEST_S, Prefetch
from services.broker.server import BrokerServer
from services.runtime import HandlerOutcome, Producer, Worker, WorkerOptions
from tests.brokers import beside, serving, until, working


def measured(concurrency: int, line_s: float, work_s: float, *, times: int = 50, most: int | None = None) -> Prefetch:
    prefetch = Prefetch(concurrency, most)
    for _ in range(times):
        prefetch.acked(line_s)
        prefetch.worked(work_s)
    return prefetch


def test_beside_the_broker_one_task_waits() -> None:
    assert measured(1, 0.001, 0.2).credit == 2
    assert measured(8, 0.001, 0.2).credit == 9


def test_over_a_long_line_as_many_wait_as_are_done_in_a_round_trip() -> None:
    assert measured(1, 0.09, 0.04, most=99).credit == 1 + 3
    assert measured(4, 0.09, 0.04, most=99).credit == 4 + 10


def test_what_travels_before_and_after_the_work_counts_too() -> None:
    prefetch = measured(1, 0.09, 0.1, most=99)
    for _ in range(50):
        prefetch.fetched(0.09)
        prefetch.handed(0.09)
    assert prefetch.credit == 1 + 3


def test_a_line_that_loses_packets_asks_for_more_than_its_mean_says() -> None:
    even, uneven = measured(1, 0.19, 0.1, most=99), Prefetch(1, most=99)
    for number in range(200):
        uneven.acked(0.1 if number % 2 else 0.3)
        uneven.worked(0.1)
    assert uneven.credit > even.credit


def test_a_partition_says_nothing_about_the_line() -> None:
    prefetch = measured(1, 0.1, 0.2)
    before = prefetch.credit
    prefetch.acked(60.0)
    assert prefetch.credit == before


@given(
    concurrency=st.integers(1, 64),
    times=st.lists(st.tuples(st.floats(0, 2 * LONGEST_S), st.floats(0, 100), st.floats(0, 9)), max_size=30),
)
def test_it_stays_within_its_bounds(concurrency: int, times: list[tuple[float, float, float]]) -> None:
    prefetch = Prefetch(concurrency)
    for line_s, work_s, fetch_s in times:
        prefetch.acked(line_s)
        prefetch.worked(work_s)
        prefetch.fetched(fetch_s)
        assert concurrency + 1 <= prefetch.credit <= prefetch.most == 4 * (concurrency + 1)


def test_the_broker_gives_no_more_than_is_wanted_now_from_the_first_moment() -> None:
    ledger = Ledger()
    for number in range(9):
        ledger.handle(FromProducer(b"p", msg.Submit(f"t{number}", "bench")), 0.0)
    ledger.handle(FromWorker(b"w", msg.Hello("b", "1", ["bench"], 8, credit=2)), 0.0)
    assert len(ledger.pool.by_id["b"].leases) == 2
    ledger.handle(FromWorker(b"w", msg.Beat(5, list(ledger.pool.by_id["b"].leases))), 1.0)
    assert len(ledger.pool.by_id["b"].leases) == 5
    ledger.handle(FromWorker(b"w", msg.Beat(99, list(ledger.pool.by_id["b"].leases))), 2.0)
    assert len(ledger.pool.by_id["b"].leases) == 8, "no more than it said it would ever want"


def test_fetching_and_handing_over_take_no_place_of_the_work(tmp_path: Path) -> None:
    """While one task is at work others are fetched for, and the result before is handed over: all at the same time."""
    together: set[str] = set()
    names: list[str] = []

    async def play() -> None:
        met = asyncio.Event()

        async def step(name: str) -> None:
            together.add(name)
            if len(together) == 3:
                met.set()
            if not met.is_set():
                await asyncio.wait_for(met.wait(), 120)  # nobody goes on before all three have been seen at once

        async def before(task: msg.Task, _: list[bytes]) -> None:
            if task.task_id == "t2":
                await step("fetches")

        async def work(task: msg.Task, _: list[bytes]) -> HandlerOutcome:
            if task.task_id == "t1":
                await step("works")
            return HandlerOutcome("", [task.task_id.encode()])

        async def after(outcome: HandlerOutcome) -> None:
            if outcome.frames == [b"t0"]:
                await step("hands over")
            names.append(outcome.frames[0].decode())

        options = beside(tmp_path)
        worker = Worker(
            options.work_address,
            "w",
            ["score"],
            4,
            work,
            WorkerOptions(concurrency=1, prefetch=Prefetch(1, most=4), before=before, after=after),
        )
        worker.session.credit = 4
        async with (
            asyncio.timeout(150),
            serving(BrokerServer(options)),
            working(worker),
            Producer(options.submit_address) as producer,
        ):
            for number in range(3):
                await producer.submit(f"t{number}", "score", [])
            await until(lambda: len(names) == 3)

    asyncio.run(play())
    assert sorted(names) == ["t0", "t1", "t2"]
