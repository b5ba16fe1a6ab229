"""vLLM's AsyncLLM as an `Engine`: hundreds of rollouts at once, policy updates without a pause.

::

    generate ─ acquire the newest version ─▶ AsyncLLM (continuous batching, prefix cache) ─▶ Draft ─▶ Completion
    load, update=adapter:  SHA-256 ─▶ add_lora policy-v17 ─▶ canary ─▶ new rollouts take it; v16 goes with its last one
    load, update=full:     SHA-256 ─▶ hold ─▶ reload ─▶ let go ─▶ canary ─▶ rollouts in flight go on by it
    receive, broken off:   hold ─▶ half of the weights are new: held until a whole version is loaded

Invariants
* Adapters: a rollout is written by one version. Full weights: each token knows its version (`Draft.spans`).
* A version's answers leave the engine only after its canary agrees with the manifest (I8); if not, the engine is dead.
* The prefix cache is keyed by version: keys and values of other weights are never read for a new rollout.
* Cancelling `generate`, its deadline included, aborts the request in vLLM, which frees its KV at once.
* When vLLM dies, every waiting request fails with InfraError, and so do later ones (I4).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.errors import CheckpointError, ConfigError, InfraError, KbrlError, TransferBroken
from kbrl_async.sampling.canary import check_tokenizer
from kbrl_async.sampling.engine import (
    LOAD_WAIT_S,
    Completion,
    Computing,
    EngineStats,
    Prompts,
    Tokenizer,
    check_alive,
    check_params,
    check_served,
    wait_for_room,
)
from kbrl_async.sampling.vllm.options import VLLMOptions, VLLMParts, one_token, token_prompt
from kbrl_async.sampling.vllm.proof import VLLMProver, chosen
from kbrl_async.sampling.vllm.scheduler import Meter, Pausing
from kbrl_async.sampling.vllm.versions import Draft, LiveVersions, Served, drawing
from kbrl_async.weights import proven
from kbrl_async.weights.groups import Meeting, TransferOffer
from protocols.records import PolicyVersion, Purpose, SamplingParams

FRUITLESS = 3
"""Interruptions in a row without a new token after which a rollout is given back."""
FIRST = -1
"""vLLM's priority of a canary; all others have 0 and go by their arrival."""


class VLLMEngine:
    """`Engine` over vLLM; made by `start.launch`, or of an AsyncLLM and its parts::

    engine = await launch(options, tokenizer)
    await engine.load(manifest, folder)
    completion = await engine.generate("r1", prompt, SamplingParams(max_tokens=256))
    """

    is_remote = False
    follows = True

    def __init__(
        self,
        llm: Any,
        parts: VLLMParts,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int],
        options: VLLMOptions,
        meter: Meter,
        *,
        computing: Computing = contextlib.nullcontext,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`options.max_model_len` is what `llm` was really started with."""
        self._llm, self._parts, self.tokenizer, self.options = llm, parts, tokenizer, options
        self.meter, self._computing, self._clock = meter, computing, clock
        self._stop_ids = sorted(eos_ids | {one_token(tokenizer, text) for text in options.settings.stop})
        self.prompts = Prompts(tokenizer, options.max_model_len)
        self._live = LiveVersions()
        self._prover = VLLMProver(options.dtype, options.temperature, options.depth)
        self.pausing = Pausing(llm, keep_kv=options.settings.keep_kv)
        self._serial = itertools.count()
        # After an update everything in flight computes its keys and values anew, and no answer leaves before the proof.
        self._urgent = {"priority": FIRST} if "priority" in inspect.signature(llm.generate).parameters else {}
        self._load_lock = asyncio.Lock()
        self._released = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._proof: asyncio.Future[None] | None = None
        self._weights = -1
        """The version of the weights in the engine, with update=full."""
        self._torn = False
        """A transfer has broken off between two of them: nothing is computed until a load has made them whole."""
        self._received = self._active = self._interrupted = 0
        self._longest_s = LOAD_WAIT_S
        """Until the last answer of an old version has ended."""
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def policy_version(self) -> int:
        """Where a transfer broke off, the one before: the version that it had is then as welcome as a newer one."""
        return max(-1, self._live.newest - self._torn)

    # ── generation ───────────────────────────────────────────────────────────────────────────────────────────────

    async def generate(
        self,
        request_id: str,
        prompt: str,
        params: SamplingParams,
        purpose: Purpose = Purpose.TRAIN,
        adapter: str = "",
    ) -> Completion:
        """One completion of `prompt`, tokenised as it stands (no special tokens). InfraError after its deadline."""
        check_params(params, purpose)
        self._check_alive()
        check_served(self._live.newest)
        draft = Draft(self.prompts.fitting(prompt, params.max_tokens), params.max_tokens)
        started, deadline_s = self._clock(), self.options.settings.answer_deadline_s(params.max_tokens)
        self._longest_s = max(self._longest_s, deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                reason = await self._write(draft, request_id, params, adapter)
        except TimeoutError as error:
            cause = f"an answer took longer than {deadline_s:g} s ({len(draft.token_ids)} tokens came)"
            cure = "Lower sampler.min_tokens_per_s, max_tokens or sampler.slots, or raise sampler.deadline_s"
            raise InfraError(cause, cure) from error
        text = self.tokenizer.decode(draft.token_ids, skip_special_tokens=True)
        return draft.completion(text, reason, started, self._clock())

    async def _write(self, draft: Draft, request_id: str, params: SamplingParams, adapter: str) -> str:
        """All parts of an answer; why it ended."""
        await self._open.wait()
        self._check_alive()
        served = self._live.acquire(adapter)
        self._active += 1
        try:
            reason = await self._parts_of(draft, request_id, params, served)
        finally:
            self._active -= 1
            self._live.release(served)
            self._released.set()  # where the engine died, who waits for room sees it now
            if self._live.holders(served.version) == 0 and served.version != self._live.newest:
                await asyncio.shield(self._retire())
        if self._proof is not None and draft.spans and draft.spans[-1][0] == self._weights:
            await asyncio.shield(self._proof)
        if self._weights >= 0:
            self._check_alive()  # a reload that broke off may have left half of the new weights
        return reason

    async def _parts_of(self, draft: Draft, request_id: str, params: SamplingParams, served: Served) -> str:
        fruitless = 0
        while True:
            before = len(draft.token_ids)
            # A task that is delivered twice runs twice under the same request id; the two must not meet.
            reason = await self._part(draft, f"{request_id}#{next(self._serial)}", params, served)
            if reason in ("stop", "length"):
                return reason
            if draft.left == 0:
                return "length"
            self._interrupted += 1
            fruitless = fruitless + 1 if len(draft.token_ids) == before else 0
            if fruitless == FRUITLESS:
                raise InfraError(
                    f"vLLM gave up a request {FRUITLESS} times", "Give it more memory (sampler.memory_share)"
                )
            await self._open.wait()
            self._check_alive()

    async def _part(self, draft: Draft, key: str, params: SamplingParams, served: Served) -> str:
        """From where the draft stands until it ends or is interrupted (`abort`)."""
        outputs = self._llm.generate(
            token_prompt(draft.so_far, f"v{max(served.version, self._weights)}"),
            drawing(self._parts, draft, params, self._stop_ids, streamed=self.options.update == "full"),
            key,
            **self.with_lora(served),
        )
        reason = ""
        self.pausing.began(key)
        try:
            async with self._failing(), contextlib.aclosing(outputs):
                async for output in outputs:
                    part = output.outputs[0]
                    tokens = list(part.token_ids)
                    draft.add(tokens, chosen(part.logprobs, tokens), max(served.version, self._weights))
                    self._received += len(tokens)
                    reason = part.finish_reason or reason
        finally:
            self.pausing.ended(key)
        return reason or "abort"

    def with_lora(self, served: Served) -> dict[str, Any]:
        if not served.lora_id:
            return {}
        return {"lora_request": self._parts.lora_request(served.name, served.lora_id, served.folder)}

    @contextlib.asynccontextmanager
    async def _failing(self) -> AsyncIterator[None]:
        """What vLLM raises, as ours: InfraError, and the engine counts as dead where vLLM is."""
        try:
            yield
        except KbrlError:
            raise
        except Exception as error:  # supervisor: vLLM raises many kinds; none may end other rollouts
            if getattr(self._llm, "errored", False):
                self._failure = self._failure or error
            what = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            raise InfraError(f"vLLM failed: {what}", "The rollout is retried elsewhere") from error

    # ── policy updates ───────────────────────────────────────────────────────────────────────────────────────────

    async def load(self, manifest: PolicyVersion, folder: Path) -> None:
        """Serves `manifest` to new sequences; an older version than the served one is ignored."""
        async with self._load_lock:
            self._check_alive()
            if manifest.version <= self.policy_version:
                return
            self._check_base(manifest)
            wanted = "lora" if self.options.update == "adapter" else "full"
            if manifest.kind != wanted:
                cause = f"policy v{manifest.version} is {manifest.kind}, and sampler.update={self.options.update}"
                raise ConfigError(cause, "Use sampler.update=adapter with lora_rank, sampler.update=full without")
            check_tokenizer(manifest, self.prompts.ids)
            for role in ("", *manifest.adapters):
                await asyncio.to_thread(proven, folder, manifest, role)
            if wanted == "lora":
                await self._load_adapters(manifest, folder)
            else:
                await self._load_weights(manifest, functools.partial(self._reload, folder))

    async def _load_adapters(self, manifest: PolicyVersion, folder: Path) -> None:
        await self._wait_for_room()
        places = [(role, str(folder / role)) for role in ("", *manifest.adapters)]
        named = self._live.name_adapters(manifest.version, places)
        try:
            for one in named:
                await self._add(one)
                await self._prover.prove(manifest, one.role, self.ask_as(one), self.ask_as(Served(-1)))
        except BaseException:
            for one in named:
                with contextlib.suppress(InfraError):
                    await self._remove(one)
            raise
        self._live.serve(named)
        await self._retire()

    @property
    def workers(self) -> int:
        return self.options.settings.gpus

    async def meet(self, meeting: Meeting, link: int, patience_s: float) -> None:
        where = msgspec.json.encode(meeting)
        async with self._failing():
            await self._at_workers("meet_learner", where, link, 1 + self.workers, patience_s)

    async def receive(self, offer: TransferOffer) -> None:
        async with self._load_lock:
            self._check_alive()
            if offer.manifest.version <= self.policy_version or self.options.update != "full":
                raise InfraError("no weights are wanted from the learner", "Send full weights, each version once")
            self._check_base(offer.manifest)
            check_tokenizer(offer.manifest, self.prompts.ids)
            await self._load_weights(offer.manifest, functools.partial(self._take, msgspec.msgpack.encode(offer)))

    async def _take(self, offer: bytes) -> None:
        try:
            async with self._failing():
                await self._at_workers("receive_weights", offer)
        except TransferBroken:
            self._torn = True
            raise
        except BaseException as error:
            self._failure = error  # half of the weights may be new: a fresh process loads them from a file
            raise

    async def _at_workers(self, method: str, *args: Any) -> None:
        """TransferBroken where one of them says why it could not; all of them have answered then."""
        said = await self._llm.collective_rpc(method, args=args)
        if cause := next((cause for cause in said or () if cause), ""):
            raise TransferBroken(cause, "The weights come by a file, or when the learner is met again")

    def _check_base(self, manifest: PolicyVersion) -> None:
        """Of the first version: the engine may have been started before there was one."""
        if self._live.newest < 0 and manifest.base_model not in ("", self.options.model):
            cause = f"vLLM was started with {self.options.model}, and policy v{manifest.version} is of another base"
            self._failure = InfraError(f"{cause}, {manifest.base_model}", "The sampler starts again with that one")
            raise self._failure

    async def _load_weights(self, manifest: PolicyVersion, change: Callable[[], Awaitable[None]]) -> None:
        """`change` puts the weights into the engine while it stands still."""
        new = Served(manifest.version)
        if self._live.newest < 0 and not self._torn:
            await self._prover.meet_base(manifest, self.ask_as(Served(-1)))
        proof: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            async with self._computing():
                await self._change_weights(new, change, proof)
            await self._prover.prove(manifest, "", self.ask_as(new), None)
        except BaseException as error:
            if self._proof is proof:
                self._failure = error
            proof.set_exception(InfraError(f"the weights were not proven: {error}", "The rollout is retried elsewhere"))
            proof.exception()  # seen: there may be nobody who waits for it
            raise
        proof.set_result(None)
        self._proof = None

    async def _change_weights(
        self, new: Served, change: Callable[[], Awaitable[None]], proof: asyncio.Future[None]
    ) -> None:
        """Between two tokens of everything in flight."""
        self._open.clear()
        try:
            await self.pausing.hold("update", lambda: self._received)
            await change()
            self._torn, self._weights, self._proof = False, new.version, proof
            if new.version > self._live.newest:
                self._live.serve([new])
                self._live.retire()
        finally:
            if not self._torn or self._failure is not None:
                try:
                    await self.pausing.let_go("update")
                finally:
                    self._open.set()

    async def _reload(self, folder: Path) -> None:
        try:
            async with self._failing():
                await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        except BaseException as error:
            self._failure = error  # half of the weights may be new
            if not isinstance(error, InfraError):
                raise
            raise CheckpointError(
                f"vLLM can't load the weights in {folder}: {error.cause}", "Use its base model"
            ) from error

    async def _add(self, one: Served) -> None:
        request = self._parts.lora_request(one.name, one.lora_id, one.folder)
        try:
            async with self._computing(), self._failing():
                added = await self._llm.add_lora(request)
        except InfraError as error:
            if self._failure is not None:
                raise
            raise CheckpointError(
                f"vLLM refuses {one.name}: {error.cause}", "Publish it for this base model"
            ) from error
        if added is False:
            raise CheckpointError(f"vLLM refuses {one.name}", "Look at its log")

    async def _remove(self, one: Served) -> None:
        async with self._failing():
            await self._llm.remove_lora(one.lora_id)

    async def _retire(self) -> None:
        """Takes versions that nobody uses out of vLLM; who waits for room looks again when they are out."""
        try:
            for one in self._live.retire():
                if one.lora_id:
                    await self._remove(one)
        finally:
            self._released.set()

    async def _wait_for_room(self) -> None:
        live, most = lambda: len(self._live.live), self.options.live_versions
        cure = "Lower max_tokens or sampler.deadline_s"
        await wait_for_room(live, most, self._released, self._check_alive, cure, self._longest_s)

    def ask_as(self, served: Served) -> Callable[[list[int], dict[str, Any]], Any]:
        """How the prover puts one question, the way rollouts go."""

        async def ask(ids: list[int], settings: dict[str, Any]) -> Any:
            params = self._parts.sampling_params(
                max_tokens=1, detokenize=False, output_kind=self._parts.final_only, **settings
            )
            prompt = token_prompt(ids, f"canary{served.version}")
            last = None
            async with self._failing(), asyncio.timeout(self.options.settings.answer_deadline_s(1)):
                key = f"canary#{next(self._serial)}"
                how = {**self.with_lora(served), **self._urgent}
                async for output in self._llm.generate(prompt, params, key, **how):
                    last = output
            if last is None:
                raise InfraError("vLLM gave no answer to a canary", "Restart the sampler")
            return last

        return ask

    # ── standing still, figures, the end ─────────────────────────────────────────────────────────────────────────

    async def stand_still(self) -> None:
        """Compute nothing until `go_on`; sequences in flight stay as they are. For a bench on the same GPU."""
        async with self._failing():
            await self.pausing.hold("quiet", lambda: self._received)

    async def go_on(self) -> None:
        async with self._failing():
            await self.pausing.let_go("quiet")

    def stats(self) -> EngineStats:
        own = EngineStats(
            policy_version=self._live.newest,
            active=self._active,
            live_versions=len(self._live.live),
            generated_tokens=self._received,
            canary_max_error=self._prover.error,
            interruptions=self._interrupted,
        )
        return self.meter.stats(own)

    @property
    def failure(self) -> BaseException | None:
        """Why it serves no more; None while it does. A PolicyMismatch must stop the run, anything else this process."""
        if self._failure is None and not self._closed and getattr(self._llm, "errored", False):
            self._failure = InfraError(
                "vLLM's engine process has ended", "Look at its log: memory, or a killed process"
            )
        return self._failure

    async def close(self) -> None:
        """Stops vLLM; requests that still wait fail with InfraError."""
        if not self._closed:
            self._closed = True
            self._open.set()  # who waits there sees the end
            shutdown = self._llm.shutdown
            # Its own grace of five seconds is more than a service that stops has.
            brief = {"timeout": 1.0} if "timeout" in inspect.signature(shutdown).parameters else {}
            await asyncio.to_thread(shutdown, **brief)

    def _check_alive(self) -> None:
        check_alive(self.failure, self._closed)
