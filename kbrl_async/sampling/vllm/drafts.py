"""One answer while it is written: its tokens so far, their log-probs, and which version wrote which of them.

An answer may be written in several parts: an update of the weights in flight changes the version between two tokens,
and an interruption ends a part early. The next part continues from all tokens so far.

Invariants
* Every token keeps the log-prob that it was drawn with; nothing that came before is drawn or scored again.
* Spans cover all tokens without gaps, and their versions rise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

Span = tuple[int, int]
"""(policy version, number of tokens that it wrote)."""


@dataclasses.dataclass
class Draft:
    """An answer of at most `max_tokens` tokens to a prompt."""

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
