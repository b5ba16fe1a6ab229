"""An engine that the user brings: found by where it is, given what a run has, served like ours."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from kbrl_async.runs.config import available_cores, cpu_layout, endpoints, load
from kbrl_async.sampling.engine import Completion, EngineSetup, EngineStats
from protocols.messages import Stage
from protocols.records import Generation, PolicyVersion, Purpose, SamplingParams
from services.runtime.service import Service
from services.sampler.actor import Sampling, start_engine
from tests.unit.services.log import Log
from tests.unit.services.test_sampling_vllm import Quiet, ask, worker


class Parrot:
    """Answers with what it was asked."""

    tokenizer, is_remote, follows, policy_version, failure = None, True, False, 0, None

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup

    async def generate(
        self, request_id: str, prompt: str, params: SamplingParams, purpose: Purpose = Purpose.TRAIN, adapter: str = ""
    ) -> Completion:
        return Completion([1], [2], [-0.5], prompt, "stop", 0, 0.0, 1.0)

    async def load(self, manifest: PolicyVersion, folder: Path) -> None:
        raise AssertionError("it follows nobody")

    def stats(self) -> EngineStats:
        return EngineStats(0)

    async def close(self) -> None: ...


async def start(setup: EngineSetup) -> Parrot:
    return Parrot(setup)


def test_an_engine_of_the_user_s_own_answers(tmp_path: Path) -> None:
    words = [
        f"sampler.engine={__name__}:start",
        "temperature=0.7",
        "max_staleness=3",
        "device=cpu",
        "sampler.threads=2",
    ]
    config = load(overrides=words)
    layout = cpu_layout(config, available_cores())
    service = Service("sampler", "sampler.2", tmp_path, config, endpoints(config, tmp_path), layout, Log())

    async def main() -> None:
        engine = await start_engine(service, worker(), asyncio.Event())
        assert isinstance(engine, Parrot)
        setup = engine.setup
        assert (setup.temperature, setup.max_staleness, setup.threads, setup.seed) == (0.7, 3, 2, 1000)
        sampling = Sampling(service, engine, Quiet().gate, lambda: None)
        await sampling.begin(asyncio.Event())
        outcome = await sampling.generate(*ask(1))
        assert outcome.next_stage == Stage.SCORE
        assert msgspec.msgpack.decode(outcome.frames[0], type=Generation).text == "1 2 3"
        await sampling.close()

    asyncio.run(main())
