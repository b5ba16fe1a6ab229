"""An `Engine` over any OpenAI-compatible endpoint: vLLM's or SGLang's server, hosted APIs. For evaluation, for
`kbrl optimize`, for best-of-N data.

::

    generate ─▶ at most `slots` at once ─▶ pace (requests a minute) ─▶ POST ─▶ 200: a Completion, its tokens paid for
                                             ▲                            └▶ 429, 5xx, garbage, no connection:
                                             └──── back-off with jitter, Retry-After ────┘   again until the deadline

Invariants
* No training without log-probs: `Purpose.TRAIN` is refused unless `train_logprobs` says that the endpoint returns
  token ids and the log-probs of the sampling distribution; then each answer must carry them, and each version must
  pass its canary (I8).
* The key is read from an environment variable and appears in no log, error, statistic or configuration.
* Cancelling `generate` closes its connection, by which servers stop generating.
* From the first byte on, every wait is within the request's deadline (I11); that for a slot and for the pace is not.
* A lasting refusal (key, model, format) is a ConfigError; an endpoint that fails for a while is an InfraError (I4).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from kbrl_async.errors import ConfigError, InfraError, KbrlError, PolicyMismatch
from kbrl_async.sampling.engine import Completion, EngineSetup, EngineStats, Tokenizer, check_params
from kbrl_async.sampling.openai import endpoint
from kbrl_async.sampling.openai.endpoint import EndpointAnswer, Garbled, Spending
from kbrl_async.sampling.openai.pacing import Pace, back_off_s, retry_after_s
from kbrl_async.sampling.settings import Sampler
from kbrl_async.secret import HIDDEN, secret
from protocols.records import PolicyVersion, Purpose, SamplingParams

MAX_ANSWER_BYTES = 32 * 2**20
CANARY_TOLERANCE = 5e-2
"""Largest allowed |difference| of one canary log-prob: the engines differ in kernels and number format."""
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


async def start(setup: EngineSetup) -> OpenAIEngine:
    """The engine of `sampler.engine=openai`, which needs no policy of the learner."""
    engine = OpenAIEngine(setup.settings, setup.model_name)
    await engine.check()
    return engine


class OpenAIEngine:
    """`Engine` over an endpoint::

        engine = OpenAIEngine(Sampler(base_url="http://127.0.0.1:8000/v1"), "my-model")
        await engine.check()
        completion = await engine.generate("r1", prompt, SamplingParams(max_tokens=256), Purpose.EVAL)
        await engine.close()

    Its policy version is 0, the one that the endpoint serves, until `load` has proven another.
    """

    is_remote = True
    tokenizer: Tokenizer | None = None

    def __init__(
        self,
        settings: Sampler,
        model_name: str,
        environment: Mapping[str, str] = os.environ,
        *,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """:raises ConfigError: the address is none, or the variable of the key is empty."""
        self._settings, self._model, self._deadline_s = settings, model_name, settings.endpoint_deadline_s
        self._key = secret(settings.api_key_env, "sampler.api_key_env", environment)
        base_url = settings.base_url or ""
        self._where = _origin(base_url)
        self._rng, self._clock, self._sleep = rng or random.Random(), clock, sleep
        self._pace = Pace(settings.requests_per_minute)
        self._slots = asyncio.Semaphore(settings.slots)
        self._limit_key = "max_tokens"
        self._version = 0
        self._waiting = self._active = 0
        self._canary_error = 0.0
        self.spending = Spending()
        self._client = httpx.AsyncClient(
            base_url=base_url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            # the request's own deadline governs; a connection is given up sooner
            timeout=httpx.Timeout(None, connect=min(10.0, self._deadline_s)),
            limits=httpx.Limits(max_connections=settings.slots + 1, max_keepalive_connections=settings.slots + 1),
            trust_env=httpx.URL(base_url).host not in _LOOPBACK,
            transport=transport,
        )

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def follows(self) -> bool:
        return self._settings.train_logprobs

    async def check(self) -> None:
        """Asks for the list of models, so that a wrong address, key or name is said before anything else is done.

        :raises ConfigError: nobody answers, the key is refused, or the model is not among those that are listed.
        """
        try:
            async with asyncio.timeout(min(20.0, self._deadline_s)):
                status, content, _ = await self._exchange("GET", "models", None)
        except (httpx.HTTPError, TimeoutError, Garbled) as error:
            cause = f"nothing answers at {self._where}: {_format_error(error)}"
            raise ConfigError(cause, "Start the server, or correct sampler.base_url") from None
        if status in (401, 403):
            raise self._failure(status, content)
        names = endpoint.read_models(content) if status == 200 else []
        if names and self._model not in names:
            cause = f"{self._where} serves no model '{self._model}'"
            raise ConfigError(cause, f"Set model_name to one of: {', '.join(names[:8])}")

    async def generate(
        self,
        request_id: str,
        prompt: str,
        params: SamplingParams,
        purpose: Purpose = Purpose.TRAIN,
        adapter: str = "",
    ) -> Completion:
        """One completion; `adapter` is ignored: one model answers for all roles."""
        check_params(params, purpose)
        self._check_purpose(purpose)
        self._waiting += 1
        try:
            async with self._slots:
                await self._sleep(self._pace.reserve(self._clock()))
                return await self._within_deadline(prompt, params, purpose)
        finally:
            self._waiting -= 1

    async def load(self, manifest: PolicyVersion, folder: Path) -> None:
        """The endpoint is not ours to update; where training is allowed, it must prove that it serves this version."""
        if manifest.version <= self._version and self._canary_error:
            return
        if self._settings.train_logprobs:
            body = endpoint.canary_body(self._model, manifest.canary_ids)
            content, _ = await self._tries("completions", lambda: body)
            self._canary_error = _check_canary(manifest, endpoint.read_canary(content, manifest.canary_ids))
        self._version = manifest.version

    @property
    def failure(self) -> None:
        """An endpoint that fails is tried again: it comes back where it is."""
        return None

    def stats(self) -> EngineStats:
        spent = self.spending
        return EngineStats(
            policy_version=self._version,
            active=self._active,
            waiting=max(0, self._waiting - self._active),
            live_versions=1,
            generated_tokens=spent.output_tokens,
            prefill_tokens=spent.prompt_tokens,
            canary_max_error=self._canary_error,
            requests=spent.requests,
            retries=spent.retries,
            cost=spent.cost,
        )

    async def close(self) -> None:
        await self._client.aclose()

    # ── one request ──────────────────────────────────────────────────────────────────────────────────────────────

    def _check_purpose(self, purpose: Purpose) -> None:
        limit = self._settings.max_cost
        if purpose is Purpose.TRAIN and not self._settings.train_logprobs:
            raise ConfigError(
                "sampler.engine=openai returns no log-probs of the sampling distribution, and training needs them",
                "Train with sampler.engine=transformers; or, with a vLLM server that runs "
                "--logprobs-mode processed_logprobs on this very policy, set sampler.train_logprobs=true",
            )
        if limit is not None and self.spending.cost >= limit:
            cause = f"{self._where} has cost {self.spending.cost:.4g}, and sampler.max_cost is {limit:g}"
            raise ConfigError(cause, "Raise sampler.max_cost to go on")

    async def _within_deadline(self, prompt: str, params: SamplingParams, purpose: Purpose) -> Completion:
        started = time.time()
        self._active += 1
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await self._answer(prompt, params, purpose)
        except TimeoutError:
            self._count(failures=1)
            cause = f"no answer from {self._where} within {self._deadline_s:g} s"
            raise InfraError(cause, "Raise sampler.endpoint_deadline_s, or lower sampler.slots or max_tokens") from None
        finally:
            self._active -= 1
        return self._completion(answer, started)

    async def _answer(self, prompt: str, params: SamplingParams, purpose: Purpose) -> EndpointAnswer:
        style = self._settings.endpoint_style

        def body() -> dict[str, Any]:
            return endpoint.request_body(
                self._model, prompt, params, style, self._limit_key, proof=purpose is Purpose.TRAIN
            )

        _, answer = await self._tries(endpoint.ROUTES[style], body)
        self.spending = self.spending.plus(answer.usage, self._settings)
        if purpose is Purpose.TRAIN and (not answer.token_ids or len(answer.token_ids) != len(answer.logprobs)):
            cause = f"{self._where} returned {len(answer.token_ids)} token ids and {len(answer.logprobs)} log-probs"
            raise ConfigError(cause, "Training needs both, for every token: set sampler.train_logprobs=false")
        return answer

    async def _tries(self, route: str, body: Callable[[], dict[str, Any]]) -> tuple[bytes, EndpointAnswer]:
        """The first good answer. Every failure that may pass is tried again, with back-off, `retries` times."""
        failures = 0
        while True:
            asked_s = None
            try:
                status, content, asked_s = await self._exchange("POST", route, body())
                if endpoint.wants_other_limit(status, content) and self._limit_key == "max_tokens":
                    self._limit_key = "max_completion_tokens"
                    continue
                if status == 200:
                    return content, endpoint.read_answer(content)
                error = self._failure(status, content)
            except (httpx.HTTPError, Garbled) as problem:
                error = self._unreachable(problem)
            if not isinstance(error, InfraError):
                raise error
            failures += 1
            await self._back_off(failures, asked_s, error)
            await self._sleep(self._pace.reserve(self._clock()))

    async def _exchange(self, method: str, route: str, body: dict[str, Any] | None) -> tuple[int, bytes, float | None]:
        """(status, body, Retry-After in seconds). Leaving it early, by cancellation too, closes the connection."""
        self._count(requests=1)
        async with self._client.stream(method, route, json=body) as response:
            content = bytearray()
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > MAX_ANSWER_BYTES:
                    raise Garbled(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
            asked = retry_after_s(response.headers.get("retry-after"), time.time())
            return response.status_code, bytes(content), asked

    async def _back_off(self, failures: int, asked_s: float | None, error: InfraError) -> None:
        if failures > self._settings.endpoint_retries:
            self._count(failures=1)
            raise error
        wait_s = back_off_s(failures, self._rng, asked_s)
        if wait_s > self._deadline_s:
            self._count(failures=1)
            raise InfraError(f"{error.cause}, and asks to wait {wait_s:.0f} s", error.cure)
        if asked_s is not None:
            self._pace.close(self._clock() + asked_s)
        self._count(retries=1)
        await self._sleep(wait_s)

    def _completion(self, answer: EndpointAnswer, started: float) -> Completion:
        return Completion(
            prompt_ids=answer.prompt_ids,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            text=answer.text,
            finish_reason=answer.finish_reason,
            policy_version=self._version,
            started_at=started,
            finished_at=time.time(),
            prompt_tokens=answer.usage.prompt_tokens,
            output_tokens=answer.usage.output_tokens,
        )

    def _failure(self, status: int, content: bytes) -> KbrlError:
        if self._key:
            # some APIs repeat a wrong key in their message
            content = content.replace(self._key.encode(), HIDDEN.encode())
        return endpoint.failure(status, content, self._model, self._where, self._settings.api_key_env)

    def _unreachable(self, problem: Exception) -> InfraError:
        return InfraError(f"{self._where}: {_format_error(problem)}", "Is the server up, and sampler.base_url right?")

    def _count(self, requests: int = 0, retries: int = 0, failures: int = 0) -> None:
        s = self.spending
        self.spending = msgspec.structs.replace(
            s, requests=s.requests + requests, retries=s.retries + retries, failures=s.failures + failures
        )


def _origin(base_url: str) -> str:
    """How an endpoint is called in messages. ConfigError where it is none, or would put a secret into config.yaml."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"sampler.base_url '{base_url}' is no address", "Write http://HOST:PORT/v1")
    if url.userinfo or url.query:
        cure = "Put the key into an environment variable, and its name into sampler.api_key_env"
        raise ConfigError("sampler.base_url holds a user, a password or a query", cure)
    return str(url).rstrip("/")


def _format_error(error: Exception) -> str:
    if isinstance(error, httpx.ConnectError):
        return f"no connection ({str(error) or 'refused'})"
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return "no connection in time"
    return str(error) or type(error).__name__


def _check_canary(manifest: PolicyVersion, served: list[float]) -> float:
    published = manifest.canary_logprobs
    if not served or len(served) != len(published):
        cause = f"the endpoint does not prove that it serves policy v{manifest.version}: no prompt_logprobs"
        raise PolicyMismatch(cause, "Train with a vLLM server, or with sampler.engine=transformers")
    error = max(abs(a - b) for a, b in zip(served, published, strict=True))
    if not error <= CANARY_TOLERANCE:
        cause = f"canary log-probs of policy v{manifest.version} differ by {error:.3g} at the endpoint"
        raise PolicyMismatch(cause, "Give it the new weights before sampling from it")
    return error
