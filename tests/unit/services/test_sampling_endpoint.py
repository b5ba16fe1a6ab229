"""The sampler service over an endpoint: requests in, generations out, no policy of ours needed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kbrl_async.errors import ConfigError, PromptTooLong
from kbrl_async.rollouts.rewards.presets import STAGE3
from kbrl_async.rollouts.scoring import score
from kbrl_async.runs.config import available_cores, cpu_layout, endpoints, load
from kbrl_async.sampling.engine import Completion
from protocols.messages import Stage, Task
from protocols.records import Fault, Generation, Problem, Purpose, RolloutRequest, SamplingParams
from protocols.rollout import Record
from services.runtime.service import Service
from services.sampler.actor import Sampling, start_engine
from tests.unit.sampling.fake_endpoint import FakeEndpoint, chat, fake_endpoint
from tests.unit.services.log import Log
from tests.unit.services.test_sampling_vllm import Quiet, worker

ANSWER = "Here it is:\n```python\nclass ModelNew:\n    def forward(self):\n        pass\n```\n"


def service(tmp_path: Path, base_url: str) -> Service:
    words = ["sampler.engine=openai", "model_name=m", f"sampler.base_url={base_url}", "sampler.price_output=5"]
    config = load(overrides=words)
    layout = cpu_layout(config, available_cores())
    return Service("sampler", "sampler.1", tmp_path, config, endpoints(config, tmp_path), layout, Log())


def frame(purpose: Purpose) -> bytes:
    problem = Problem("L1/01_x", 1, "x", "")
    request = RolloutRequest("r", "g", problem, "prompt", "c", SamplingParams(max_tokens=8), purpose)
    return msgspec.msgpack.encode(request)


def run(tmp_path: Path, purpose: Purpose) -> tuple[Any, Log, FakeEndpoint]:
    async def main() -> tuple[Any, Log, FakeEndpoint]:
        async with fake_endpoint() as fake:
            fake.replies = [chat(ANSWER)]
            given = service(tmp_path, fake.base_url)
            engine = await start_engine(given, worker(), asyncio.Event())
            assert engine is not None
            sampling = Sampling(given, engine, Quiet().gate, lambda: None)
            await sampling.begin(asyncio.Event())
            try:
                task = Task("r@0", "lease", Stage.GENERATE, 1, 60.0, 0)
                return await sampling.generate(task, [frame(purpose)]), given.log, fake
            finally:
                await sampling.close()

    return asyncio.run(main())


def test_an_evaluation_needs_no_policy_of_the_learner(tmp_path: Path) -> None:
    outcome, log, _ = run(tmp_path, Purpose.EVAL)
    generation = msgspec.msgpack.decode(outcome.frames[0], type=Generation)
    assert (outcome.next_stage, outcome.tokens, generation.fault) == (Stage.COMPILE, 20, Fault.OK)
    assert generation.candidate is not None
    assert generation.candidate.source.startswith("class ModelNew")
    told = log.at("info")[-1]
    assert told.event == "endpoint"
    assert told.facts == {
        "requests": 2, "retries": 0, "prompt_tokens": 100, "output_tokens": 20, "cost": 0.0001,
    }  # fmt: skip


def test_a_training_rollout_ends_the_sampler_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no log-probs"):
        run(tmp_path, Purpose.TRAIN)


def test_a_prompt_that_is_too_long_ends_its_rollout_with_a_reason_and_nothing_else(tmp_path: Path) -> None:
    class Refusing:
        """An engine for which the first prompt is too long."""

        policy_version, tokenizer, is_remote = 7, None, False
        asked = 0

        async def generate(self, *_given: Any) -> Completion:
            self.asked += 1
            if self.asked == 1:
                raise PromptTooLong("prompt of 900 tokens", "Shorten it")
            return Completion([1], [2], [-0.5], ANSWER, "stop", 7, 0.0, 0.0)

    given = msgspec.structs.replace(service(tmp_path, "http://127.0.0.1:1/v1"), log=Log())
    sampling = Sampling(given, Refusing(), Quiet().gate, lambda: None)  # type: ignore[arg-type]
    task = Task("r@0", "lease", Stage.GENERATE, 1, 60.0, 0)
    refused, done = [asyncio.run(sampling.generate(task, [frame(Purpose.EVAL)])) for _ in range(2)]
    generation = msgspec.msgpack.decode(refused.frames[0], type=Generation)
    assert refused.next_stage == Stage.SCORE
    assert generation.fault is Fault.INFRA_ERROR
    record = Record.decode([frame(Purpose.EVAL), *refused.frames])
    assert (record.lost_because, score(record, STAGE3)) == ("prompt_too_long", None)
    assert done.next_stage == Stage.COMPILE
