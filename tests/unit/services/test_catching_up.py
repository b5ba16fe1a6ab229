"""A broker that comes back may lack its last moments, after a power cut: what is open is submitted to it again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from kbrl_async.evaluation.course import Command, Course
from kbrl_async.kernels.problems import parse_problem
from kbrl_async.rollouts.prompts.first import FirstPrompts
from kbrl_async.runs.archive.journal import EntryJournal
from kbrl_async.runs.archive.recorder import RolloutRecorder
from kbrl_async.runs.config import Config, available_cores, cpu_layout, endpoints, load
from kbrl_async.runs.planning import plan_of
from kbrl_async.runs.run_journal import RunJournal
from kbrl_async.runs.run_state import RunState
from protocols.messages import Stage, Task
from protocols.records import TrainBatch
from services.evaluator.actor import Evaluator
from services.reward_aggregator import actor as actor_module
from services.reward_aggregator.actor import Aggregator
from services.reward_aggregator.metrics_writer import MetricsWriter
from services.runtime import rollout_actor
from services.runtime.rollout_actor import Outside
from services.runtime.service import Service
from tests.unit.services.log import Log

PATIENCE_S = 120.0
LOOK_S = 0.05
SOURCE = "class Model: ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...\n"


class Silent:
    """A broker that takes submissions and never answers: all stays open."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    async def submit(self, task_id: str, *_: object) -> bool:
        self.asked[task_id] += 1
        return True

    async def retire(self, _group_id: str) -> None: ...


def service(name: str, folder: Path, settings: Config) -> Service:
    layout = cpu_layout(settings, available_cores())
    return Service(name, f"{name}.1", folder, settings, endpoints(settings, folder), layout, Log())


def aggregator(
    frame: Service,
    state: RunState,
    journal: RunJournal,
    broker: object,
    recorder: RolloutRecorder,
    metrics: object = None,
) -> Aggregator:
    """With templates for prompts; it asks and tells as in a run."""
    outside = Outside(frame, journal, broker, recorder)  # type: ignore[arg-type]
    prompts = FirstPrompts(frame.config.prompt_option, frame.config.backend)
    return Aggregator(outside, state, journal, metrics or MetricsWriter(frame, state), prompts)  # type: ignore[arg-type]


class Welcomes:
    """How often the broker has taken the actor in."""

    def __init__(self, count: int = 1) -> None:
        self.count = count

    def __call__(self) -> int:
        return self.count


async def asked_all(broker: Silent) -> None:
    """Until it has been asked for nothing new for longer than the pump idles: in looks, each of which leaves the pump
    its turn, so that a host that stands still for so long is not taken for a pump that has no more to ask."""
    seen = quiet = 0
    async with asyncio.timeout(PATIENCE_S):
        while quiet < 2 * rollout_actor.IDLE_S / LOOK_S:
            await asyncio.sleep(LOOK_S)
            asked = sum(broker.asked.values())
            quiet = quiet + 1 if asked == seen > 0 else 0
            seen = asked


async def asked_after_a_second_welcome(
    broker: Silent, welcomes: Welcomes, pump: Awaitable[None]
) -> tuple[Counter[str], Counter[str]]:
    """What was asked before, and what when the broker was back."""
    pumping = asyncio.ensure_future(pump)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asked_all(broker)  # nothing is asked twice without a reason
            before = broker.asked.copy()
            welcomes.count = 2
            while sum(broker.asked.values()) < 2 * sum(before.values()):
                await asyncio.sleep(0.02)
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
    return before, broker.asked


class Keeps(Silent):
    """A learner behind a broker that forgets what it is asked the first time."""

    def __init__(self, taken: Callable[[Task], Awaitable[object]]) -> None:
        super().__init__()
        self.batches: list[TrainBatch] = []
        self.taken = taken

    async def submit(self, task_id: str, stage: str, frames: list[bytes], *_: object) -> bool:
        await super().submit(task_id)
        if stage != Stage.TRAIN:
            return True
        self.batches.append(msgspec.msgpack.decode(frames[0], type=TrainBatch))
        if self.asked[task_id] == 2:
            await self.taken(Task(task_id, "", Stage.TRAINED, 1, 9.0, 3, group_id=task_id))
        return True


@pytest.mark.parametrize(("version", "forced"), [(3, None), (0, None), (3, "answers.json")])
def test_a_run_ends_when_its_last_version_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, forced: str | None
) -> None:
    """But for one that has made none, and a rehearsal, whose weights are random."""
    settings = load(overrides=["tensorboard.enabled=false", "level=1"])
    settings = msgspec.structs.replace(settings, sampler=msgspec.structs.replace(settings.sampler, forced=forced))
    frame, state = service("reward_aggregator", tmp_path, settings), RunState(plan_of(settings))
    monkeypatch.setattr(RunState, "version", version)
    monkeypatch.setattr(RunState, "has_ended", True)
    monkeypatch.setattr(actor_module, "SAY_S", 0.05)

    async def live() -> list[TrainBatch]:
        with (
            RunJournal(tmp_path / "aggregator.sqlite") as journal,
            RolloutRecorder(settings.archive, tmp_path) as recorder,
        ):
            broker = Keeps(lambda task: actor.handle(task, []))
            actor = aggregator(frame, state, journal, broker, recorder)
            async with asyncio.timeout(PATIENCE_S):
                await actor.run()
            return broker.batches

    asked = asyncio.run(live())
    expected = [] if not version or forced else 2 * [(version, [])]
    assert [(batch.index, batch.group_ids) for batch in asked] == expected


@pytest.mark.parametrize("count", [0, 1])
def test_the_aggregator_asks_again_for_what_is_open_and_only_then(tmp_path: Path, count: int) -> None:
    settings = load(overrides=["tensorboard.enabled=false", "level=1", "batch_size=2", "group_size=2"])
    frame = service("reward_aggregator", tmp_path, settings)
    state, broker, welcomes = RunState(plan_of(settings)), Silent(), Welcomes(count)

    async def live() -> tuple[Counter[str], Counter[str]]:
        with (
            RunJournal(tmp_path / "aggregator.sqlite") as journal,
            RolloutRecorder(settings.archive, tmp_path) as recorder,
        ):
            actor = aggregator(frame, state, journal, broker, recorder)
            return await asked_after_a_second_welcome(broker, welcomes, actor.pump(welcomes))

    before, after = asyncio.run(live())
    assert any(name.startswith("eval-before") for name in before)
    assert any(name.startswith("g0") for name in before)
    assert set(before.values()) == {1}
    assert after == before + before


def test_the_evaluator_does_so_too(tmp_path: Path) -> None:
    settings = load(overrides=["evaluation.policy=p", "evaluation.samples=2", "evaluation.in_flight=4"])
    frame = service("evaluator", tmp_path, settings)
    course = Course([parse_problem(SOURCE, "L1/1_p", level=1)], 2, 4, settings.evaluation.deadline_s)
    broker, welcomes = Silent(), Welcomes()

    async def live() -> tuple[Counter[str], Counter[str]]:
        journal = EntryJournal[Command](tmp_path / "e.sqlite", Command)
        with journal, RolloutRecorder(settings.archive, tmp_path) as recorder:
            prompts = FirstPrompts(settings.prompt_option, settings.backend)
            actor = Evaluator(Outside(frame, journal, broker, recorder), course, prompts)  # type: ignore[arg-type]
            return await asked_after_a_second_welcome(broker, welcomes, actor.pump(welcomes))

    before, after = asyncio.run(live())
    assert len(before) == 2
    assert after == before + before
