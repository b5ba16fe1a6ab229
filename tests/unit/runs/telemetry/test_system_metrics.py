"""Throughput and busy fractions from the broker's lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.runs.telemetry import system_metrics
from kbrl_async.runs.telemetry.system_metrics import BrokerSample, SystemSample, Tail, WorkerSample


def sample(t: float, sampler: WorkerSample | None = None, **values: object) -> SystemSample:
    workers = {"sampler-1": sampler} if sampler else {}
    return SystemSample(t=t, workers=workers, **values)  # type: ignore[arg-type]


def sampler(done: int = 0, tokens: int = 0, busy: float = 0.0) -> WorkerSample:
    return WorkerSample(stages=["generate"], done=done, tokens=tokens, busy=busy)


def test_a_line_is_read_with_what_it_has() -> None:
    line = b'{"t": 5, "queues": {"bench": 3}, "workers": {"w": {"busy": 0.5, "new_field": 1}}, "broker": {"lag_ms": 2}}'
    read = system_metrics.parse(line)
    assert read is not None
    assert (read.t, read.queues, read.workers["w"].busy, read.broker.lag_ms) == (5, {"bench": 3}, 0.5, 2)


def test_each_part_has_a_tag() -> None:
    now = SystemSample(
        t=1.0, queues={"bench": 3}, in_flight={"bench": 1}, oldest_s={"bench": 2.5}, counters={"requeued": 4},
        workers={"w": WorkerSample(busy=0.5, lag_ms=7, rss_mb=100, suspect=True)},
        broker=BrokerSample(busy=0.1, lag_ms=1, rss_mb=50),
    )  # fmt: skip
    assert system_metrics.scalars(None, now) == {
        "queue/bench": 3, "in_flight/bench": 1, "oldest_s/bench": 2.5, "counter/requeued": 4,
        "busy/broker": 0.1, "lag_ms/broker": 1, "rss_mb/broker": 50,
        "busy/w": 0.5, "lag_ms/w": 7, "rss_mb/w": 100, "workers/suspect": 1,
        "cpu_cores/broker": 0, "cpu_cores/w": 0,
    }  # fmt: skip


def test_rates_are_since_the_sample_before() -> None:
    before = SystemSample(t=10, workers={"s": sampler(tokens=100), "a": WorkerSample(stages=["score"], done=3)})
    now = SystemSample(
        t=12,
        workers={
            "s": sampler(tokens=700),
            "a": WorkerSample(stages=["score"], done=13),
            "l": WorkerSample(stages=["train"], done=1),
        },
    )
    values = system_metrics.scalars(before, now)
    assert values["throughput/tokens_per_s"] == 300
    assert values["throughput/rollouts_per_s"] == 5
    assert values["throughput/updates_per_h"] == 1800


def test_a_worker_that_was_replaced_does_not_count_backwards() -> None:
    values = system_metrics.scalars(sample(10, sampler(tokens=5000)), sample(12, sampler(tokens=40)))
    assert values["throughput/tokens_per_s"] == 20


def test_busy_fractions_are_weighted_by_time() -> None:
    samples = [sample(11, sampler(busy=1.0)), sample(12, sampler(busy=1.0)), sample(20, sampler(busy=0.5))]
    assert system_metrics.busy_fractions(samples, 10, 20)["sampler-1"] == pytest.approx((1 + 1 + 8 * 0.5) / 10)


def test_a_process_that_is_gone_is_idle() -> None:
    samples = [sample(11, sampler(busy=1.0)), sample(12), sample(13), sample(14, sampler(busy=1.0))]
    assert system_metrics.busy_fractions(samples, 10, 14) == {"broker": 0.0, "sampler-1": 0.5}


def test_a_suspect_is_idle() -> None:
    silent = WorkerSample(stages=["generate"], busy=1.0, suspect=True)
    assert system_metrics.busy_fractions([sample(11, silent)], 10, 11)["sampler-1"] == 0.0


def test_the_tail_follows_a_file_that_was_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "system.jsonl"
    tail = Tail(path)
    path.write_bytes(b'{"t": 1}\n{"t": 2}\n')
    tail.new()
    path.rename(tmp_path / "system.jsonl.1")
    path.write_bytes(b'{"t": 3}\n')
    assert [s.t for s in tail.new()] == [3]


def test_only_the_interval_counts_and_fractions_are_at_most_one() -> None:
    samples = [sample(5, sampler(busy=0.0)), sample(11, sampler(busy=1.7)), sample(30, sampler(busy=0.0))]
    assert system_metrics.busy_fractions(samples, 10, 20)["sampler-1"] == 1.0


def test_an_empty_interval_has_no_fractions() -> None:
    assert system_metrics.busy_fractions([sample(5)], 10, 20) == {}


def test_the_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "system.jsonl"
    tail = Tail(path)
    assert tail.new() == []
    path.write_bytes(b'{"t": 1}\n{"t": 2}\n{"t": ')
    assert [s.t for s in tail.new()] == [1, 2]
    assert tail.new() == []
    with path.open("ab") as file:
        file.write(b'3}\nbroken by a crash{"t": 4}\n{"t": 5}\n')
    assert [s.t for s in tail.new()] == [3, 5]
