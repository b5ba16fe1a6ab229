"""How long a prompt may be, in the tokens of the policy that reads it.

A prompt that is too long is told with fewer whole parts, never with a part cut in the middle: whoever renders it offers
its forms, the fullest first, and the budget takes the first one that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

UNLIMITED = 1 << 30


class TokenBudget(msgspec.Struct, frozen=True):
    """`count_tokens` is the policy's tokenizer, its chat template included; `limit` is context − max_tokens."""

    limit: int = UNLIMITED
    count_tokens: Callable[[str], int] = len

    def fits(self, text: str) -> bool:
        return self.limit >= UNLIMITED or self.count_tokens(text) <= self.limit

    def first_fitting(self, forms: Iterable[str]) -> str:
        """The first of `forms` that fits; the last one where none does, which the sampler then refuses with a reason.

        >>> TokenBudget(4).first_fitting(["too long", "four", "-"])
        'four'
        """
        last = ""
        for last in forms:
            if self.fits(last):
                return last
        return last


UNBOUNDED = TokenBudget()
