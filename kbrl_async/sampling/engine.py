"""The seam between the sampler process and an inference engine.

An engine draws tokens from `softmax(logits / temperature)` and returns their log-probs under that very distribution. It
serves several policy versions at once for a while: a sequence ends on the version that it began with, new sequences
begin on the newest. Adding an engine is one module that fits `Engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from kbrl_async.errors import ConfigError
from protocols.records import PolicyVersion, Purpose, SamplingParams


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
    """Prompts whose K/V came from the prefix cache or from a twin in the same wave."""
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
"""What an engine enters around the work of a load that can't stand still; canaries can, as rollouts do."""


@runtime_checkable
class Computes(Protocol):
    """An engine whose loads compute here, and must not while somebody measures on the same device."""

    computing: Computing


class Engine(Protocol):
    """What the sampler needs. All methods belong to one event loop."""

    @property
    def policy_version(self) -> int:
        """The version that new sequences get; −1 before the first `load`."""

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
