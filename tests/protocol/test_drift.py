"""Benches that time the same candidate: how far apart they are, and when that is worth a word."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocols import messages as msg
from protocols.checking import CheckOptions
from protocols.drift import ENOUGH, KEPT, PAIRS, Drift
from protocols.records import BenchReport, Fault, Verdict
from services.broker.options import BrokerOptions
from services.runtime import HandlerOutcome, Producer
from tests.brokers import ends, until
from tests.protocol.live import LEDGER, Run
from tests.records import timing


def compared(drift: Drift, times: int, first: float, second: float, names: tuple[str, str] = ("a", "b")) -> Drift:
    for _ in range(times):
        drift.add(*names, timing(first, 0.01), timing(second, 0.01))
    return drift


def test_a_bench_that_is_off_by_the_same_share_is_told_once() -> None:
    drift = compared(Drift(), ENOUGH - 1, 1.05, 1.0)
    assert drift.news() == []
    compared(drift, 1, 1.05, 1.0)
    assert drift.news() == [("a", f"finds speedups 5.0 % above those of b, in the median of {ENOUGH}")]
    assert drift.news() == []


def test_the_bench_ahead_is_named_whatever_the_order() -> None:
    drift = compared(Drift(), ENOUGH, 1.0, 1.1, ("b", "a"))
    assert drift.news()[0][0] == "a"
    assert drift.stats() == {"a/b": {"compared": ENOUGH, "median": pytest.approx(0.0953), "apart": 1.0}}


def test_benches_that_differ_by_noise_are_no_news() -> None:
    drift = Drift()
    for speedup in (1.03, 0.97) * ENOUGH:
        compared(drift, 1, speedup, 1.0)
    assert drift.news() == []


def test_a_pair_that_came_together_and_drifts_again_is_told_again() -> None:
    drift = compared(Drift(), ENOUGH, 1.05, 1.0)
    assert drift.news()
    compared(drift, KEPT, 1.0, 1.0)
    assert drift.news() == []
    compared(drift, KEPT, 1.05, 1.0)
    assert drift.news()


def test_what_is_no_speedup_is_not_compared() -> None:
    drift = compared(Drift(), 1, float("nan"), 1.0)
    compared(drift, 1, 0.0, 1.0)
    compared(drift, 1, 1.0, 1.0, ("a", "a"))
    assert drift.stats() == {}


def test_memory_is_bounded_by_pairs_and_comparisons() -> None:
    drift = Drift()
    for number in range(2 * PAIRS):
        compared(drift, 1, 1.0, 1.0, (f"w{number}", "x"))
    compared(drift, 2 * KEPT, 1.0, 1.0)
    assert len(drift.stats()) == PAIRS
    assert drift.stats()["a/b"]["compared"] == KEPT


def test_a_broker_that_has_candidates_timed_twice_tells_that_a_bench_is_ahead(tmp_path: Path) -> None:
    def finding(speedup: float) -> Any:
        async def bench(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
            report = BenchReport(Verdict(Fault.OK), timing(speedup))
            return HandlerOutcome("score", [msgspec.msgpack.encode(report)])

        return bench

    async def play() -> None:
        run = Run(tmp_path)
        # nobody is suspected because the machine stood still: a bench that is alone is not checked
        checked = msgspec.structs.replace(LEDGER, missed_beats=1000, checks=CheckOptions(share=1.0))
        run.options = BrokerOptions(str(tmp_path), run.submit, run.work, checked, metrics_s=0.05)
        await run.start()
        workers = (
            run.worker("ahead", "bench", finding(1.1)),
            run.worker("behind", "bench", finding(1.0)),
            run.worker("aggregator", "score", ends),
        )
        try:
            async with asyncio.timeout(120), run.running(*workers), Producer(run.submit) as producer:
                await until(lambda: len(run.broker.ledger.pool.by_id) == len(workers))  # a lone bench is not checked
                for number in range(ENOUGH):
                    await producer.submit(f"t{number}", "bench", [b"candidate"])
                await until(lambda: run.count("finished") == ENOUGH)
        finally:
            await run.crash()
        drift = run.broker.figures()["drift"]
        assert drift == {"ahead/behind": {"compared": ENOUGH, "median": pytest.approx(0.0953), "apart": 0.0}}
        assert "above those of behind" in run.broker.status().troubles[-1].what

    asyncio.run(play())
