"""The seam between the sampler process and an inference engine, and what engines ask before they take a request.

::

    text ─▶ Prompts: ids, made once while it is in use; refused where the model has no room ─▶ engine ◀─ load
            check_alive: failed or closed?   check_served: is there a policy?                   wait_for_room

An engine draws tokens from `softmax(logits / temperature)` and returns their log-probs under that very distribution. It
serves several policy versions at once for a while: a sequence ends on the version that it began with, new sequences
begin on the newest. To add one: `async def start(setup: EngineSetup) -> Engine`, named by
`sampler.engine=package.module:start` or an entry point of the group `kbrl_async.engines`. Ours are named in
`settings.ENGINES`.

Invariants
* An engine that has failed or was closed takes nothing more (I4). A PolicyMismatch stays one: it must stop the run.
* A prompt that does not fit is refused before anything is computed for it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from kbrl_async.errors import ConfigError, InfraError, PolicyMismatch, PromptTooLong
from kbrl_async.sampling.settings import Sampler
from protocols.records import PolicyVersion, Purpose, SamplingParams

if TYPE_CHECKING:
    from kbrl_async.weights.groups import Meeting, TransferOffer


class Completion(msgspec.Struct, frozen=True):
    """One finished sequence. `token_ids` holds the end-of-text token where the policy wrote it; `text` doesn't."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    """`"stop"` or `"length"`."""
    policy_version: int
    started_at: float
    finished_at: float
    prompt_tokens: int = 0
    """As the endpoint counted them, where it returns no ids; else 0."""
    output_tokens: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    """(version, tokens) in order, where weights may change in flight: `policy_version` is the oldest."""


class EngineStats(msgspec.Struct, frozen=True):
    """Counters since start, and what is in the engine now."""

    policy_version: int
    active: int = 0
    waiting: int = 0
    live_versions: int = 0
    decode_steps: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    cached_prompts: int = 0
    """Prompts whose K/V came from the prefix cache or from an equal prompt in the same wave."""
    busy_s: float = 0.0
    canary_max_error: float = 0.0
    requests: int = 0
    """Sent to an endpoint, tries again included."""
    retries: int = 0
    cost: float = 0.0
    """Of the tokens so far, by the configured prices."""
    kv_usage: float = 0.0
    """Share of the KV cache that is in use (vLLM)."""
    preemptions: int = 0
    """Sequences that lost their KV for want of memory and computed it anew (vLLM)."""
    interruptions: int = 0
    """Parts of answers that ended early and were continued (vLLM)."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache had (vLLM)."""


Computing = Callable[[], AbstractAsyncContextManager[None]]
"""What an engine enters around the work of a load that can't stand still while somebody measures on the same device;
canaries can, as rollouts do."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    @property
    def eos_token_id(self) -> int | None: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class EngineSetup(msgspec.Struct, frozen=True):
    """What a run gives an engine at its start."""

    settings: Sampler
    model_name: str
    temperature: float
    max_staleness: int
    seed: int
    """Of this very process."""
    device: str
    threads: int
    first_policy: Callable[[], Awaitable[tuple[PolicyVersion, Path]]]
    """Waits for the first published version; raises where the run stops before there is one."""
    load_model: Callable[[str], Any]
    """A base model as the learner holds it."""
    load_tokenizer: Callable[[str], Tokenizer]
    breathe: Callable[[], None]
    """Called after every step by a thread that computes in this process: waits there while a bench measures."""
    progress: Callable[[], None]
    """Called after every step that was made elsewhere: the work moves on."""
    computing: Computing
    told: Callable[[str], None]
    """Hears what keeps a start waiting."""
    base: str | None = None
    """The base of the first version, where it is known before there is one: the engine may start with it at once. It
    serves nothing until its first `load`."""


class Engine(Protocol):
    """What the sampler needs. All methods belong to one event loop."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """That of the prompts; None where who computes has its own."""

    @property
    def is_remote(self) -> bool:
        """It computes elsewhere: nothing here needs to stand still for a bench, and nothing ticks."""

    @property
    def follows(self) -> bool:
        """It serves what the learner publishes; else it answers as it is."""

    @property
    def policy_version(self) -> int:
        """The version that new sequences get, and above which one is wanted; −1 before the first `load`."""

    async def generate(
        self,
        request_id: str,
        prompt: str,
        params: SamplingParams,
        purpose: Purpose = Purpose.TRAIN,
        adapter: str = "",
    ) -> Completion:
        """One completion, by the policy's adapter of that name where it has one. Cancelling the awaiting task frees its
        row. InfraError when the engine has died."""

    async def load(self, manifest: PolicyVersion, folder: Path) -> None:
        """Serves a published version to new sequences. PolicyMismatch unless its canary agrees (I8)."""

    def stats(self) -> EngineStats: ...

    @property
    def failure(self) -> BaseException | None:
        """Why it serves no more; None while it does. A PolicyMismatch must stop the run, anything else this process."""

    async def close(self) -> None: ...


@runtime_checkable
class TakesWeights(Protocol):
    """An engine whose full weights can come straight from the learner, without a file between."""

    @property
    def workers(self) -> int:
        """Its processes that take part, as ranks 1 … `workers`."""

    async def meet(self, meeting: Meeting, link: int, patience_s: float) -> None:
        """Joins the learner's group for this sampler, in place of an earlier one. InfraError where it can't."""

    async def receive(self, offer: TransferOffer) -> None:
        """`load` of what the group sends now. InfraError where that breaks off: what was served is served on, or
        nothing until `load` or this brings that version or a later one, or the engine has failed."""


def check_params(params: SamplingParams, purpose: Purpose) -> None:
    """Refuses what would make recorded log-probs differ from the sampling distribution."""
    if params.max_tokens < 1:
        raise ConfigError(f"max_tokens is {params.max_tokens}", "It must be at least 1")
    if not 0.0 < params.top_p <= 1.0:
        raise ConfigError(f"top_p is {params.top_p}", "It must be in (0, 1]")
    if purpose is Purpose.TRAIN and params.top_p != 1.0:
        raise ConfigError(f"top_p is {params.top_p} for a training rollout", "Training needs top_p = 1")
    if purpose is Purpose.TRAIN and params.temperature <= 0.0:
        raise ConfigError(f"temperature is {params.temperature} for a training rollout", "Training needs it above 0")
    if params.temperature < 0.0:
        raise ConfigError(f"temperature is {params.temperature}", "It must be 0 (greedy) or above")


REMEMBERED = 256
"""Prompts whose ids are kept: those of all groups under way, each of which asks a group's size of times."""


LOAD_WAIT_S = 300.0
"""Longest wait of `load` for an old version's last sequence."""


class Prompts:
    """Texts as token ids, for a model with so many `positions` (None: nobody knows)."""

    def __init__(self, tokenizer: Tokenizer, positions: int | None) -> None:
        self._tokenizer, self._positions = tokenizer, positions
        self._remembered = functools.lru_cache(maxsize=REMEMBERED)(self._encode)

    def ids(self, text: str) -> list[int]:
        """Of the text as it stands: no special tokens are added. The caller's own copy."""
        return list(self._remembered(text))

    def fitting(self, text: str, max_tokens: int) -> list[int]:
        """As `ids`. PromptTooLong where the model has no room for an answer behind it, ConfigError where for none."""
        ids, limit = self.ids(text), self._positions
        if not ids:
            raise ConfigError("the prompt has no tokens", "Give a prompt")
        if limit is not None and max_tokens >= limit:
            raise ConfigError(f"max_tokens {max_tokens} leaves no room in the model's {limit} positions", "Lower it")
        if limit is not None and len(ids) + max_tokens > limit:
            cause = f"prompt of {len(ids)} tokens and max_tokens {max_tokens} exceed the model's {limit} positions"
            raise PromptTooLong(cause, "Lower max_tokens or shorten the prompt")
        return ids

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def check_alive(failure: BaseException | None, closed: bool) -> None:
    """InfraError where an engine serves no more; the mismatch itself where it served another policy (I8)."""
    if isinstance(failure, PolicyMismatch):
        raise failure
    if failure is not None or closed:
        raise InfraError(f"the sampling engine has stopped: {failure or 'closed'}", "Restart the sampler")


def check_served(version: int) -> None:
    """InfraError before the first version."""
    if version < 0:
        raise InfraError("the engine has no policy yet", "Load a version first")


async def wait_for_room(
    live: Callable[[], int],
    most: int,
    changed: asyncio.Event,
    check: Callable[[], None],
    cure: str,
    wait_s: float = LOAD_WAIT_S,
) -> None:
    """Until at most `most` versions are live; InfraError after `wait_s`. `check` raises where none will ever end.

    Who retires a version, or fails, sets `changed`.
    """
    try:
        async with asyncio.timeout(wait_s):
            while live() > most:
                changed.clear()
                await changed.wait()
                check()
    except TimeoutError as error:
        raise InfraError(f"{live()} policy versions are still busy after {wait_s:g} s", cure) from error
