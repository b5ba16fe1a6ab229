"""Which policy versions an engine holds, who still writes by each, and which tokens of an answer each wrote. Pure.

::

    serve(v17) ─▶ newest ─ acquire ─▶ a rollout holds v17 ─ release ─▶ v16, held by nobody and not the newest: removed

Invariants
* A rollout keeps the version that it acquired, and its adapter stays as long as it is held.
* Every adapter of every version has an id of its own, never used again: nothing of an old one can be found by it.
* Every token keeps the log-prob that it was drawn with; nothing that came before is drawn or scored again.
* The spans of an answer cover all its tokens without gaps, and their versions rise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from kbrl_async.sampling.engine import Completion
from kbrl_async.sampling.forced import FORCED, forced_ids
from kbrl_async.sampling.transformers.versions import adapter_name
from kbrl_async.sampling.vllm.options import VLLMParts
from protocols.records import SamplingParams


class Served(msgspec.Struct, frozen=True):
    """One adapter of one version, as the engine knows it. `lora_id` 0: the weights themselves."""

    version: int
    role: str = ""
    lora_id: int = 0
    folder: str = ""

    @property
    def name(self) -> str:
        return adapter_name(self.version, self.role)


class LiveVersions:
    """The versions in the engine, oldest first."""

    def __init__(self) -> None:
        self._last_id = 0
        self._served: dict[int, dict[str, Served]] = {}
        self._holders: dict[int, int] = {}

    @property
    def newest(self) -> int:
        """The version that new rollouts get; −1 before the first."""
        return max(self._served, default=-1)

    @property
    def live(self) -> list[int]:
        return sorted(self._served)

    def name_adapters(self, version: int, folders: Sequence[tuple[str, str]]) -> list[Served]:
        """Names and ids for (role, folder) of a version that is about to be loaded."""
        made = []
        for role, folder in folders:
            self._last_id += 1
            made.append(Served(version, role, self._last_id, folder))
        return made

    def serve(self, adapters: Sequence[Served]) -> None:
        """New rollouts get these from now on: proven, and all of one version."""
        version = adapters[0].version
        assert version > self.newest, "versions only rise"
        self._served[version] = {one.role: one for one in adapters}
        self._holders[version] = 0

    def acquire(self, role: str = "") -> Served:
        """The newest version's adapter for `role`, its main one where it has none of that name."""
        found = self._served[self.newest]
        self._holders[self.newest] += 1
        return found.get(role) or found[""]

    def release(self, served: Served) -> None:
        self._holders[served.version] -= 1
        assert self._holders[served.version] >= 0, "released once for each time it was acquired"

    def holders(self, version: int) -> int:
        return self._holders.get(version, 0)

    def retire(self) -> list[Served]:
        """Forgets versions that nobody writes by and that are not the newest; the adapters to remove."""
        ended = [v for v, count in self._holders.items() if count == 0 and v != self.newest]
        gone: list[Served] = []
        for version in ended:
            gone += self._served.pop(version).values()
            del self._holders[version]
        return gone


Span = tuple[int, int]
"""(policy version, number of tokens that it wrote)."""


@dataclasses.dataclass
class Draft:
    """An answer of at most `max_tokens` tokens while it is written, perhaps in several parts: an update of the weights
    in flight changes the version between two tokens, an interruption ends a part early. The next part continues from
    all tokens so far."""

    prompt_ids: list[int]
    max_tokens: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    spans: list[Span] = dataclasses.field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens that may still be written."""
        return self.max_tokens - len(self.token_ids)

    @property
    def so_far(self) -> list[int]:
        """What a part that continues is prompted with."""
        return self.prompt_ids + self.token_ids

    @property
    def policy_version(self) -> int:
        """The oldest version in it, by which its age counts (I2); −1 while it is empty."""
        return self.spans[0][0] if self.spans else -1

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Tokens that `version` wrote."""
        assert len(token_ids) == len(logprobs), "a log-prob for every token"
        assert len(token_ids) <= self.left, "within the token budget"
        if not token_ids:
            return
        self.token_ids += token_ids
        self.logprobs += logprobs
        last, count = self.spans[-1] if self.spans else (version, 0)
        assert version >= last, "versions rise"
        if self.spans and last == version:
            self.spans[-1] = (version, count + len(token_ids))
        else:
            self.spans.append((version, len(token_ids)))

    def forced_words(self, params: SamplingParams) -> dict[str, Any]:
        """For vLLM: what of an answer that was given (`sampling.forced`) is not written yet."""
        left = forced_ids(params)[len(self.token_ids) :]
        return {"extra_args": {FORCED: list(left)}} if left else {}

    def completion(self, text: str, reason: str, started_at: float, finished_at: float) -> Completion:
        """Of a draft that has ended for this reason."""
        return Completion(
            prompt_ids=self.prompt_ids,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            text=text,
            finish_reason=reason,
            policy_version=self.policy_version,
            started_at=started_at,
            finished_at=finished_at,
            spans=tuple(self.spans),
        )


def drawing(parts: VLLMParts, draft: Draft, params: SamplingParams, stop_ids: list[int], *, streamed: bool) -> Any:
    """vLLM's `SamplingParams` of what a draft still lacks. `streamed`: token by token, only where weights may change
    between two of them: it costs the loop a turn each."""
    seed = None if params.seed is None else params.seed + len(draft.token_ids)
    return parts.sampling_params(
        max_tokens=draft.left,
        temperature=params.temperature,
        top_p=params.top_p,
        seed=seed,
        stop_token_ids=stop_ids,
        logprobs=0,
        detokenize=False,
        output_kind=parts.delta if streamed else parts.final_only,
        **({"flat_logprobs": True} if parts.flat_logprobs else {}),
        **draft.forced_words(params),
    )
