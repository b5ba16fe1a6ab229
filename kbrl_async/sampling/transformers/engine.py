"""Continuous batching over any Hugging Face causal LM, in a thread of its own.

::

    event loop:  generate() ─ inbox ─▶ engine thread:  admit → step every cohort → deliver ─ call_soon_threadsafe ─▶
                 load() ──────────────▶ a new cohort per policy version; an old one ends when its last row leaves

Invariants
* New sequences begin on the newest version; a running one keeps its own to the end (`cohort`).
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

import msgspec
import torch

from kbrl_async.errors import ConfigError, InfraError
from kbrl_async.sampling.engine import Completion, Computing, EngineStats, check_params
from kbrl_async.sampling.guards import Prompts, Tokenizer, check_alive, check_served, wait_for_room
from kbrl_async.sampling.transformers.running_batch import CohortStats, RunningBatch, RunningSequence
from kbrl_async.sampling.transformers.versions import Versions
from protocols.records import PolicyVersion, Purpose, SamplingParams


class TransformersOptions(msgspec.Struct, frozen=True):
    max_rows: int = 64
    """Sequences that decode at once, over all versions."""
    max_versions: int = 3
    prefix_tokens: int = 16_384
    """Prompt tokens kept in a version's prefix cache."""
    prefill_tokens: int = 4096
    """Most tokens, padding included, of one prefill."""
    threads: int = 1
    """Torch threads of the engine's thread; 0 leaves torch's own number."""
    load_wait_s: float = 300.0
    """Longest wait of `load` for the oldest version to end."""
    seed: int = 0
    """Seeds the rows whose request names no seed."""
    graphs: bool = True
    """On a GPU: decode by CUDA graphs."""
    canary_tolerance: float = 0.0
    """0 chooses by dtype: 1e-3 for fp32, 2e-2 else."""


class _Request(NamedTuple):
    stream: RunningSequence
    future: asyncio.Future[tuple[RunningSequence, int]]


class _Cancel(NamedTuple):
    request_id: str


class _Serve(NamedTuple):
    """Run on the engine's thread: makes a version's cohorts, one an adapter, which take the new sequences."""

    make: Callable[[], list[RunningBatch]]
    future: asyncio.Future[None]


class _Close(NamedTuple):
    pass


def completion_of(done: RunningSequence, text: str, version: int, finished_at: float) -> Completion:
    """What a stream that has ended is as an answer of a policy version; `text` are its tokens without special ones."""
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

        engine = TransformersEngine(model, tokenizer, TransformersOptions())
        await engine.load(manifest, folder)
        completion = await engine.generate("r1", prompt, SamplingParams(max_tokens=256))

    Must be made inside a running event loop. `tick` is called from the engine's thread after every step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Tokenizer,
        options: TransformersOptions | None = None,
        tick: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._options = options or TransformersOptions()
        self._tokenizer = tokenizer
        self._prompts = Prompts(tokenizer, _positions(model))
        self._eos = _eos_ids(model, tokenizer)
        self._tick, self._clock = tick, clock
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[_Request | _Cancel | _Serve | _Close] = queue.SimpleQueue()
        self._load_lock = asyncio.Lock()
        self._cohort_ended = asyncio.Event()
        self._rng = random.Random(self._options.seed)
        self._serial = itertools.count()
        # Shared with the thread: written there, read here for statistics and for the version bound.
        self._version = -1
        self._cohorts: list[RunningBatch] = []
        self._waiting: deque[_Request] = deque()
        self._futures: dict[str, asyncio.Future[tuple[RunningSequence, int]]] = {}
        self._counters = CohortStats()
        self._versions = Versions(model, self._options.canary_tolerance, self._cohort)
        self._busy_s = 0.0
        self._failure: BaseException | None = None
        self._closed = False
        self.computing: Computing = contextlib.nullcontext
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
        rng = random.Random(self._rng.getrandbits(64) if params.seed is None else params.seed)
        # A task that is delivered twice runs twice under the same request id; the two must not meet.
        key = f"{request_id}#{next(self._serial)}"
        stream = RunningSequence(key, ids, params, rng, started_at=self._clock(), adapter=adapter)
        future: asyncio.Future[tuple[RunningSequence, int]] = self._loop.create_future()
        self._inbox.put(_Request(stream, future))
        try:
            done, version = await future
        except asyncio.CancelledError:
            self._inbox.put(_Cancel(key))
            raise
        text = self._tokenizer.decode(done.token_ids, skip_special_tokens=True)
        return completion_of(done, text, version, self._clock())

    async def load(self, manifest: PolicyVersion, folder: Path) -> None:
        """Serves `manifest` to new sequences; an older version than the served one is ignored."""
        async with self._load_lock:
            self._check_alive()
            if manifest.version <= self._version:
                return
            await self._wait_for_room()
            async with self.computing():
                cohort_maker = await asyncio.to_thread(self._versions.maker, manifest, folder)
                future: asyncio.Future[None] = self._loop.create_future()
                self._inbox.put(_Serve(cohort_maker, future))
                await future

    def stats(self) -> EngineStats:
        c = self._counters
        return EngineStats(
            policy_version=self._version,
            active=sum(len(cohort.rows) for cohort in self._cohorts),
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
        options, cure = self._options, "Lower max_tokens or raise max_versions"
        await wait_for_room(
            lambda: len(self._live_versions()),
            max(2, options.max_versions) - 1,
            self._cohort_ended,
            self._check_alive,
            options.load_wait_s,
            cure,
        )

    def _live_versions(self) -> set[int]:
        return {cohort.version for cohort in self._cohorts}

    def _cohort(self, version: int, model: torch.nn.Module, activate: Callable[[], None], adapter: str) -> RunningBatch:
        o = self._options
        return RunningBatch(
            version, model, self._eos, self._counters, activate, o.prefix_tokens, o.prefill_tokens, adapter, o.graphs
        )

    # ── the engine's thread ──────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        if self._options.threads > 0:
            torch.set_num_threads(self._options.threads)
        try:
            while self._receive():
                started = time.perf_counter()
                self._admit()
                for cohort in list(self._cohorts):
                    self._deliver(cohort.step(), cohort.version)
                self._retire()
                self._busy_s += time.perf_counter() - started
                self._tick()
            self._fail(InfraError("the engine was closed", "The rollout is retried elsewhere"))
        except Exception as error:  # supervisor: the thread's death must reach every waiting request
            self._fail(error)

    def _receive(self) -> bool:
        """Handles all messages; blocks while there is nothing to decode. False when it is time to end."""
        while True:
            idle = not self._waiting and not any(cohort.rows for cohort in self._cohorts)
            try:
                message = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            match message:
                case _Close():
                    return False
                case _Request():
                    self._futures[message.stream.request_id] = message.future
                    self._waiting.append(message)
                case _Cancel(request_id):
                    self._cancel(request_id)
                case _Serve():
                    self._serve(message)

    def _serve(self, message: _Serve) -> None:
        try:
            cohorts = message.make()
        except Exception as error:  # supervisor: goes to the caller of load, the engine stays
            self._settle(message.future, error=error)
            return
        self._cohorts += cohorts
        self._version = cohorts[0].version
        self._retire()
        self._settle(message.future, None)

    def _cancel(self, request_id: str) -> None:
        if self._futures.pop(request_id, None) is None:
            return
        self._waiting = deque(r for r in self._waiting if r.stream.request_id != request_id)
        for cohort in self._cohorts:
            if cohort.drop(request_id):
                break
        self._retire()

    def _admit(self) -> None:
        free = self._options.max_rows - sum(len(cohort.rows) for cohort in self._cohorts)
        if not self._cohorts or free <= 0 or not self._waiting:
            return
        joining = [self._waiting.popleft().stream for _ in range(min(free, len(self._waiting)))]
        newest = {cohort.adapter: cohort for cohort in self._cohorts if cohort.version == self._version}
        for adapter, cohort in newest.items():
            mine = [s for s in joining if (s.adapter if s.adapter in newest else "") == adapter]
            self._deliver(cohort.join(mine), cohort.version)

    def _deliver(self, finished: list[RunningSequence], version: int) -> None:
        for stream in finished:
            future = self._futures.pop(stream.request_id, None)
            if future is not None:
                self._settle(future, (stream, version))

    def _retire(self) -> None:
        """Frees the weights of old versions whose last row has left."""
        ended = [cohort for cohort in self._cohorts if cohort.version != self._version and not cohort.rows]
        for cohort in ended:
            self._cohorts.remove(cohort)
            self._versions.retire(cohort)
        if ended:
            self._call(self._cohort_ended.set)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._call(self._cohort_ended.set)
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
