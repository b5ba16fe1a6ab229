"""A bench that takes likely kernels first judges all of them, and as it would have judged them anyway."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from benchmarks.harness import ONE_THREAD, services
from kbrl_async.runs.archive.archive import FILE, ArchiveWriter, make_row
from kbrl_async.runs.config import load
from kbrl_async.runs.folder import prepare
from kbrl_async.runs.status_client import StatusClient
from protocols.messages import Stage, Task
from protocols.records import BenchReport, BuildReport, Candidate, Fault, Verdict
from protocols.rollout import Record
from services.runtime import HandlerOutcome, Producer, Worker, addresses
from tests.brokers import working
from tests.candidates import elementwise
from tests.e2e.test_verifiers import sent

pytestmark = pytest.mark.timeout(600)
RIGHT = [Candidate(elementwise(f"2 * x[i] + 1 + {number} - {number}"), "c") for number in range(3)]
WRONG = [Candidate(elementwise(f"2 * x[i] + 2 + {number} - {number}"), "c") for number in range(3)]


def taught_the_opposite(folder: Path) -> Path:
    """An archive in which the wrong ones are right."""
    folder.mkdir()
    with ArchiveWriter(folder / FILE) as archive:
        for number in range(60):
            fault = Fault.INCORRECT if number % 2 else Fault.OK
            candidate = Candidate(elementwise(f"2 * x[i] + {1 + (fault is Fault.OK)} + {number} - 0"), "c")
            frames = sent(f"g{number}.r0", candidate)
            more = (BuildReport(Fault.OK, {}), BenchReport(Verdict(fault)))
            frames += [msgspec.msgpack.encode(frame) for frame in more]
            row = make_row(f"g{number}.r0", Record.decode(frames), at=0, clock=0, purpose="train", reward=0.0)
            archive.add(row, frames)
    return folder


async def waiting(viewer: StatusClient, stage: Stage) -> int:
    report = await asyncio.to_thread(viewer.ask, 5.0)
    return 0 if report is None else sum(one.queued for one in report.stages if one.stage == stage)


async def judged(tmp_path: Path) -> list[tuple[str, Fault]]:
    """Task and fault, in the order of judging: all of them wait when the bench comes."""
    words = [f"log_path={tmp_path / 'runs'}", f"cache_path={tmp_path / 'cache'}"]
    taught = taught_the_opposite(tmp_path / "taught")
    run = prepare(load(overrides=[*words, f"timing_bench.likely_first=[{taught}]"]))
    found = addresses(run.path, run.config)
    work = {f"right-{i}": one for i, one in enumerate(RIGHT)} | {f"wrong-{i}": one for i, one in enumerate(WRONG)}
    seen: list[tuple[str, Fault]] = []
    is_whole = asyncio.Event()

    async def collect(task: Task, frames: list[bytes]) -> HandlerOutcome:
        seen.append((task.task_id, Record.decode(frames, task.status).fault))
        if len(seen) == len(work):
            is_whole.set()
        return HandlerOutcome()

    places = {"TMPDIR": str(tmp_path), **ONE_THREAD}
    with services(run.path, "broker.1", "compile_farm.1", **places):
        async with working(Worker(found.work, "collector", [Stage.SCORE], 4, collect)), asyncio.timeout(400):
            async with Producer(found.submit) as producer:
                for name, candidate in work.items():
                    await producer.submit(name, Stage.COMPILE, sent(name, candidate, is_timed=False), needs="c")
            with StatusClient(found.status) as viewer:
                while await waiting(viewer, Stage.BENCH) < len(work):
                    await asyncio.sleep(0.05)
            with services(run.path, "timing_bench.1", **places):
                await is_whole.wait()
    return seen


def test_what_is_thought_unlikely_waits_and_is_judged_as_ever(tmp_path: Path) -> None:
    seen = asyncio.run(judged(tmp_path))
    assert [name.partition("-")[0] for name, _ in seen] == ["wrong"] * 3 + ["right"] * 3
    assert {fault for name, fault in seen if name.startswith("right")} == {Fault.OK}
    assert {fault for name, fault in seen if name.startswith("wrong")} == {Fault.INCORRECT}
