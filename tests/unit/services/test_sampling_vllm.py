"""The sampler service over vLLM (a faithful small AsyncLLM stands for it): it dies, stands still, is configured."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kbrl_async.errors import CheckpointError, ConfigError, MissingTool
from kbrl_async.runs.config import available_cores, cpu_layout, endpoints, load
from kbrl_async.sampling.engine import EngineSetup
from kbrl_async.sampling.vllm import start as vllm_start
from kbrl_async.sampling.vllm.start import end_ids, options_of
from protocols.messages import Message, Pause, Resume, Stage, Task
from protocols.records import Generation, PolicyVersion, Problem, RolloutRequest, SamplingParams
from services.runtime.quiet import PauseGate
from services.runtime.service import Service
from services.runtime.worker import Worker
from services.sampler.actor import EngineLost, Sampling, start_engine
from tests.unit.sampling.conftest import make_model
from tests.unit.sampling.fake_vllm import FakeAsyncLLM
from tests.unit.sampling.test_vllm_engine import Learner, served, until
from tests.unit.services.log import Log

Body = Callable[[Sampling, FakeAsyncLLM, Learner], Awaitable[None]]


def service(tmp_path: Path, *words: str) -> Service:
    config = load(overrides=["sampler.engine=vllm", "device=cpu", *words])
    layout = cpu_layout(config, available_cores())
    return Service("sampler", "sampler.1", tmp_path, config, endpoints(config, tmp_path), layout, Log())


class Quiet:
    """The gate before a sampler, and what it says to the broker."""

    def __init__(self, *, is_idle: bool = False) -> None:
        self.said: list[Message] = []
        self.gate = PauseGate(lambda: 0.0, self.said.append, lambda: is_idle)


def sampling(tmp_path: Path, body: Body, kind: str = "full", quiet: Quiet | None = None) -> None:
    """Runs `body` with a sampler that follows a learner's folder."""
    gate = (quiet or Quiet()).gate
    (tmp_path / "policies").mkdir()
    learner = Learner(make_model(), tmp_path / "policies", kind)

    async def main(engine: Any, llm: FakeAsyncLLM) -> None:
        learner.publish()
        one = Sampling(service(tmp_path), engine, gate, lambda: None)
        await one.catch_up()
        await body(one, llm, learner)

    served(learner, main, computing=gate.unstoppable)


def ask(number: int) -> tuple[Task, list[bytes]]:
    request = RolloutRequest(
        f"r{number}", "g", Problem("L1/01_x", 1, "x", ""), "1 2 3", "c", SamplingParams(max_tokens=40)
    )
    return Task(f"r{number}@0", f"lease{number}", Stage.GENERATE, 1, 60.0, 0), [msgspec.msgpack.encode(request)]


def test_with_its_engine_the_process_ends_so_that_no_task_loses_its_attempts_to_it(tmp_path: Path) -> None:
    async def body(one: Sampling, llm: FakeAsyncLLM, _: Learner) -> None:
        tasks = [asyncio.create_task(one.generate(*ask(n))) for n in range(3)]
        await until(lambda: len(llm.running) == 3)
        llm.die()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(end) for end in ends} == {EngineLost}
        with pytest.raises(EngineLost, match="EngineCore"):
            await one.watch(0.001)

    sampling(tmp_path, body)


def test_a_version_that_changed_in_flight_is_in_the_record(tmp_path: Path) -> None:
    async def body(one: Sampling, llm: FakeAsyncLLM, learner: Learner) -> None:
        llm.held_at = 4  # or it may have ended before the new version is there
        task = asyncio.create_task(one.generate(*ask(1)))
        await until(lambda: any(len(r.out) == 4 for r in llm.running.values()))
        learner.publish()
        await one.catch_up()
        llm.held_at = None
        outcome = await task
        done = msgspec.msgpack.decode(outcome.frames[0], type=Generation)
        assert [version for version, _ in done.spans] == [0, 1]
        assert (outcome.policy_version, done.policy_version) == (0, 0)

    sampling(tmp_path, body)


def test_a_broken_version_stops_the_sampler_and_gives_no_rollout_away(tmp_path: Path) -> None:
    async def body(one: Sampling, llm: FakeAsyncLLM, learner: Learner) -> None:
        running = asyncio.create_task(one.generate(*ask(1)))
        await until(lambda: bool(llm.running))
        _, folder = learner.publish()
        (folder / "adapter_config.json").write_text("{")
        with pytest.raises(CheckpointError, match="vLLM refuses policy-v1"):
            await one.watch(0.001)
        assert (await running).policy_version == 0

    sampling(tmp_path, body, "adapter")


def test_the_engine_stands_still_while_a_bench_wants_quiet(tmp_path: Path) -> None:
    quiet = Quiet()
    gate, said = quiet.gate, quiet.said

    async def body(one: Sampling, llm: FakeAsyncLLM, _: Learner) -> None:
        helper = asyncio.create_task(one.stand_still())
        running = asyncio.create_task(one.generate(*ask(1)))
        await until(lambda: bool(llm.running))
        gate.handle(Pause("window", "cpu", 30.0))
        await asyncio.wait_for(asyncio.shield(_said(said)), 30)
        assert llm.paused
        gate.handle(Resume("window"))
        assert (await running).tokens > 0
        assert not llm.paused
        helper.cancel()

    sampling(tmp_path, body, quiet=quiet)


async def _said(said: list[Any]) -> None:
    while not said:
        await asyncio.sleep(0.005)


def setup_of(tmp_path: Path, *words: str) -> EngineSetup:
    """What `start_engine` gives an engine of a run with these settings."""
    seen: list[EngineSetup] = []

    async def taken(setup: EngineSetup) -> None:
        seen.append(setup)

    async def main() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm_start, "start", taken)
            await start_engine(service(tmp_path, *words), worker(), asyncio.Event())

    asyncio.run(main())
    return seen[0]


def worker() -> Worker:
    async def handler(_: Task, __: list[bytes]) -> None:
        return None

    return Worker("ipc:///nowhere", "sampler.1", [Stage.GENERATE], 1, handler)


def adapter(folder: Path, rank: int) -> Path:
    (folder / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    return folder


def test_the_run_s_configuration_makes_the_engine_s_options(tmp_path: Path) -> None:
    manifest = PolicyVersion(0, None, 0, "lora", "", [1, 2], [0.0], base_model="base", adapters={})
    words = ("lora_rank=16", "max_staleness=3", "temperature=0.8", "sampler.slots=256", "sampler.memory_share=0.4")
    options = options_of(setup_of(tmp_path, *words), manifest, adapter(tmp_path, 16))
    shown = (options.update, options.lora_rank, options.live_versions, options.temperature, options.settings.slots)
    assert shown == ("adapter", 16, 5, 0.8, 256)


def test_an_update_that_the_learner_does_not_publish_is_refused(tmp_path: Path) -> None:
    manifest = PolicyVersion(0, None, 0, "lora", "", [1, 2], [0.0])
    with pytest.raises(ConfigError, match=r"sampler\.update=full, and the learner publishes lora"):
        options_of(setup_of(tmp_path, "sampler.update=full"), manifest, adapter(tmp_path, 8))


def test_end_of_text_tokens_are_those_of_the_model_s_folder(tmp_path: Path) -> None:
    assert end_ids(str(tmp_path)) == []
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert end_ids(str(tmp_path)) == [3, 5]


torch.set_num_threads(1)


def test_vllm_is_imported_while_the_learner_makes_the_first_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes as long as a learner's start, and a missing vLLM is said before."""
    seen: list[str] = []

    async def main() -> None:
        stop = asyncio.Event()

        def preload(device: str, _: int) -> None:
            seen.append(device)
            loop.call_soon_threadsafe(stop.set)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(vllm_start, "preload", preload)
        # There is no version, and there will be none: it ends because the import ended it.
        assert await asyncio.wait_for(start_engine(service(tmp_path), worker(), stop), 30) is None

    asyncio.run(main())
    assert seen == ["cpu"]


def test_a_missing_vllm_ends_the_sampler_before_there_is_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preload(_: str, __: int) -> None:
        raise MissingTool("sampler.engine=vllm needs vLLM, and it is not installed here", "Install it")

    async def main() -> None:
        monkeypatch.setattr(vllm_start, "preload", preload)
        with pytest.raises(MissingTool):
            await asyncio.wait_for(start_engine(service(tmp_path), worker(), asyncio.Event()), 30)

    asyncio.run(main())
