"""What engines in this process ask before they take a request or a version, in one place and in the same words.

::

    text ─▶ Prompts: ids, made once while it is in use; refused where the model has no room ─▶ engine ◀─ load
            check_alive: failed or closed?   check_served: is there a policy?                   wait_for_room

Invariants
* An engine that has failed or was closed takes nothing more (I4). A PolicyMismatch stays one: it must stop the run.
* A prompt that does not fit is refused before anything is computed for it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Protocol

from kbrl_async.errors import ConfigError, InfraError, PolicyMismatch, PromptTooLong

REMEMBERED = 256
"""Prompts whose ids are kept: those of all groups under way, each of which asks a group's size of times."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    @property
    def eos_token_id(self) -> int | None: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


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
    wait_s: float,
    cure: str,
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
