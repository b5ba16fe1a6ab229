"""The sampler's handler: keeps an engine on the newest policy and turns requests into generations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from kbrl_async.learning import versions
from kbrl_async.learning.models import ModelOptions, load_model, load_tokenizer
from kbrl_async.prompts import extract
from kbrl_async.sampling.engine import Completion, Engine, EngineStats
from kbrl_async.sampling.transformers_engine import TransformersEngine, TransformersOptions
from kbrl_async.telemetry.logs import bound
from protocols.messages import Stage, Task
from protocols.records import VERIFIER, Candidate, Fault, Generation, RolloutRequest
from services.runtime.service import Service
from services.runtime.worker import Outcome

_REQUESTS = msgspec.msgpack.Decoder(RolloutRequest)


class Sampling:
    """One engine and the folder of policies it follows."""

    def __init__(self, service: Service, engine: Engine, *, follows: bool = True) -> None:
        """`follows`: the engine serves what the learner publishes; else it answers as it is."""
        self._service = service
        self._engine = engine
        self._follows = follows
        self._loading = asyncio.Lock()
        self.progress: Callable[[], None] = lambda: None

    @property
    def is_remote(self) -> bool:
        """The engine computes elsewhere: nothing here needs to stand still for a bench."""
        return self._service.config.sampler.engine == "openai"

    @classmethod
    async def open(cls, service: Service, stop: asyncio.Event) -> Sampling | None:
        """The engine that the configuration names, serving its first policy; None when the run stops before."""
        if service.config.sampler.engine == "openai":
            return await cls._open_endpoint(service)
        return await cls._open_model(service, stop)

    @classmethod
    async def _open_endpoint(cls, service: Service) -> Sampling:
        from kbrl_async.sampling.openai_engine import OpenAIEngine, options_of  # httpx is for who asks for it

        settings = service.config.sampler
        engine = OpenAIEngine(options_of(settings, service.config.model_name))
        await engine.check()
        sampling = cls(service, engine, follows=settings.train_logprobs)
        await sampling.catch_up()
        service.log.info("ready", endpoint=settings.base_url, model=service.config.model_name, slots=settings.slots)
        return sampling

    @classmethod
    async def _open_model(cls, service: Service, stop: asyncio.Event) -> Sampling | None:
        """Waits for the learner's first policy, then loads it."""
        while (found := versions.newest(service.policies)) is None:
            if stop.is_set():
                return None
            await asyncio.sleep(0.2)
        manifest, _ = found
        settings = service.config.sampler
        model = load_model(ModelOptions(manifest.base_model, device=service.device))
        options = TransformersOptions(
            max_rows=settings.slots,
            threads=settings.threads or len(service.layout.sampler),
            seed=service.config.seed + 1000 * service.instance,
        )
        tokenizer = load_tokenizer(manifest.base_model)
        sampling: Sampling
        engine = TransformersEngine(model, tokenizer, options, tick=lambda: sampling.progress())
        sampling = cls(service, engine)
        await sampling.catch_up()
        service.log.info("ready", policy_version=engine.policy_version, slots=settings.slots)
        return sampling

    async def catch_up(self) -> None:
        """Loads the newest published version unless it is served already."""
        if not self._follows:
            return
        async with self._loading:
            found = versions.newest(self._service.policies)
            if found is not None and found[0].version > self._engine.policy_version:
                await self._engine.load(*found)
                self._service.log.debug("serving", policy_version=found[0].version)

    async def watch(self, period_s: float) -> None:
        """Keeps up with the learner. A remote engine has no thread to speak for it: while this loop runs, it moves."""
        told = self._engine.stats()
        while True:
            await asyncio.sleep(period_s)
            await self.catch_up()
            if self.is_remote:
                self.progress()
                told = self._tell_spending(told)

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
            done = await self._engine.generate(
                task.lease_id, request.prompt, request.sampling, request.purpose, request.role
            )
            generation = to_generation(done, request, self._service.worker_id)
            tokens = len(done.token_ids) or done.output_tokens
            self._service.log.debug("generated", policy_version=done.policy_version, tokens=tokens)
        next_stage = Stage.SCORE if generation.candidate is None else Stage.COMPILE
        frame = msgspec.msgpack.encode(generation)
        return Outcome(next_stage, [frame], done.policy_version, tokens=tokens)

    async def close(self) -> None:
        await self._engine.close()
        if self.is_remote:
            self._log_spending(self._engine.stats())


def to_generation(done: Completion, request: RolloutRequest, worker_id: str) -> Generation:
    """The sampler's frame: the completion and the candidate in it, if one was asked for and there is one."""
    if request.role == VERIFIER:
        candidate, problem, fault = None, "", Fault.OK
    else:
        found = extract(done.text)
        candidate = Candidate(found.source, request.backend) if found.source else None
        problem, fault = found.problem, Fault.OK if found.source else Fault.FORMAT_ERROR
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
    )
