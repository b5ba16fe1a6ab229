"""Continuous batching over any Hugging Face causal LM, in a thread of its own.

::

    event loop:  generate() ─ inbox ─▶ engine thread:  admit → step every batch → deliver ─ call_soon_threadsafe ─▶
                 load() ──────────────▶ a new batch per policy version; an old one ends when its last row leaves

Invariants
* New sequences begin on the newest version; a running one keeps its own to the end (`running_batch`).
* At most `max_versions` versions live; `load` waits for the oldest to end before it adds one more.
* A version is served only after its weights and its canary agree with the manifest (I8, `versions`).
* Cancelling the awaiting task frees the row before the next step.
* When the thread fails, every waiting request fails with InfraError, and so do later ones (I4).

Not covered: models with logit soft-capping, sliding windows or recurrent state.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kbrl_async.errors import ConfigError, InfraError
from kbrl_async.sampling.engine import (
    LOAD_WAIT_S,
    Completion,
    Computing,
    EngineSetup,
    EngineStats,
    Prompts,
    Tokenizer,
    check_alive,
    check_params,
    check_served,
    wait_for_room,
)
from kbrl_async.sampling.settings import Sampler
from kbrl_async.sampling.transformers.running_batch import BatchStats, RunningBatch, RunningSequence
from kbrl_async.sampling.transformers.versions import VersionLoader
from kbrl_async.weights.groups import Incoming, Meeting, TransferOffer
from protocols.records import PolicyVersion, Purpose, SamplingParams

MAX_VERSIONS = 3


class _Request(NamedTuple):
    sequence: RunningSequence
    future: asyncio.Future[tuple[RunningSequence, int]]


class _Cancel(NamedTuple):
    request_id: str


class _Serve(NamedTuple):
    """Run on the engine's thread: makes a version's batches, one an adapter, which take the new sequences."""

    make: Callable[[], list[RunningBatch]]
    future: asyncio.Future[None]


class _Close(NamedTuple):
    pass


async def start(setup: EngineSetup) -> TransformersEngine:
    """The engine of `sampler.engine=transformers`, without a policy yet. Waits for the first one: it names the base."""
    manifest, _ = await setup.first_policy()
    return TransformersEngine(
        setup.load_model(manifest.base_model),
        setup.load_tokenizer(manifest.base_model),
        setup.settings,
        threads=setup.threads,
        seed=setup.seed,
        tick=setup.breathe,
        computing=setup.computing,
    )


def completion_of(done: RunningSequence, text: str, version: int, finished_at: float) -> Completion:
    """A sequence that has ended as an answer of a policy version; `text` are its tokens without special ones."""
    return Completion(
        prompt_ids=done.prompt_ids,
        token_ids=done.token_ids,
        logprobs=done.logprobs,
        text=text,
        finish_reason=done.finish_reason,
        policy_version=version,
        started_at=done.started_at,
        finished_at=finished_at,
    )


class TransformersEngine:
    """`Engine` over a Hugging Face model. `model` is the base: its weights are never changed.

        engine = TransformersEngine(model, tokenizer, Sampler())
        await engine.load(manifest, folder)
        completion = await engine.generate("r1", prompt, SamplingParams(max_tokens=256))

    Must be made inside a running event loop. `tick` is called from the engine's thread after every step; `seed` seeds
    the rows whose request names none.
    """

    is_remote = False
    follows = True

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Tokenizer,
        settings: Sampler,
        *,
        threads: int = 1,
        seed: int = 0,
        max_versions: int = MAX_VERSIONS,
        tick: Callable[[], None] = lambda: None,
        computing: Computing = contextlib.nullcontext,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.tokenizer = tokenizer
        self._slots, self._threads, self._max_versions = settings.slots, threads, max_versions
        self._settings, self._longest_s = settings, LOAD_WAIT_S
        self._prompts = Prompts(tokenizer, _positions(model))
        self._eos = _eos_ids(model, tokenizer)
        self._tick, self._computing, self._clock = tick, computing, clock
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[_Request | _Cancel | _Serve | _Close] = queue.SimpleQueue()
        self._load_lock = asyncio.Lock()
        self._batch_ended = asyncio.Event()
        self._rng = random.Random(seed)
        self._serial = itertools.count()
        # Shared with the thread: written there, read here for statistics and for the version bound.
        self._version = -1
        self._batches: list[RunningBatch] = []
        self._waiting: deque[_Request] = deque()
        self._futures: dict[str, asyncio.Future[tuple[RunningSequence, int]]] = {}
        self._counters = BatchStats()
        self._versions = VersionLoader(model, self._make_batch)
        self._device = next(model.parameters()).device
        self._incoming: Incoming | None = None
        self._busy_s = 0.0
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def policy_version(self) -> int:
        return self._version

    async def generate(
        self,
        request_id: str,
        prompt: str,
        params: SamplingParams,
        purpose: Purpose = Purpose.TRAIN,
        adapter: str = "",
    ) -> Completion:
        """One completion of `prompt`, tokenised as it stands (no special tokens added)."""
        check_params(params, purpose)
        self._check_alive()
        check_served(self._version)
        ids = self._prompts.fitting(prompt, params.max_tokens)
        self._longest_s = max(self._longest_s, self._settings.answer_deadline_s(params.max_tokens))
        rng = random.Random(self._rng.getrandbits(64) if params.seed is None else params.seed)
        # A task that is delivered twice runs twice under the same request id; the two must not meet.
        key = f"{request_id}#{next(self._serial)}"
        sequence = RunningSequence(key, ids, params, rng, started_at=self._clock(), adapter=adapter)
        future: asyncio.Future[tuple[RunningSequence, int]] = self._loop.create_future()
        self._inbox.put(_Request(sequence, future))
        try:
            done, version = await future
        except asyncio.CancelledError:
            self._inbox.put(_Cancel(key))
            raise
        text = self.tokenizer.decode(done.token_ids, skip_special_tokens=True)
        return completion_of(done, text, version, self._clock())

    async def load(self, manifest: PolicyVersion, folder: Path) -> None:
        """Serves `manifest` to new sequences; an older version than the served one is ignored."""
        async with self._load_lock:
            self._check_alive()
            if manifest.version <= self._version:
                return
            await self._wait_for_room()
            async with self._computing():
                await self._serve_made(await asyncio.to_thread(self._versions.maker, manifest, folder))

    # ── weights straight from the learner ────────────────────────────────────────────────────────────────────────

    workers = 1

    async def meet(self, meeting: Meeting, link: int, patience_s: float) -> None:
        old, self._incoming = self._incoming, None
        if old is not None:
            await asyncio.to_thread(old.close)
        self._incoming = await asyncio.to_thread(Incoming, meeting, link, 1, 1 + self.workers, self._device, patience_s)

    async def receive(self, offer: TransferOffer) -> None:
        async with self._load_lock:
            self._check_alive()
            incoming = self._incoming
            if incoming is None or offer.manifest.version <= self._version:
                raise InfraError("no weights are wanted from the learner", "Meet it first")
            await self._wait_for_room()
            async with self._computing():
                named = incoming.tensors(offer.index)
                await self._serve_made(await asyncio.to_thread(self._versions.of_tensors, offer.manifest, named))

    async def _serve_made(self, make: Callable[[], list[RunningBatch]]) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._inbox.put(_Serve(make, future))
        await future

    def stats(self) -> EngineStats:
        c = self._counters
        return EngineStats(
            policy_version=self._version,
            active=sum(len(batch.rows) for batch in self._batches),
            waiting=len(self._waiting) + self._inbox.qsize(),
            live_versions=len(self._live_versions()),
            decode_steps=c.decode_steps,
            generated_tokens=c.generated_tokens,
            prefill_tokens=c.prefill_tokens,
            cached_prompts=c.cached_prompts,
            busy_s=self._busy_s,
            canary_max_error=self._versions.canary_error,
        )

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine's thread."""
        return self._failure

    async def close(self) -> None:
        """Stops the thread; requests that still wait fail with InfraError."""
        if not self._closed:
            self._closed = True
            self._inbox.put(_Close())
        await asyncio.to_thread(self._thread.join)

    # ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _wait_for_room(self) -> None:
        live, most = lambda: len(self._live_versions()), max(2, self._max_versions) - 1
        await wait_for_room(live, most, self._batch_ended, self._check_alive, "Lower max_tokens", self._longest_s)

    def _live_versions(self) -> set[int]:
        return {batch.version for batch in self._batches}

    def _make_batch(
        self, version: int, model: torch.nn.Module, activate: Callable[[], None], adapter: str
    ) -> RunningBatch:
        return RunningBatch(version, model, self._eos, self._counters, activate, adapter)

    # ── the engine's thread ──────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while self._receive():
                started = time.perf_counter()
                self._admit()
                for batch in list(self._batches):
                    self._deliver(batch.step(), batch.version)
                self._retire()
                self._busy_s += time.perf_counter() - started
                self._tick()
            self._fail(InfraError("the engine was closed", "The rollout is retried elsewhere"))
        except Exception as error:  # supervisor: the thread's death must reach every waiting request
            self._fail(error)

    def _receive(self) -> bool:
        """Handles all messages; blocks while there is nothing to decode. False when it is time to end."""
        while True:
            idle = not self._waiting and not any(batch.rows for batch in self._batches)
            try:
                message = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            match message:
                case _Close():
                    return False
                case _Request():
                    self._futures[message.sequence.request_id] = message.future
                    self._waiting.append(message)
                case _Cancel(request_id):
                    self._cancel(request_id)
                case _Serve():
                    self._serve(message)

    def _serve(self, message: _Serve) -> None:
        try:
            batches = message.make()
        except Exception as error:  # supervisor: goes to the caller of load, the engine stays
            self._settle(message.future, error=error)
            return
        self._batches += batches
        self._version = batches[0].version
        self._retire()
        self._settle(message.future, None)

    def _cancel(self, request_id: str) -> None:
        if self._futures.pop(request_id, None) is None:
            return
        self._waiting = deque(r for r in self._waiting if r.sequence.request_id != request_id)
        for batch in self._batches:
            if batch.drop(request_id):
                break
        self._retire()

    def _admit(self) -> None:
        free = self._slots - sum(len(batch.rows) for batch in self._batches)
        if not self._batches or free <= 0 or not self._waiting:
            return
        joining = [self._waiting.popleft().sequence for _ in range(min(free, len(self._waiting)))]
        newest = {batch.adapter: batch for batch in self._batches if batch.version == self._version}
        for adapter, batch in newest.items():
            mine = [s for s in joining if (s.adapter if s.adapter in newest else "") == adapter]
            self._deliver(batch.join(mine), batch.version)

    def _deliver(self, finished: list[RunningSequence], version: int) -> None:
        for sequence in finished:
            future = self._futures.pop(sequence.request_id, None)
            if future is not None:
                self._settle(future, (sequence, version))

    def _retire(self) -> None:
        """Frees the weights of old versions whose last row has left."""
        ended = [batch for batch in self._batches if batch.version != self._version and not batch.rows]
        for batch in ended:
            self._batches.remove(batch)
            self._versions.retire(batch)
        if ended:
            self._call(self._batch_ended.set)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._call(self._batch_ended.set)
        cause = InfraError(f"the sampling engine stopped: {error}", "The rollout is retried elsewhere")
        for future in self._futures.values():
            self._settle(future, error=cause)
        self._futures.clear()
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, _Request | _Serve):
                self._settle(message.future, error=cause)

    def _settle(self, future: asyncio.Future[Any], value: Any = None, error: BaseException | None = None) -> None:
        def settle() -> None:
            if future.done():
                return  # cancelled meanwhile
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

        self._call(settle)

    def _call(self, function: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _check_alive(self) -> None:
        check_alive(self._failure, self._closed)


def _positions(model: torch.nn.Module) -> int | None:
    limit = getattr(model.config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def _eos_ids(model: torch.nn.Module, tokenizer: Tokenizer) -> frozenset[int]:
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    ids = {i for i in [*listed, tokenizer.eos_token_id] if i is not None}
    if not ids:
        raise ConfigError("neither model nor tokenizer names an end-of-text token", "Set eos_token in the tokenizer")
    return frozenset(ids)
