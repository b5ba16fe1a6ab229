"""Which tokens of an answer are its kernel: a span of characters becomes a span of tokens. Pure.

Invariant: the span holds every token that wrote one of the characters, and no token that wrote none of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence


def token_span(
    decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], start: int, end: int
) -> tuple[int, int]:
    """(first token, first token behind) of the characters `start` … `end` of the decoded text.

    Looks at a logarithmic number of prefixes: what `decode` gives of a prefix only grows with it.
    """
    places = range(len(token_ids) + 1)

    def length(count: int) -> int:
        return len(decode(token_ids[:count]))

    first = bisect_right(places, start, key=length) - 1
    behind = bisect_left(places, end, key=length)
    return (max(0, first), min(behind, len(token_ids))) if end > start else (0, 0)
