"""Log-probs out of what vLLM returns: a flat table, or a dictionary a position, by version. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[int, float]
"""Log-prob by token id at one position."""


def rows(table: Any) -> list[Row]:
    """One row a position; empty where the position has none (the first of a prompt)."""
    if table is None:
        return []
    if hasattr(table, "start_indices"):
        parts = zip(table.start_indices, table.end_indices, strict=True)
        return [dict(zip(table.token_ids[a:b], table.logprobs[a:b], strict=True)) for a, b in parts]
    return [{} if row is None else {token: entry.logprob for token, entry in row.items()} for row in table]


def chosen(table: Any, token_ids: Sequence[int]) -> list[float]:
    """The log-probs of the tokens that were drawn."""
    if hasattr(table, "start_indices") and len(table.logprobs) == len(token_ids):
        flat: list[float] = list(table.logprobs)  # nothing but the drawn tokens was asked for
        return flat
    return [row[token] for row, token in zip(rows(table), token_ids, strict=True)]
