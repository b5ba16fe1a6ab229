"""The engine's promises: versions, canary, cancellation, failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kbrl_async.errors import CheckpointError, ConfigError, InfraError, PolicyMismatch, PromptTooLong
from kbrl_async.sampling.settings import Sampler
from kbrl_async.sampling.transformers.engine import TransformersEngine
from protocols.records import PolicyVersion, Purpose, SamplingParams

Publish = Callable[[int], tuple[PolicyVersion, Path]]
LONG = SamplingParams(max_tokens=200)


def with_engine(
    model: torch.nn.Module,
    tokenizer: Any,
    body: Callable[[TransformersEngine], Awaitable[None]],
    tick: Callable[[], None] = lambda: None,
    slots: int = 64,
    **options: int,
) -> None:
    async def main() -> None:
        engine = TransformersEngine(model, tokenizer, Sampler(slots=slots), tick=tick, **options)
        try:
            async with asyncio.timeout(250):
                await body(engine)
        finally:
            await engine.close()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


class Gate:
    """A tick that holds the engine's thread back while it is not open; `step` lets it through once."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self._steps = threading.Semaphore(0)
        self._left = 0

    def __call__(self) -> None:
        for _ in range(20_000):
            if self.open.is_set():
                return
            if self._steps.acquire(timeout=0.01):
                self._left -= 1
                return

    def step(self) -> None:
        """One more, once the last one has been taken: many at once would be done before anybody looks again."""
        if self._left == 0:
            self._left += 1
            self._steps.release()


def test_many_requests_over_few_rows_all_complete(model: torch.nn.Module, tokenizer: Any, publish: Publish) -> None:
    async def body(engine: TransformersEngine) -> None:
        await engine.load(*publish(0))
        params = SamplingParams(max_tokens=9, temperature=0.7)
        done = await asyncio.gather(*[engine.generate(f"r{i}", f"{i} {i + 1}", params) for i in range(20)])
        assert [c.prompt_ids for c in done] == [[i, i + 1] for i in range(20)]
        assert all(len(c.token_ids) == len(c.logprobs) for c in done)
        assert all(c.finish_reason == ("stop" if c.token_ids[-1] == 63 else "length") for c in done)
        assert engine.stats().active == 0

    with_engine(model, tokenizer, body, slots=4)


def test_a_running_sequence_ends_on_its_version_and_a_new_one_begins_on_the_newest(
    model: torch.nn.Module, tokenizer: Any, publish: Publish
) -> None:
    gate = Gate()

    async def body(engine: TransformersEngine) -> None:
        await engine.load(*publish(0))
        gate.open.clear()
        tasks = [asyncio.create_task(engine.generate(f"old{i}", "1 2 3", LONG)) for i in range(4)]
        # The thread may look when the first one is there: one more look finds all.
        await until(lambda: engine.stats().active > 0)
        gate.step()
        await until(lambda: engine.stats().active + sum(t.done() for t in tasks) == 4)
        loading = asyncio.create_task(engine.load(*publish(1)))
        await until(lambda: engine.stats().waiting == 1)
        gate.open.set()
        await loading
        new = await engine.generate("new", "1 2 3", SamplingParams(max_tokens=3))
        assert {t.result().policy_version for t in tasks if t.done()} <= {0}
        old = await asyncio.gather(*tasks)
        assert {c.policy_version for c in old} == {0}
        assert new.policy_version == 1
        await until(lambda: engine.stats().live_versions == 1)

    with_engine(model, tokenizer, body, gate)


def test_the_number_of_live_versions_is_bounded(model: torch.nn.Module, tokenizer: Any, publish: Publish) -> None:
    async def body(engine: TransformersEngine) -> None:
        peak, tasks = 0, []
        for version in range(5):
            await engine.load(*publish(version))
            tasks.append(asyncio.create_task(engine.generate(f"r{version}", "5 6", LONG)))
            await asyncio.sleep(0.005)
            peak = max(peak, engine.stats().live_versions)
        await asyncio.gather(*tasks)
        assert peak <= 2

    with_engine(model, tokenizer, body, max_versions=2)


def test_cancelling_frees_the_row(model: torch.nn.Module, tokenizer: Any, publish: Publish) -> None:
    gate = Gate()

    async def body(engine: TransformersEngine) -> None:
        await engine.load(*publish(0))
        gate.open.clear()
        stuck = asyncio.create_task(engine.generate("long", "1 2", LONG))
        await until(lambda: engine.stats().active == 1)
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        gate.open.set()
        await engine.generate("short", "1 2", SamplingParams(max_tokens=2))
        assert engine.stats().generated_tokens <= 5

    with_engine(model, tokenizer, body, gate, slots=1)


def test_the_same_request_twice_gets_two_answers(model: torch.nn.Module, tokenizer: Any, publish: Publish) -> None:
    async def body(engine: TransformersEngine) -> None:
        await engine.load(*publish(0))
        both = [engine.generate("same", "1 2", SamplingParams(max_tokens=5)) for _ in range(2)]
        assert [answer.prompt_ids for answer in await asyncio.gather(*both)] == [[1, 2], [1, 2]]

    with_engine(model, tokenizer, body)


def test_the_base_model_served_by_mistake_is_found(model: torch.nn.Module, tokenizer: Any, publish: Publish) -> None:
    """The folder holds the base's weights under the manifest of a trained version."""

    async def body(engine: TransformersEngine) -> None:
        base, folder = publish(0)
        trained, _ = publish(1)
        mistaken = msgspec.structs.replace(trained, weights_sha256=base.weights_sha256)
        with pytest.raises(PolicyMismatch, match="canary"):
            await engine.load(mistaken, folder)
        assert engine.policy_version == -1

    with_engine(model, tokenizer, body)


def test_weights_that_changed_on_disk_are_refused(model: torch.nn.Module, tokenizer: Any, publish: Publish) -> None:
    async def body(engine: TransformersEngine) -> None:
        manifest, folder = publish(0)
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
        with pytest.raises(CheckpointError, match="SHA-256"):
            await engine.load(manifest, folder)

    with_engine(model, tokenizer, body)


def test_an_older_version_is_ignored(model: torch.nn.Module, tokenizer: Any, publish: Publish) -> None:
    async def body(engine: TransformersEngine) -> None:
        await engine.load(*publish(2))
        await engine.load(*publish(1))
        assert engine.policy_version == 2

    with_engine(model, tokenizer, body)


def test_training_refuses_top_p_and_evaluation_does_not(
    model: torch.nn.Module, tokenizer: Any, publish: Publish
) -> None:
    async def body(engine: TransformersEngine) -> None:
        await engine.load(*publish(0))
        params = SamplingParams(max_tokens=2, top_p=0.9)
        with pytest.raises(ConfigError, match="top_p"):
            await engine.generate("r", "1", params)
        assert (await engine.generate("r", "1", params, Purpose.EVAL)).token_ids

    with_engine(model, tokenizer, body)


def test_a_sequence_beyond_the_model_s_positions_is_refused(
    model: torch.nn.Module, tokenizer: Any, publish: Publish
) -> None:
    async def body(engine: TransformersEngine) -> None:
        await engine.load(*publish(0))
        with pytest.raises(ConfigError, match="256 positions"):
            await engine.generate("r", "1 2", SamplingParams(max_tokens=255))

    with_engine(model, tokenizer, body)


def test_when_the_thread_dies_every_request_hears_of_it(
    model: torch.nn.Module, tokenizer: Any, publish: Publish
) -> None:
    def tick() -> None:
        raise RuntimeError("device lost")

    async def body(engine: TransformersEngine) -> None:
        await engine.load(*publish(0))
        assert engine.failure is None
        results = await asyncio.gather(
            *[engine.generate(f"r{i}", "1 2", LONG) for i in range(3)], return_exceptions=True
        )
        assert all(isinstance(r, InfraError) and "device lost" in str(r) for r in results)
        assert str(engine.failure) == "device lost"  # by which the sampler's process knows that it must end
        with pytest.raises(InfraError):
            await engine.generate("later", "1 2", LONG)

    with_engine(model, tokenizer, body, tick)


def test_closing_fails_what_still_waits(model: torch.nn.Module, tokenizer: Any, publish: Publish) -> None:
    gate = Gate()

    async def body(engine: TransformersEngine) -> None:
        await engine.load(*publish(0))
        gate.open.clear()
        task = asyncio.create_task(engine.generate("r", "1 2", LONG))
        await until(lambda: engine.stats().active == 1)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0.01)
        gate.open.set()
        await closing
        with pytest.raises(InfraError, match="closed"):
            await task

    with_engine(model, tokenizer, body, gate)


def test_a_prompt_beyond_the_context_is_refused_and_the_others_go_on(
    model: torch.nn.Module, tokenizer: Any, publish: Publish
) -> None:
    async def body(engine: TransformersEngine) -> None:
        await engine.load(*publish(0))
        limit = model.config.max_position_embeddings  # type: ignore[union-attr]
        long = engine.generate("long", "5 6 7 " * int(limit), SamplingParams(max_tokens=4))  # type: ignore[arg-type]
        short = engine.generate("short", "5 6", SamplingParams(max_tokens=4))
        refused, done = await asyncio.gather(long, short, return_exceptions=True)
        assert isinstance(refused, PromptTooLong)
        assert not isinstance(done, BaseException)
        with pytest.raises(ConfigError, match="no room") as error:
            await engine.generate("all", "5 6", SamplingParams(max_tokens=int(limit)))  # type: ignore[arg-type]
        assert not isinstance(error.value, PromptTooLong)

    with_engine(model, tokenizer, body)


def test_short_answers_leave_and_others_come_while_a_long_one_goes_on(
    model: torch.nn.Module, tokenizer: Any, publish: Publish
) -> None:
    gate = Gate()

    async def body(engine: TransformersEngine) -> None:
        await engine.load(*publish(0))
        gate.open.clear()
        long = asyncio.create_task(engine.generate("long", "5 6", SamplingParams(max_tokens=200, seed=0)))
        short = [
            asyncio.create_task(engine.generate(f"s{i}", "5 6", SamplingParams(max_tokens=2, seed=i))) for i in range(6)
        ]
        while not all(task.done() for task in short):
            gate.step()
            await asyncio.sleep(0.001)
        assert not long.done()
        gate.open.set()
        await long

    with_engine(model, tokenizer, body, gate, slots=2)
