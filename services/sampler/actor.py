"""The sampler's handler: keeps an engine on the newest policy and turns requests into generations."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from kbrl_async.errors import InfraError, PolicyMismatch, PromptTooLong
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import load_model, load_tokenizer
from kbrl_async.rollouts.prompts.chat import PLAIN, chat_of
from kbrl_async.runs import origins
from kbrl_async.runs.config import sampler_threads
from kbrl_async.runs.telemetry.logs import bound
from kbrl_async.sampling.engine import Engine, EngineSetup, EngineStats
from kbrl_async.sampling.forced import Reciter, read_script
from kbrl_async.sampling.settings import ENGINES
from protocols.messages import Stage, Task
from protocols.records import Fault, Generation, PolicyVersion, RolloutRequest
from protocols.rollout import PROMPT_TOO_LONG
from services.runtime.quiet import PauseGate
from services.runtime.service import Service, Stopped
from services.runtime.worker import HandlerOutcome, Worker
from services.sampler.generation import kernel_tokens, to_generation
from services.sampler.line import LearnerLine

REACH_S = 120.0
"""Longest wait of a rollout for the version that it was dispatched with."""
LOOK_S = 0.05
_REQUESTS = msgspec.msgpack.Decoder(RolloutRequest)


@runtime_checkable
class StandsStill(Protocol):
    """An engine that steps in another process, so that holding a thread of this one does not hold it."""

    async def stand_still(self) -> None: ...
    async def go_on(self) -> None: ...


class EngineLost(RuntimeError):  # noqa: N818 - reads as the sentence it prints
    """Not a KbrlError: with those a run ends, and here its nanny shall start this process again."""


class Sampling:
    """One engine and the folder of policies it follows."""

    def __init__(self, service: Service, engine: Engine, gate: PauseGate, progress: Callable[[], None]) -> None:
        """`gate` of the worker; `progress` says that work moves on."""
        self._service, self._engine, self._gate, self._progress = service, engine, gate, progress
        self._loading = asyncio.Lock()
        self._loads: set[asyncio.Task[None]] = set()
        self._line = LearnerLine(service, engine)
        config, tokenizer = service.config, engine.tokenizer
        self._locate = functools.partial(kernel_tokens, tokenizer) if tokenizer and config.reward.pays_plan else None
        options = config.prompt_option, config.prompt.chat_template, config.prompt.thinking
        self._chat = PLAIN if tokenizer is None else chat_of(tokenizer, *options)
        self._reciter = None
        if config.sampler.forced and tokenizer is not None:
            thought = self._chat.opens_thought
            self._reciter = Reciter(read_script(config.sampler.forced), tokenizer, opens_thought=thought)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def begin(self, stop: asyncio.Event) -> None:
        """Serves the first policy, waited for where the engine was started before there is one.

        :raises Stopped: the run stops before.
        """
        await self.catch_up()
        if self._engine.follows and self._engine.policy_version < 0:
            self._service.log.info("engine started, the first policy is waited for")
        while self._engine.follows and self._engine.policy_version < 0:
            if stop.is_set():
                raise Stopped
            await asyncio.sleep(LOOK_S)
            await self._keep_up(LOOK_S)
            self.check()
        version, settings = self._engine.policy_version, self._service.config.sampler
        self._service.log.info("ready", policy_version=version, engine=settings.engine, slots=settings.slots)

    async def catch_up(self) -> None:
        """Loads the newest published version unless it is served already.

        Who asks may be cancelled (a rollout is revoked); the load goes on, for all the others.
        """
        if self._engine.follows:
            await asyncio.shield(self._begin_load())

    def _begin_load(self) -> asyncio.Task[None]:
        load = asyncio.create_task(self._load_newest())
        self._loads.add(load)
        load.add_done_callback(self._loaded)
        return load

    def _loaded(self, load: asyncio.Task[None]) -> None:
        self._loads.discard(load)
        if not load.cancelled() and load.exception() is not None:  # who asked may have gone
            self._service.log.warning("policy not loaded", reason=str(load.exception()))

    async def _load_newest(self) -> None:
        async with self._loading:
            if await self._receive_newest():
                return
            found = versions.newest(self._service.policies)
            if found is not None and found[0].version > self._engine.policy_version:
                try:
                    with contextlib.nullcontext() if self._engine.is_remote else self._gate.at_work():
                        await self._engine.load(*found)
                except InfraError:
                    self.check()
                    raise
                error = self._engine.stats().canary_max_error
                self._service.log.debug("serving", policy_version=found[0].version, canary_error=error)

    async def _receive_newest(self) -> bool:
        """Straight from the learner; the first version by its file, where that is there."""
        served = self._engine.policy_version
        if served < 0 and versions.newest(self._service.policies) is not None:
            return False
        with self._gate.at_work():
            return await self._line.load_newer(served)

    async def watch(self, period_s: float) -> None:
        """Keeps up with the learner. A remote engine has no thread to speak for it: while this loop runs, it moves."""
        told = self._engine.stats()
        while True:
            await asyncio.sleep(period_s)
            if self._engine.follows:
                await self._keep_up(period_s)
            self.check()
            if self._engine.is_remote:
                self._progress()
                told = self._tell_spending(told)

    async def _keep_up(self, period_s: float) -> None:
        """Looks at the engine while it loads too: a call of vLLM's whose process died never ends."""
        load = self._begin_load()
        while not (await asyncio.wait({load}, timeout=period_s))[0]:
            self.check()
        load.result()

    def check(self) -> None:
        """EngineLost when the engine has died: a fresh process gets a fresh one."""
        failure = self._engine.failure
        if failure is not None and not isinstance(failure, PolicyMismatch):
            self._service.log.error("engine lost", reason=str(failure))
            raise EngineLost(str(failure)) from failure

    def _tell_spending(self, told: EngineStats) -> EngineStats:
        """A line in the log for every hundred requests, and at the end."""
        now = self._engine.stats()
        if now.requests < told.requests + 100:
            return told
        self._log_spending(now)
        return now

    def _log_spending(self, now: EngineStats) -> None:
        self._service.log.info(
            "endpoint",
            requests=now.requests,
            retries=now.retries,
            prompt_tokens=now.prefill_tokens,
            output_tokens=now.generated_tokens,
            cost=round(now.cost, 6),
        )

    async def generate(self, task: Task, frames: list[bytes]) -> HandlerOutcome:
        request = _REQUESTS.decode(frames[0])
        if task.policy_version > self._engine.policy_version:
            await self._reach(task.policy_version)
        with bound(task_id=task.task_id, group_id=task.group_id):
            try:
                done = await self._engine.generate(
                    task.lease_id,
                    self._chat.render(request.prompt),
                    request.sampling if self._reciter is None else self._reciter.params(request),
                    request.purpose,
                    request.role,
                )
            except PromptTooLong as error:
                return self._refused(error)
            except InfraError:
                self.check()  # a dead engine takes nothing more: the same task would soon have lost all its attempts
                raise
            generation = to_generation(
                done, request, self._service.worker_id, self._locate, opened_thought=self._chat.opens_thought
            )
            tokens = len(done.token_ids) or done.output_tokens
            self._service.log.debug("generated", policy_version=done.policy_version, tokens=tokens)
        next_stage = Stage.SCORE if generation.candidate is None else Stage.COMPILE
        frame = msgspec.msgpack.encode(generation)
        return HandlerOutcome(next_stage, [frame], done.policy_version, tokens=tokens)

    async def _reach(self, version: int) -> None:
        """Waits for a version that the broker knows of: it may be on its way still. InfraError after `REACH_S`."""
        try:
            async with asyncio.timeout(REACH_S):
                await self.catch_up()
                while self._engine.follows and self._engine.policy_version < version:
                    await asyncio.sleep(LOOK_S)
                    await self.catch_up()
        except TimeoutError as error:
            cause = f"policy version {version} was not published within {REACH_S:g} s"
            raise InfraError(cause, "Look at the learner's log") from error

    def _refused(self, error: PromptTooLong) -> HandlerOutcome:
        """The rollout ends with this reason; the same prompt would be too long for every other sampler too."""
        self._service.log.warning("rollout refused", reason=str(error))
        version, now = self._engine.policy_version, time.time()
        message = f"{PROMPT_TOO_LONG}: {error.cause}"
        refused = Generation(
            version, [], [], [], "", "stop", None, Fault.INFRA_ERROR, message, self._service.worker_id, now, now
        )
        return HandlerOutcome(Stage.SCORE, [msgspec.msgpack.encode(refused)], version)

    async def stand_still(self) -> None:
        """For an engine that computes in a process of its own: it stands still while a bench wants quiet."""
        engine, gate = self._engine, self._gate
        if not isinstance(engine, StandsStill):
            return
        while True:
            await asyncio.sleep(0.01)
            if gate.is_open or gate.is_held_up:
                continue
            await engine.stand_still()
            try:
                await asyncio.to_thread(gate.breathe)
            finally:
                await engine.go_on()

    async def close(self) -> None:
        loads = list(self._loads)
        for load in loads:
            load.cancel()
        await self._engine.close()
        if loads:
            await asyncio.wait(loads, timeout=1.0)  # what a dead engine was asked has no end
        if self._engine.is_remote:
            self._log_spending(self._engine.stats())


async def start_engine(service: Service, worker: Worker, stop: asyncio.Event) -> Engine | None:
    """The engine that `sampler.engine` names, without a policy yet; None when the run stops before there is one."""
    config = service.config
    # Held as the learner holds it, or the canaries would be those of another base.
    quantisation = config.learner.base_quantisation
    # A version that is there, as of a resumed run, names its base itself.
    base = origins.base_beside(config) if versions.newest(service.policies) is None else None
    setup = EngineSetup(
        settings=config.sampler,
        model_name=config.model_name,
        temperature=config.temperature,
        max_staleness=config.max_staleness,
        seed=config.seed + 1000 * service.instance,
        device=service.device,
        threads=sampler_threads(config, service.layout),
        first_policy=functools.partial(first_policy, service, stop),
        load_model=lambda base: load_model(base, service.device, base_quantisation=quantisation),
        load_tokenizer=load_tokenizer,
        breathe=worker.breathe,
        progress=worker.progress,
        computing=worker.gate.unstoppable,
        told=service.log.info,
        base=base,
    )
    try:
        engine: Engine = await ENGINES.load(config.sampler.engine)(setup)
    except Stopped:
        return None
    return engine


async def first_policy(service: Service, stop: asyncio.Event) -> tuple[PolicyVersion, Path]:
    """The learner's newest version, waited for.

    :raises Stopped: the run stops before there is one.
    """
    while (found := versions.newest(service.policies)) is None:
        if stop.is_set():
            raise Stopped
        await asyncio.sleep(0.2)
    return found
