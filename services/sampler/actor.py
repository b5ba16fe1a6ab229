"""The sampler's handler: keeps an engine on the newest policy and turns requests into generations."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from kbrl_async.errors import InfraError, PolicyMismatch, PromptTooLong
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import ModelOptions, load_model, load_tokenizer
from kbrl_async.rollouts.prompts import extract, kernel_span
from kbrl_async.rollouts.prompts.chat import PLAIN, chat_of
from kbrl_async.runs.config import sampler_threads
from kbrl_async.runs.telemetry.logs import bound
from kbrl_async.sampling.engine import Completion, Computes, Engine, EngineStats
from kbrl_async.sampling.spans import token_span
from kbrl_async.sampling.transformers.engine import TransformersEngine, TransformersOptions
from protocols.messages import Stage, Task
from protocols.records import VERIFIER, Candidate, Fault, Generation, PolicyVersion, RolloutRequest
from protocols.rollout import PROMPT_TOO_LONG
from services.runtime.quiet import Gate
from services.runtime.service import Service
from services.runtime.worker import Outcome

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

    def __init__(self, service: Service, engine: Engine, *, follows: bool = True) -> None:
        """`follows`: the engine serves what the learner publishes; else it answers as it is."""
        self._service = service
        self._engine = engine
        self._follows = follows
        self._loading = asyncio.Lock()
        self._loads: set[asyncio.Task[None]] = set()
        self._at_work: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._locate: Locate | None = None
        self._chat = PLAIN
        self.progress: Callable[[], None] = lambda: None

    @property
    def is_remote(self) -> bool:
        """The engine computes elsewhere: nothing here needs to stand still for a bench."""
        return self._service.config.sampler.engine == "openai"

    def stats(self) -> EngineStats:
        return self._engine.stats()

    @property
    def has_thread(self) -> bool:
        """The engine steps in a thread of this process."""
        return self._service.config.sampler.engine == "transformers"

    @classmethod
    async def open(cls, service: Service, stop: asyncio.Event) -> Sampling | None:
        """The engine that the configuration names, serving its first policy; None when the run stops before."""
        if service.config.sampler.engine == "openai":
            return await cls._open_endpoint(service)
        if service.config.sampler.engine == "vllm":
            from services.sampler.vllm import imported

            first, _ = await asyncio.gather(first_policy(service, stop), imported(service))
            return None if first is None else await cls._open_vllm(service, *first)
        first = await first_policy(service, stop)
        return None if first is None else await cls._open_model(service, *first)

    @classmethod
    async def _open_endpoint(cls, service: Service) -> Sampling:
        from kbrl_async.sampling.openai.engine import OpenAIEngine  # httpx is for who asks for it
        from kbrl_async.sampling.openai.options import options_of

        settings = service.config.sampler
        engine = OpenAIEngine(options_of(settings, service.config.model_name))
        await engine.check()
        sampling = cls(service, engine, follows=settings.train_logprobs)
        await sampling.catch_up()
        service.log.info("ready", endpoint=settings.base_url, model=service.config.model_name, slots=settings.slots)
        return sampling

    @classmethod
    async def _open_vllm(cls, service: Service, manifest: PolicyVersion, folder: Path) -> Sampling:
        from kbrl_async.sampling.vllm.start import start  # heavy, and an extra
        from services.sampler.vllm import end_ids, options_of, rank_of

        tokenizer = load_tokenizer(manifest.base_model)
        sampling: Sampling
        options = options_of(service, manifest, rank_of(folder))
        ends = end_ids(manifest.base_model)
        engine = await start(options, tokenizer, ends, tick=lambda: sampling.progress(), told=service.log.info)
        sampling = cls(service, engine)
        return await sampling._begin(tokenizer)

    @classmethod
    async def _open_model(cls, service: Service, manifest: PolicyVersion, _folder: Path) -> Sampling:
        settings = service.config.sampler
        quantisation = service.config.learner.base_quantisation  # or the canaries would be those of another base
        model = load_model(ModelOptions(manifest.base_model, device=service.device, quantisation=quantisation))
        options = TransformersOptions(
            max_rows=settings.slots,
            threads=sampler_threads(service.config, service.layout),
            seed=service.config.seed + 1000 * service.instance,
        )
        tokenizer = load_tokenizer(manifest.base_model)
        sampling: Sampling
        engine = TransformersEngine(model, tokenizer, options, tick=lambda: sampling.progress())
        sampling = cls(service, engine)
        return await sampling._begin(tokenizer)

    async def _begin(self, tokenizer: Any) -> Sampling:
        """Serves the first policy."""
        service = self._service
        if service.config.dataset_builder.pays_plan:
            self._locate = functools.partial(kernel_tokens, tokenizer)
        builder = service.config.dataset_builder
        self._chat = chat_of(tokenizer, service.config.prompt_option, builder.chat_template, builder.thinking)
        await self.catch_up()
        service.log.info("ready", policy_version=self._engine.policy_version, slots=service.config.sampler.slots)
        return self

    async def catch_up(self) -> None:
        """Loads the newest published version unless it is served already.

        Who asks may be cancelled (a rollout is revoked); the load goes on, for all the others.
        """
        if self._follows:
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
            found = versions.newest(self._service.policies)
            if found is not None and found[0].version > self._engine.policy_version:
                try:
                    with self._at_work():
                        await self._engine.load(*found)
                except InfraError:
                    self.check()
                    raise
                self._service.log.debug("serving", policy_version=found[0].version)

    async def watch(self, period_s: float) -> None:
        """Keeps up with the learner. A remote engine has no thread to speak for it: while this loop runs, it moves."""
        told = self._engine.stats()
        while True:
            await asyncio.sleep(period_s)
            if self._follows:
                await self._keep_up(period_s)
            self.check()
            if self.is_remote:
                self.progress()
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

    async def generate(self, task: Task, frames: list[bytes]) -> Outcome:
        request = _REQUESTS.decode(frames[0])
        if task.policy_version > self._engine.policy_version:
            await self.catch_up()
        with bound(task_id=task.task_id, group_id=task.group_id):
            try:
                done = await self._engine.generate(
                    task.lease_id,
                    self._chat.render(request.prompt),
                    request.sampling,
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
        return Outcome(next_stage, [frame], done.policy_version, tokens=tokens)

    def _refused(self, error: PromptTooLong) -> Outcome:
        """The rollout ends with this reason; the same prompt would be too long for every other sampler too."""
        self._service.log.warning("rollout refused", reason=str(error))
        version, now = self._engine.policy_version, time.time()
        message = f"{PROMPT_TOO_LONG}: {error.cause}"
        refused = Generation(
            version, [], [], [], "", "stop", None, Fault.INFRA_ERROR, message, self._service.worker_id, now, now
        )
        return Outcome(Stage.SCORE, [msgspec.msgpack.encode(refused)], version)

    def share(self, gate: Gate) -> None:
        """From now on loads compute between quiet windows only; before, nobody could have asked for one."""
        if isinstance(self._engine, Computes):
            self._engine.computing, self._at_work = gate.unstoppable, gate.at_work

    async def stand_still(self, gate: Gate) -> None:
        """For an engine that computes in a process of its own: it stands still while a bench wants quiet."""
        engine = self._engine
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
        if self.is_remote:
            self._log_spending(self._engine.stats())


async def first_policy(service: Service, stop: asyncio.Event) -> tuple[PolicyVersion, Path] | None:
    """The learner's newest version, waited for; None when the run stops before there is one."""
    while (found := versions.newest(service.policies)) is None:
        if stop.is_set():
            return None
        await asyncio.sleep(0.2)
    return found


Locate = Callable[[Completion, str], tuple[int, int]]
"""Which tokens of a completion are the kernel with this source."""


def kernel_tokens(tokenizer: Any, done: Completion, source: str) -> tuple[int, int]:
    """(first token, first token behind) of the kernel; (0, 0) where it is not found in the text."""
    start, end = kernel_span(done.text, source)
    return token_span(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), done.token_ids, start, end)


def to_generation(
    done: Completion,
    request: RolloutRequest,
    worker_id: str,
    locate: Locate | None = None,
    *,
    opened_thought: bool = False,
) -> Generation:
    """The sampler's frame: the completion and the candidate in it, if one was asked for and there is one."""
    if request.role == VERIFIER:
        candidate, problem, fault = None, "", Fault.OK
    else:
        found = extract(done.text, opened_thought=opened_thought)
        candidate = Candidate(found.source, request.backend) if found.source else None
        problem, fault = found.problem, Fault.OK if found.source else Fault.FORMAT_ERROR
    span = locate(done, candidate.source) if locate is not None and candidate is not None else (0, 0)
    return Generation(
        policy_version=done.policy_version,
        prompt_ids=done.prompt_ids,
        token_ids=done.token_ids,
        logprobs=done.logprobs,
        text=done.text,
        finish_reason=done.finish_reason,
        candidate=candidate,
        fault=fault,
        message=problem,
        worker_id=worker_id,
        started_at=done.started_at,
        finished_at=done.finished_at,
        code_start=span[0],
        code_end=span[1],
        spans=done.spans if len(done.spans) > 1 else (),
    )
