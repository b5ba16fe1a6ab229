"""What the configuration `device=cuda` relies on: the same engine, trainer and problems, on a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from kbrl_async.kernels.problems import load_suite
from kbrl_async.lab.small_policy.configured import small_options
from kbrl_async.lab.small_policy.making import ensure_small_policy
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import load_model, load_tokenizer
from kbrl_async.learning.trainer import Trainer
from kbrl_async.rollouts.prompts import render_prompt
from kbrl_async.runs.config import load
from kbrl_async.sampling.engine import Completion
from kbrl_async.sampling.settings import Sampler
from kbrl_async.sampling.transformers.engine import TransformersEngine
from protocols.records import Problem, SamplingParams, TrainGroup, TrainSample
from tests.models import update_settings

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = {"examples": 600, "steps": 30, "max_seconds": 20, "hidden_size": 64, "layers": 2}
    options = small_options(load(overrides=[f"sft.{name}={value}" for name, value in tiny.items()]))
    return ensure_small_policy(Path(tmp_path_factory.mktemp("cache")), options)


def sample(policy: Path, folder: Path, temperature: float) -> list[Completion]:
    """Sixteen answers of the published policy, generated on the GPU."""

    async def generate() -> list[Completion]:
        model = load_model(str(policy), device="cuda")
        manifest = versions.publish(folder, model, 0, None, 0, [5, 6, 7, 8], str(policy))
        engine = TransformersEngine(model, load_tokenizer(str(policy)), Sampler())
        try:
            await engine.load(manifest, versions.version_folder(folder, 0))
            prompts = [render_prompt("compact", problem) for problem in load_suite()[:16]]
            params = SamplingParams(max_tokens=64, temperature=temperature)
            return list(await asyncio.gather(*(engine.generate(f"r{i}", p, params) for i, p in enumerate(prompts))))
        finally:
            await engine.close()

    return asyncio.run(generate())


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_importance_ratios_are_one_for_an_unchanged_policy(policy: Path, tmp_path: Path, temperature: float) -> None:
    done = sample(policy, tmp_path, temperature)
    model = load_model(str(policy), device="cuda")
    samples = [TrainSample(f"r{i}", c.prompt_ids, c.token_ids, c.logprobs, 0.0, 0.0, 0) for i, c in enumerate(done)]
    learned = Trainer(model, update_settings(dtype="float32"), "cuda").logprobs(samples, temperature)
    worst = max(
        abs(a - b) for s, row in zip(samples, learned, strict=True) for a, b in zip(s.logprobs, row, strict=True)
    )
    assert worst < 1e-3


@pytest.mark.parametrize("lora_rank", [0, 8])
def test_an_update_moves_the_policy_towards_what_was_rewarded(policy: Path, tmp_path: Path, lora_rank: int) -> None:
    done = sample(policy, tmp_path, 1.0)[:4]
    model = load_model(str(policy), device="cuda", lora_rank=lora_rank)
    trainer = Trainer(model, update_settings(dtype="float32", learning_rate=1e-3, warmup_steps=0), "cuda")
    samples = [
        TrainSample(f"r{i}", c.prompt_ids, c.token_ids, c.logprobs, 1.0 if i else -1.0, 0.0, 0)
        for i, c in enumerate(done)
    ]
    before = sum(map(sum, trainer.logprobs(samples[1:], 1.0)))
    metrics = trainer.step([TrainGroup("g", "p", 1, samples)], 1.0)
    assert metrics["grad_norm"] > 0
    assert sum(map(sum, trainer.logprobs(samples[1:], 1.0))) > before


@pytest.mark.parametrize("problem", load_suite(shapes="gpu"), ids=lambda problem: problem.problem_id)
def test_every_problem_runs_at_its_gpu_shape(problem: Problem) -> None:
    space: dict[str, object] = {}
    exec(problem.source, space)  # the project's own problem files
    torch.cuda.empty_cache()
    model = space["Model"](*space["get_init_inputs"]()).cuda()  # type: ignore[operator]
    inputs = [x.cuda() for x in space["get_inputs"]()]  # type: ignore[operator]
    with torch.no_grad():
        for _ in range(3):
            out = model(*inputs)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        out = model(*inputs)
        end.record()
    torch.cuda.synchronize()
    assert torch.isfinite(out).all()
    assert start.elapsed_time(end) > 0.02, "too short to be timed against launch overhead"
