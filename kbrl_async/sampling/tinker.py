"""An `Engine` over Tinker: each policy version is weights that the learner has saved there, under a path of their own.

::

    policy-v17/tinker.json: tinker://…/sampler_weights/v17 ─ load ─▶ sampling client ─ canaries ─▶ served
    generate ─▶ ids ─▶ sample(newest client) ─▶ tokens, log-probs: one each, all finite? ─▶ Completion

Invariants
* A version is sampled from only after what its path gives has proven to be it (I8); a client never changes its weights.
* An answer without a log-prob for each token is no answer: it is given back and drawn again (I4).
* A session that the service has lost ends this engine, and so its process; the next one gets a session of its own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kbrl_async.errors import ConfigError, InfraError, KbrlError, PolicyMismatch, SessionLost
from kbrl_async.sampling.engine import (
    Completion,
    EngineSetup,
    EngineStats,
    Prompts,
    Tokenizer,
    check_alive,
    check_params,
    check_served,
)
from kbrl_async.sampling.proof import Prover
from kbrl_async.tinker_service import Account, path_in
from kbrl_async.weights import prove
from protocols.records import PolicyVersion, Purpose, SamplingParams

ARITHMETIC = "bfloat16"
"""The service computes in it, so a proof allows what two implementations in bf16 differ by."""


async def start(setup: EngineSetup) -> TinkerEngine:
    """The engine of `sampler.engine=tinker`, without a policy yet.

    :raises MissingTool: the library is not installed.
    :raises ConfigError: no key, a key that is refused, a model that is not served.
    """
    settings = setup.settings
    account = Account(settings.base_url, settings.api_key_env, settings.answer_deadline_s(1))
    manifest, _ = await setup.first_policy()
    tokenizer = setup.load_tokenizer(manifest.base_model)
    positions = await asyncio.to_thread(account.positions, setup.model_name, setup.progress)
    session = await asyncio.to_thread(account.connect, setup.progress)
    stop = stop_ids(tokenizer, settings.stop)
    deadline = settings.answer_deadline_s
    return TinkerEngine(account, session, setup.model_name, tokenizer, positions, stop, deadline)


def stop_ids(tokenizer: Any, names: Sequence[str]) -> list[int]:
    """Tokens that end an answer: the model's own and those of `sampler.stop`.

    :raises ConfigError: one of them is no token of this model.
    """
    unknown = [name for name in names if tokenizer.convert_tokens_to_ids(name) in (None, tokenizer.unk_token_id)]
    if unknown:
        raise ConfigError(f"sampler.stop: {unknown[0]!r} is no token of this model", "Name one of its own tokens")
    return sorted({tokenizer.eos_token_id, *(int(tokenizer.convert_tokens_to_ids(name)) for name in names)})


class TinkerEngine:
    """`Engine` over one session of an account."""

    is_remote = True
    follows = True

    def __init__(
        self,
        account: Account,
        session: Any,
        model_name: str,
        tokenizer: Tokenizer,
        positions: int | None,
        stop: Sequence[int],
        deadline_s: Callable[[int], float] | None = None,
    ) -> None:
        """`session` is a `ServiceClient`; `deadline_s` of an answer by its `max_tokens`, None: the account's."""
        self._deadline_s = deadline_s
        self.tokenizer = tokenizer
        self._account, self._session, self._model_name, self.stop = account, session, model_name, list(stop)
        self._prompts, self._prover = Prompts(tokenizer, positions), Prover(ARITHMETIC)
        self._version, self._client, self._base = -1, None, None
        self._running: Counter[int] = Counter()
        self._requests = self._failures = self._generated = self._prefilled = 0
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    async def generate(
        self,
        request_id: str,
        prompt: str,
        params: SamplingParams,
        purpose: Purpose = Purpose.TRAIN,
        adapter: str = "",
    ) -> Completion:
        """One completion; `adapter` is ignored: a version has one (see `checks`)."""
        check_params(params, purpose)
        check_alive(self._failure, self._closed)
        check_served(self._version)
        ids = self._prompts.fitting(prompt, params.max_tokens)
        version, client, started = self._version, self._client, time.time()
        self._running[version] += 1
        self._requests += 1
        try:
            sequence = (await self._ask(client, ids, params)).sequences[0]
            tokens, logprobs = self._checked(sequence)
        except KbrlError:
            self._failures += 1
            raise
        finally:
            self._running[version] -= 1
            self._running += Counter()  # versions with none are forgotten
        self._generated += len(tokens)
        self._prefilled += len(ids)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        reason = str(sequence.stop_reason)
        return Completion(ids, tokens, logprobs, text, reason, version, started, time.time())

    async def load(self, manifest: PolicyVersion, folder: Path) -> None:
        """Serves `manifest` to new sequences; those under way end with the client that they began with."""
        check_alive(self._failure, self._closed)
        if manifest.version <= self._version:
            return
        prove(folder, manifest)
        try:
            client = await self._client_of(model_path=path_in(folder))
            self._base = self._base or await self._client_of(base_model=self._model_name)
            await self._prover.prove(manifest, "", self._scores(client), self._scores(self._base))
        except (PolicyMismatch, SessionLost) as error:
            self._failure = error
            raise
        self._version, self._client = manifest.version, client

    def stats(self) -> EngineStats:
        return EngineStats(
            policy_version=self._version,
            active=self._running.total(),
            live_versions=len({*self._running, self._version}),
            generated_tokens=self._generated,
            prefill_tokens=self._prefilled,
            canary_max_error=self._prover.error,
            requests=self._requests,
            retries=self._failures,
        )

    async def close(self) -> None:
        """Ends the session; the service ends those of processes that died by itself."""
        if not self._closed:
            self._closed = True
            self._account.end(self._session)

    # ── one request ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _client_of(self, **weights: str) -> Any:
        """A client of saved weights (`model_path`) or of a model as it is (`base_model`)."""
        return await self._account.answer(self._session.create_sampling_client(**weights), "a sampling client")

    async def _ask(self, client: Any, ids: list[int], params: SamplingParams) -> Any:
        types = self._account.tinker.types
        wanted = types.SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            seed=params.seed,
            stop=self.stop,
        )
        deadline_s = self._deadline_s(params.max_tokens) if self._deadline_s is not None else None
        asked = client.sample(types.ModelInput.from_ints(ids), 1, wanted)
        try:
            return await self._account.answer(asked, "an answer", deadline_s)
        except SessionLost as error:
            self._failure = error
            raise

    def _checked(self, sequence: Any) -> tuple[list[int], list[float]]:
        """Tokens and their log-probs.

        :raises InfraError: they can't be trained on.
        """
        tokens, logprobs = list(sequence.tokens), list(sequence.logprobs or [])
        if not tokens or len(tokens) != len(logprobs) or not all(map(_is_logprob, logprobs)):
            cause = f"{self._account.where} gave {len(tokens)} tokens and {len(logprobs)} log-probs of them"
            raise InfraError(cause, "The rollout is drawn again")
        return tokens, logprobs

    def _scores(self, client: Any) -> Any:
        async def score(ids: list[int]) -> list[float]:
            prompt = self._account.tinker.types.ModelInput.from_ints(ids)
            found = await self._account.answer(client.compute_logprobs(prompt), "log-probs of a canary")
            return [math.nan if value is None else float(value) for value in found[1:]]

        return score


def _is_logprob(value: float) -> bool:
    return math.isfinite(value) and value <= 1e-4
