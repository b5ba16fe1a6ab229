"""The sampler's handler: keeps an engine on the newest policy and turns requests into generations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from kbrl_async.learning import versions
from kbrl_async.learning.models import ModelOptions, load_model, load_tokenizer
from kbrl_async.prompts import extract
from kbrl_async.prompts.roles import VERIFIER
from kbrl_async.sampling.engine import Completion, Engine
from kbrl_async.sampling.transformers_engine import TransformersEngine, TransformersOptions
from kbrl_async.telemetry.logs import bound
from protocols.messages import Stage, Task
from protocols.records import Candidate, Fault, Generation, RolloutRequest
from services.runtime.service import Service
from services.runtime.worker import Outcome

_REQUESTS = msgspec.msgpack.Decoder(RolloutRequest)


class Sampling:
    """One engine and the folder of policies it follows."""

    def __init__(self, service: Service, engine: Engine) -> None:
        self._service = service
        self._engine = engine
        self._loading = asyncio.Lock()
        self.progress: Callable[[], None] = lambda: None

    @classmethod
    async def open(cls, service: Service, stop: asyncio.Event) -> Sampling | None:
        """Waits for the learner's first policy, then loads it; None when the run stops before."""
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
        async with self._loading:
            found = versions.newest(self._service.policies)
            if found is not None and found[0].version > self._engine.policy_version:
                await self._engine.load(*found)
                self._service.log.debug("serving", policy_version=found[0].version)

    async def watch(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            await self.catch_up()

    async def generate(self, task: Task, frames: list[bytes]) -> Outcome:
        request = _REQUESTS.decode(frames[0])
        if task.policy_version > self._engine.policy_version:
            await self.catch_up()
        with bound(task_id=task.task_id, group_id=task.group_id):
            done = await self._engine.generate(
                task.lease_id, request.prompt, request.sampling, request.purpose, request.role
            )
            generation = to_generation(done, request, self._service.worker_id)
            self._service.log.debug("generated", policy_version=done.policy_version, tokens=len(done.token_ids))
        next_stage = Stage.SCORE if generation.candidate is None else Stage.COMPILE
        frame = msgspec.msgpack.encode(generation)
        return Outcome(next_stage, [frame], done.policy_version, tokens=len(done.token_ids))

    async def close(self) -> None:
        await self._engine.close()


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
