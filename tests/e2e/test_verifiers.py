"""Verifiers between farm and benches, as processes of their own: kernels go in, records come out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from benchmarks.harness import ONE_THREAD, services
from kbrl_async.runs.config import load
from kbrl_async.runs.folder import prepare
from protocols.messages import Stage, Task
from protocols.records import (
    Candidate,
    Fault,
    Generation,
    Problem,
    RolloutRequest,
    SamplingParams,
)
from protocols.rollout import Record
from services.runtime import HandlerOutcome, Producer, Worker, addresses
from tests.brokers import working
from tests.candidates import affine, elementwise

pytestmark = pytest.mark.timeout(600)
PROBLEM = Problem("L1/01_affine", 1, "affine", affine(2, "64, 128"))
RIGHT, WRONG = (Candidate(elementwise(f"2 * x[i] + {offset}"), "c") for offset in (1, 2))


class Collector:
    """Takes what is to be scored."""

    def __init__(self, wanted: int) -> None:
        self.records: dict[str, Record] = {}
        self.has_all, self._wanted = asyncio.Event(), wanted

    async def collect(self, task: Task, frames: list[bytes]) -> HandlerOutcome:
        self.records[task.task_id] = Record.decode(frames, task.status)
        if len(self.records) == self._wanted:
            self.has_all.set()
        return HandlerOutcome()


def sent(task_id: str, candidate: Candidate, *, is_timed: bool = True) -> list[bytes]:
    request = RolloutRequest(task_id, "g", PROBLEM, "", "c", SamplingParams(1), timed=is_timed)
    frames = (request, Generation(0, [], [], [], "", "stop", candidate))
    return [msgspec.msgpack.encode(frame) for frame in frames]


async def judged(tmp_path: Path) -> dict[str, Record]:
    words = [f"log_path={tmp_path / 'runs'}", f"cache_path={tmp_path / 'cache'}", "processes.verifier=1"]
    run = prepare(load(overrides=[*words, "timing_bench.cap_s=0.02", "timing_bench.min_pairs=4"]))
    names, found = ("broker.1", "compile_farm.1", "verifier.1", "timing_bench.1"), addresses(run.path, run.config)
    collector = Collector(4)
    work = {"right": (RIGHT, True), "wrong": (WRONG, True), "again": (RIGHT, True), "untimed": (RIGHT, False)}
    with services(run.path, *names, TMPDIR=str(tmp_path), **ONE_THREAD):
        async with (
            working(Worker(found.work, "collector", [Stage.SCORE], 4, collector.collect)),
            asyncio.timeout(400),
            Producer(found.submit) as producer,
        ):
            for name, (candidate, is_timed) in work.items():
                await producer.submit(name, Stage.COMPILE, sent(name, candidate, is_timed=is_timed), needs="c")
            await collector.has_all.wait()
    return collector.records


def test_verifiers_prove_and_benches_time_what_is_right(tmp_path: Path) -> None:
    records = asyncio.run(judged(tmp_path))
    for name in ("right", "again"):
        record = records[name]
        assert (record.fault, record.verdict.trust) == (Fault.OK, "replayed")
        assert record.verified is not None
        assert record.bench is not None
        assert (record.verified.worker_id, record.bench.worker_id) == ("verifier.1", "timing_bench.1")
        assert record.timing is not None
        assert record.verified.timing is None
        assert record.bench.plan == record.verified.plan != ""
        assert record.bench.verdict == record.verified.verdict
        stages = [stage.name for stage in record.stages]
        assert len(stages) == len(set(stages))
        assert stages[-1] == "timing"
    for name, fault in (("wrong", Fault.INCORRECT), ("untimed", Fault.OK)):
        record = records[name]
        assert (record.fault, record.verified, record.timing) == (fault, None, None)
        assert record.bench is not None
        assert record.bench.worker_id == "verifier.1"
