"""Loads of policy versions: whoever asked for one may go, and none computes while a bench measures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kbrl_async.errors import CheckpointError, InfraError
from protocols.messages import Pause, Resume
from services.runtime.pumping import watched
from services.sampler.actor import EngineLost, Sampling
from tests.unit.sampling.fake_vllm import FakeAsyncLLM
from tests.unit.sampling.test_vllm_engine import Learner, until
from tests.unit.services.test_sampling_vllm import Quiet, ask, sampling

PATIENCE_S = 30.0
WINDOW = Pause("window", "cpu", 600.0)


class Held:
    """A method of vLLM that waits until it is let go."""

    def __init__(self, real: Any) -> None:
        self._real, self.begun, self._go = real, asyncio.Event(), asyncio.Event()

    def let_go(self) -> None:
        self._go.set()

    async def __call__(self, *given: Any, **named: Any) -> Any:
        self.begun.set()
        await self._go.wait()
        return await self._real(*given, **named)


async def loading(one: Sampling, llm: FakeAsyncLLM, learner: Learner) -> tuple[Held, asyncio.Task[None]]:
    """A load of a new version, in the middle of its work."""
    name = "collective_rpc" if learner.kind == "full" else "add_lora"
    held = Held(getattr(llm, name))
    setattr(llm, name, held)
    learner.publish()
    task = asyncio.create_task(one.catch_up())
    await asyncio.wait_for(held.begun.wait(), PATIENCE_S)
    return held, task


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_a_rollout_that_is_revoked_takes_no_load_with_it(tmp_path: Path, kind: str) -> None:
    async def body(one: Sampling, llm: FakeAsyncLLM, learner: Learner) -> None:
        held, asked = await loading(one, llm, learner)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        held.let_go()
        await one.catch_up()
        assert one.stats().policy_version == 1
        outcome = await one.generate(*ask(1))
        assert outcome.policy_version == 1

    sampling(tmp_path, body, kind)


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_a_bench_gets_its_quiet_when_the_load_is_done(tmp_path: Path, kind: str) -> None:
    quiet = Quiet(is_idle=True)
    gate, said = quiet.gate, quiet.said

    async def body(one: Sampling, llm: FakeAsyncLLM, learner: Learner) -> None:
        helper = asyncio.create_task(one.stand_still())
        held, asked = await loading(one, llm, learner)
        gate.handle(WINDOW)
        await asyncio.sleep(0.1)
        assert not said
        held.let_go()
        await asyncio.wait_for(until(lambda: bool(said)), PATIENCE_S)
        assert [answer.window_id for answer in said] == ["window"]
        gate.handle(Resume("window"))
        await asked
        helper.cancel()

    sampling(tmp_path, body, kind, quiet)


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_canaries_that_wait_among_rollouts_stand_still_with_them(tmp_path: Path, kind: str) -> None:
    quiet = Quiet()
    gate, said = quiet.gate, quiet.said

    async def body(one: Sampling, llm: FakeAsyncLLM, learner: Learner) -> None:
        helper = asyncio.create_task(one.stand_still())
        llm.held_at = 0  # no answer moves on, no canary either
        learner.publish()
        asked = asyncio.create_task(one.catch_up())
        await asyncio.wait_for(until(lambda: bool(llm.running)), PATIENCE_S)
        gate.handle(WINDOW)
        await asyncio.wait_for(until(lambda: bool(said)), PATIENCE_S)
        assert llm.paused
        assert not asked.done()
        llm.held_at = None
        gate.handle(Resume("window"))
        await asked
        assert one.stats().policy_version == 1
        helper.cancel()

    sampling(tmp_path, body, kind, quiet)


def test_an_engine_that_dies_in_a_load_is_noticed_though_its_answer_never_comes(tmp_path: Path) -> None:
    async def body(one: Sampling, llm: FakeAsyncLLM, learner: Learner) -> None:
        _, asked = await loading(one, llm, learner)
        llm.die()
        with pytest.raises(EngineLost):
            await asyncio.wait_for(one.watch(0.01), PATIENCE_S)
        asked.cancel()
        await asyncio.wait_for(one.close(), PATIENCE_S)

    sampling(tmp_path, body, "adapter")


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_no_load_begins_in_a_quiet_window(tmp_path: Path, kind: str) -> None:
    quiet = Quiet(is_idle=True)
    gate = quiet.gate

    async def body(one: Sampling, llm: FakeAsyncLLM, learner: Learner) -> None:
        gate.handle(WINDOW)
        learner.publish()
        asked = asyncio.create_task(one.catch_up())
        await asyncio.sleep(0.2)
        assert one.stats().policy_version == 0
        before = len(llm.seen)
        await asyncio.sleep(0.1)
        assert len(llm.seen) == before, "not a canary either"
        gate.handle(Resume("window"))
        await asked
        assert one.stats().policy_version == 1

    sampling(tmp_path, body, kind, quiet)


def test_after_a_reload_that_broke_off_no_answer_leaves(tmp_path: Path) -> None:
    async def body(one: Sampling, llm: FakeAsyncLLM, learner: Learner) -> None:
        async def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("out of memory")

        llm.held_at = 4
        running = asyncio.create_task(one.generate(*ask(1)))
        await until(lambda: any(len(r.out) == 4 for r in llm.running.values()))
        llm.collective_rpc = broken  # type: ignore[method-assign, assignment]
        learner.publish()
        with pytest.raises(CheckpointError, match="can't load the weights"):
            await one.catch_up()
        llm.held_at = None
        with pytest.raises(EngineLost, match="out of memory"):
            await running

    sampling(tmp_path, body)


def test_a_sampler_whose_engine_fails_has_left_the_broker_before_the_engine_closes() -> None:
    done: list[str] = []

    async def works() -> None:
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            await asyncio.sleep(0)
            done.append("left")

    async def fails() -> None:
        raise InfraError("no room for a version", "")

    async def play() -> None:
        work, helper = asyncio.create_task(works()), asyncio.create_task(fails())
        with pytest.raises(InfraError):
            await watched(work, [helper])
        assert done == ["left"]

    asyncio.run(play())
