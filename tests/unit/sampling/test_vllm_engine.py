"""The vLLM engine's promises, against a faithful small AsyncLLM; `tests/gpu/test_vllm.py` asks vLLM itself."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kbrl_async.errors import CheckpointError, ConfigError, InfraError, PolicyMismatch, PromptTooLong
from kbrl_async.learning.logprobs import sequence_logprobs
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import causal_lm, wrap_lora
from kbrl_async.sampling.engine import Computing
from kbrl_async.sampling.vllm.engine import VLLMEngine
from kbrl_async.sampling.vllm.scheduler import Meter
from protocols.records import PolicyVersion, Purpose, SamplingParams
from tests.models import EOS, NumberTokenizer
from tests.unit.sampling.fake_vllm import PARTS, FakeAsyncLLM, FakeLoRARequest, vllm_options

CANARY = [1, 2, 3, 4, 5, 6]
TEXT = "7 8 9 10 11 12 13"
LONG, SHORT = SamplingParams(max_tokens=60), SamplingParams(max_tokens=6)
Body = Callable[[VLLMEngine, FakeAsyncLLM], Awaitable[None]]
Version = tuple[PolicyVersion, Path]


class Learner:
    """Publishes versions: LoRA adapters on the base, or full weights; each a small step from the one before."""

    def __init__(self, model: torch.nn.Module, folder: Path, kind: str) -> None:
        self.base, self.folder, self.kind, self.version = model, folder, kind, -1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = wrap_lora(copy.deepcopy(model), 4) if kind == "adapter" else copy.deepcopy(model)

    def publish(self, step: float = 0.05) -> Version:
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if self.version and (self.kind == "full" or "lora_B" in name):
                    weight.add_(step * torch.randn(weight.shape, generator=generator))
        texts = [(TEXT, [int(word) for word in TEXT.split()])]
        parent = self.version - 1 if self.version else None
        manifest = versions.publish(self.folder, self.model, self.version, parent, 0, CANARY, "base", texts=texts)
        return manifest, versions.version_folder(self.folder, self.version)

    def logprobs(self, prompt: list[int], answer: list[int]) -> list[float]:
        return sequence_logprobs(causal_lm(self.model), prompt + answer)[len(prompt) - 1 :]


@pytest.fixture
def adapters(model: torch.nn.Module, tmp_path: Path) -> Learner:
    return Learner(model, tmp_path, "adapter")


@pytest.fixture
def weights(model: torch.nn.Module, tmp_path: Path) -> Learner:
    return Learner(model, tmp_path, "full")


class Shifted(NumberTokenizer):
    """Another tokenizer of the same vocabulary."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [(int(word) + 1) % EOS for word in text.split()]


def served(
    learner: Learner,
    body: Body,
    kv_tokens: int = 10_000,
    tokenizer: Any = None,
    computing: Computing = contextlib.nullcontext,
    **changes: Any,
) -> None:
    """Runs `body` with an engine over the learner's base."""

    async def main() -> None:
        given = {"lora_rank": 4 if learner.kind == "adapter" else 0, "max_model_len": 256, **changes}
        meter = Meter()
        llm = FakeAsyncLLM(learner.base, meter, kv_tokens)
        options = vllm_options(**given)
        engine = VLLMEngine(
            llm, PARTS, tokenizer or NumberTokenizer(), frozenset([EOS]), options, meter, computing=computing
        )
        try:
            async with asyncio.timeout(250):
                await body(engine, llm)
        finally:
            await engine.close()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


# ── generation ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_recorded_logprobs_are_those_of_the_sampling_distribution(adapters: Learner, temperature: float) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        adapters.publish()
        await engine.load(*adapters.publish())
        done = await engine.generate("r", "1 2 3", SamplingParams(max_tokens=12, temperature=temperature))
        inputs = torch.tensor([done.prompt_ids + done.token_ids])
        logits = causal_lm(adapters.model)(input_ids=inputs).logits[0, 2:-1].detach()
        expected = torch.log_softmax(logits / temperature, -1)[range(len(done.token_ids)), done.token_ids]
        assert done.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert done.spans == ((1, len(done.token_ids)),)

    served(adapters, body, temperature=temperature)


def test_settings_whose_logprobs_would_be_others_are_refused_for_training(adapters: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*adapters.publish())
        with pytest.raises(ConfigError, match="top_p"):
            await engine.generate("r", "1", SamplingParams(max_tokens=4, top_p=0.9))
        assert (await engine.generate("e", "1", SamplingParams(4, 1.0, 0.9), Purpose.EVAL)).token_ids

    served(adapters, body)


def test_a_stop_token_ends_an_answer_and_is_part_of_it(adapters: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*adapters.publish())
        llm.logits = lambda z, _: torch.full_like(z, -1e9).index_fill(0, torch.tensor([9]), 0.0)
        done = await engine.generate("r", "1", LONG)
        assert (done.token_ids, done.finish_reason) == ([9], "stop")

    served(adapters, body, stop=["9"])


def test_a_stop_text_of_several_tokens_is_refused(adapters: Learner) -> None:
    with pytest.raises(ConfigError, match=r"sampler\.stop: '9 9' is 2 tokens"):
        served(adapters, None, stop=["9 9"])  # type: ignore[arg-type]


def test_a_prompt_beyond_the_context_is_refused_alone(adapters: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*adapters.publish())
        with pytest.raises(PromptTooLong, match="exceed the model's 32 positions"):
            await engine.generate("r", " ".join(["1"] * 30), SHORT)
        assert (await engine.generate("s", "1", SHORT)).token_ids

    served(adapters, body, max_model_len=32)


def test_cancelling_frees_the_request_at_once(adapters: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*adapters.publish())
        llm.held_at = 1
        task = asyncio.create_task(engine.generate("r", "1", LONG))
        await until(lambda: bool(llm.running))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (llm.running, llm.waiting, engine.stats().active) == ({}, {}, 0)

    served(adapters, body)


def test_an_answer_past_its_deadline_is_given_back_and_frees_its_kv(adapters: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*adapters.publish())
        llm.paused = True  # no token will ever come
        with pytest.raises(InfraError, match=r"longer than 0\.05 s"):
            await engine.generate("r", "1", LONG)
        assert (llm.running, llm.waiting) == ({}, {})

    # The canaries are asked within the same deadline, and must not meet it on a slow machine.
    async def slow(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*adapters.publish())
        engine.options = vllm_options(lora_rank=4, max_model_len=256, deadline_s=0.05)
        engine.load = lambda *_: asyncio.sleep(0)  # type: ignore[assignment, method-assign]
        await body(engine, llm)

    served(adapters, slow)


# ── adapters ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_new_rollouts_take_the_newest_adapter_and_running_ones_end_on_theirs(adapters: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*adapters.publish())
        llm.held_at = 5
        old = asyncio.create_task(engine.generate("old", "1 2", LONG))
        await until(lambda: bool(llm.running))
        await engine.load(*adapters.publish())
        llm.held_at = None
        assert engine.stats().live_versions == 2
        new = await engine.generate("new", "1 2", SHORT)
        assert (new.policy_version, (await old).policy_version) == (1, 0)
        assert [name for _, name, _ in llm.seen if name][-1] == "policy-v1"

    served(adapters, body)


def test_an_adapter_goes_with_its_last_rollout(adapters: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*adapters.publish())
        llm.paused = True
        tasks = [asyncio.create_task(engine.generate(f"r{n}", "1 2", SHORT)) for n in range(2)]
        await until(lambda: len(llm.waiting) == 2)
        llm.paused = False
        await engine.load(*adapters.publish())
        await asyncio.gather(*tasks)
        assert (list(llm.adapters), engine.stats().live_versions) == ([2], 1)

    served(adapters, body)


def test_an_adapter_that_is_in_use_stays(adapters: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*adapters.publish())
        llm.held_at = 5
        task = asyncio.create_task(engine.generate("r", "1 2", LONG))
        await until(lambda: bool(llm.running))
        await engine.load(*adapters.publish())
        assert list(llm.adapters) == [1, 2]
        task.cancel()

    served(adapters, body)


def test_versions_never_share_cached_prompts(adapters: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        for _ in range(2):
            await engine.load(*adapters.publish())
            await asyncio.gather(*(engine.generate("r", "1 2", SHORT) for _ in range(2)))
        salts = [salt for request, _, salt in llm.seen if request.startswith("r#")]
        assert salts == ["v0", "v0", "v1", "v1"]

    served(adapters, body)


def test_a_new_version_waits_for_room_among_the_live_ones(adapters: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        llm.held_at, tasks = 5, []
        for n in range(3):
            await engine.load(*adapters.publish())
            tasks.append(asyncio.create_task(engine.generate(f"r{n}", "1", LONG)))
            await until(lambda n=n: any(r.startswith(f"r{n}#") for r in llm.running))
        loading = asyncio.create_task(engine.load(*adapters.publish()))
        await asyncio.sleep(0.05)
        assert not loading.done()
        tasks[0].cancel()  # nobody else ends, so only this can wake the load
        await loading
        assert engine.policy_version == 3
        for task in tasks:
            task.cancel()

    served(adapters, body, max_staleness=0)


def test_a_broken_adapter_is_named_and_the_version_before_goes_on_serving(adapters: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*adapters.publish())
        manifest, folder = adapters.publish()
        with (folder / "adapter_model.safetensors").open("ab") as file:
            file.write(b"x")
        with pytest.raises(CheckpointError, match="differs from its manifest"):
            await engine.load(manifest, folder)
        manifest, folder = adapters.publish()
        (folder / "adapter_config.json").write_text("{")
        with pytest.raises(CheckpointError, match="vLLM refuses policy-v2"):
            await engine.load(manifest, folder)
        assert (await engine.generate("r", "1", SHORT)).policy_version == 0
        assert list(llm.adapters) == [1]

    served(adapters, body)


# ── full weights ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_weights_change_in_flight_and_every_token_knows_its_version(weights: Learner, mode: str) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        if mode == "abort":  # a vLLM that can't freeze what is in flight
            engine.pausing.freezes = False
        first = weights.publish()
        old = copy.deepcopy(weights.model)
        await engine.load(*first)
        llm.held_at = 6
        tasks = [asyncio.create_task(engine.generate(f"r{n}", "1 2 3", LONG)) for n in range(3)]
        await until(lambda: len(llm.running) == 3 and all(len(r.out) > 5 for r in llm.running.values()))
        await engine.load(*weights.publish(step=0.01))
        llm.held_at = None
        for done in await asyncio.gather(*tasks):
            assert (done.policy_version, [v for v, _ in done.spans]) == (0, [0, 1])
            assert sum(n for _, n in done.spans) == len(done.token_ids) == len(done.logprobs)
            cut = done.spans[0][1]
            before = sequence_logprobs(old, done.prompt_ids + done.token_ids)[2:]
            after = weights.logprobs(done.prompt_ids, done.token_ids)
            assert done.logprobs == pytest.approx(before[:cut] + after[cut:], abs=1e-4)
        assert (engine.stats().interruptions, engine.stats().live_versions) == (3 if mode == "abort" else 0, 1)

    served(weights, body)


def test_no_answer_leaves_before_its_weights_are_proven(weights: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*weights.publish())
        llm.held_at = 4
        task = asyncio.create_task(engine.generate("r", "1 2 3", SamplingParams(max_tokens=8)))
        await until(lambda: bool(llm.running))
        manifest, folder = weights.publish()
        wrong = msgspec.structs.replace(manifest, canary_logprobs=[x - 1 for x in manifest.canary_logprobs])
        with pytest.raises(PolicyMismatch):
            await engine.load(wrong, folder)
        llm.held_at = None
        with pytest.raises(InfraError, match="not proven"):
            await task
        with pytest.raises(PolicyMismatch):
            await engine.generate("s", "1", SHORT)

    served(weights, body)


def test_canaries_come_before_everything_that_waits(weights: Learner) -> None:
    """After an update all that is in flight computes its keys and values anew, and nothing leaves before the proof."""

    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*weights.publish())
        await engine.generate("r", "1 2 3", SHORT)
        asked = {name.partition("#")[0]: priority for name, priority in llm.priorities.items()}
        assert asked["canary"] < asked["r"] == 0

    served(weights, body)


def test_an_adapter_for_an_engine_of_full_weights_is_refused(weights: Learner, tmp_path: Path) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        manifest, folder = weights.publish()
        with pytest.raises(ConfigError, match=r"policy v0 is lora, and sampler\.update=full"):
            await engine.load(msgspec.structs.replace(manifest, kind="lora"), folder)

    served(weights, body)


# ── attestation (I8) ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_base_model_served_by_mistake_is_found(adapters: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*adapters.publish())
        monkeypatch.setattr(engine, "with_lora", lambda _served: {})
        with pytest.raises(PolicyMismatch, match=r"policy v1 has the canary log-probs of (the base model|policy v0)"):
            await engine.load(*adapters.publish(step=1e-5))
        assert engine.policy_version == 0

    served(adapters, body)


def test_a_stale_adapter_is_found_though_it_is_one_small_step_old(adapters: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*adapters.publish())
        manifest, folder = adapters.publish()
        await engine.load(manifest, folder)
        real = llm.add_lora

        async def cached(request: FakeLoRARequest) -> bool:
            return await real(FakeLoRARequest(request.lora_name, request.lora_int_id, str(folder)))

        llm.add_lora = cached  # type: ignore[method-assign]
        with pytest.raises(PolicyMismatch, match="policy v2 has the canary log-probs of policy v1"):
            await engine.load(*adapters.publish(step=1e-5))
        assert list(llm.adapters) == [2]

    served(adapters, body)


def test_stale_weights_are_found(weights: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*weights.publish())
        await engine.load(*weights.publish())

        async def nothing(method: str, kwargs: dict[str, Any]) -> None: ...

        monkeypatch.setattr(llm, "collective_rpc", nothing)
        with pytest.raises(PolicyMismatch, match="policy v2 has the canary log-probs of policy v1"):
            await engine.load(*weights.publish(step=1e-5))

    served(weights, body)


async def nothing(_method: str, kwargs: dict[str, Any]) -> None:
    """A reload that isn't one."""


def rounded(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def test_an_untrained_policy_is_the_base_however_far_the_number_format_is_off(weights: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        reload = llm.collective_rpc

        async def in_its_format(method: str, kwargs: dict[str, Any]) -> None:
            await reload(method, kwargs)
            rounded(llm.model)

        llm.collective_rpc = in_its_format  # type: ignore[method-assign]
        rounded(llm.model)
        await engine.load(*weights.publish())
        assert engine.policy_version == 0
        await engine.load(*weights.publish(step=0.5))
        llm.collective_rpc = nothing  # type: ignore[method-assign, assignment]
        with pytest.raises(PolicyMismatch, match=r"policy v2 has the canary log-probs of (the base model|policy v)"):
            await engine.load(*weights.publish(step=0.5))

    served(weights, body, dtype="bfloat16")


def test_another_base_model_is_found(adapters: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        with torch.no_grad():
            for parameter in llm.model.parameters():
                parameter.mul_(1.02)
        with pytest.raises(PolicyMismatch, match=r"other weights are served|of the base model"):
            await engine.load(*adapters.publish())

    served(adapters, body)


def test_another_tokenizer_is_found(adapters: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        with pytest.raises(PolicyMismatch, match=r"tokenizer is not that of policy v0: they differ at token 0"):
            await engine.load(*adapters.publish())

    served(adapters, body, tokenizer=Shifted())


@pytest.mark.parametrize("served_at", [0.5, 0.93, 1.0])
def test_another_temperature_is_found(adapters: Learner, served_at: float) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        llm.logits = lambda z, temperature: z / served_at
        with pytest.raises(PolicyMismatch, match=rf"at temperature {served_at:g}\d* where 0\.8 was asked for"):
            await engine.load(*adapters.publish())

    served(adapters, body, temperature=0.8)


# ── what breaks ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_killed_engine_gives_every_rollout_back_and_takes_none(adapters: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*adapters.publish())
        llm.held_at = 5
        tasks = [asyncio.create_task(engine.generate(f"r{n}", "1", LONG)) for n in range(8)]
        await until(lambda: len(llm.running) == 8)
        llm.die()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [InfraError] * 8
        with pytest.raises(InfraError, match="has stopped"):
            await engine.generate("s", "1", SHORT)
        assert (engine.stats().active, engine.failure is None) == (0, False)

    served(adapters, body)


def test_exhausted_kv_delays_rollouts_and_loses_none(adapters: Learner) -> None:
    async def body(engine: VLLMEngine, llm: FakeAsyncLLM) -> None:
        await engine.load(*adapters.publish())
        requests = (engine.generate(f"r{n}", "1 2 3", SamplingParams(max_tokens=20)) for n in range(12))
        done = await asyncio.gather(*requests)
        assert llm.meter.preemptions > 0
        for one in done:
            assert one.logprobs == pytest.approx(adapters.logprobs(one.prompt_ids, one.token_ids), abs=1e-4)

    served(adapters, body, kv_tokens=60)
