"""Samples → microbatches. Samples that share a prompt share its tokens too: the prompt is computed once a row.

A row with one response is a plain sequence; a row with several is a tree, whose responses see the prompt and
themselves but not one another (positions restart behind the prompt)::

    row    p p p p a a a b b b b        a sees p and a;  b sees p and b
    pos    0 1 2 3 4 5 6 4 5 6 7

Rows of about the same length are stacked, right-padded. A microbatch whose rows are all plain needs no mask (causal
attention can't see padding on the right). Measured on 64 sequences of 130–210 tokens, prompt 100, groups of 8, 3.2 M
parameters, fp32, one core: trees 6.8k tok/s, padded and sorted 4.7k, block-diagonal packing 3.4k.

Invariants: every response token stands in exactly one microbatch; log-probs equal those of each sequence alone.
"""

# ruff: noqa: N803, N806, N815 - capital suffixes of names give tensor shapes
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import torch

TREE_TOKENS = 768
"""Longest row in which samples share their prompt: attention in it costs its length squared."""


class Packable(Protocol):
    """What `pack` needs of a sample: `protocols.records.TrainSample` fits."""

    @property
    def prompt_ids(self) -> list[int]: ...
    @property
    def token_ids(self) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """B rows of L tokens; T response tokens, flat. `predict_T` indexes the flattened [B·L] hidden states."""

    input_BL: torch.Tensor
    position_BL: torch.Tensor
    segment_BL: torch.Tensor | None
    """0 in prompts, j in the j-th response of a row, −1 in padding; None for plain causal rows."""
    predict_T: torch.Tensor
    target_T: torch.Tensor
    sample_T: torch.Tensor
    """Index of the sample in the list that was packed."""
    offset_T: torch.Tensor
    """Index of the token in its response."""

    @functools.cached_property
    def mask_B1LL(self) -> torch.Tensor | None:  # noqa: N802 - a tensor's shape
        """True where attention is allowed; None for plain causal rows. Made where the microbatch is: L² a row is more
        to send to a GPU than to compute there."""
        return None if self.segment_BL is None else _tree_mask(self.segment_BL)

    @property
    def inputs(self) -> int:
        """Tokens that are computed, padding included."""
        return self.input_BL.numel()

    def to(self, device: torch.device | str) -> Microbatch:
        """The same on another device."""
        segment = None if self.segment_BL is None else self.segment_BL.to(device)
        names = ("input_BL", "position_BL", "predict_T", "target_T", "sample_T", "offset_T")
        return dataclasses.replace(self, segment_BL=segment, **{name: getattr(self, name).to(device) for name in names})


@dataclasses.dataclass
class _Row:
    prompt: list[int]
    responses: list[tuple[int, list[int]]]

    @property
    def length(self) -> int:
        return len(self.prompt) + sum(len(ids) for _, ids in self.responses)


def pack(samples: Sequence[Packable], token_budget: int, tree_tokens: int = TREE_TOKENS) -> list[Microbatch]:
    """Microbatches of at most `token_budget` tokens, padding included (a single longer sequence stands alone).

    `tree_tokens` bounds a row in which samples share their prompt; 0 packs every sample alone.
    """
    rows = sorted(_rows(samples, min(tree_tokens, token_budget)), key=lambda row: row.length)
    batches: list[list[_Row]] = []
    for row in rows:
        last = batches[-1] if batches else []
        if last and (len(last) + 1) * row.length <= token_budget and _fits(last[0], row):
            last.append(row)
        else:
            batches.append([row])
    return [_microbatch(batch) for batch in batches]


def _fits(first: _Row, row: _Row) -> bool:
    # Trees among themselves (plain rows would pay for the mask), and never more than a quarter of padding.
    return (len(first.responses) > 1) == (len(row.responses) > 1) and row.length <= 1.25 * first.length + 32


def _rows(samples: Sequence[Packable], tree_tokens: int) -> list[_Row]:
    open_rows: dict[tuple[int, ...], _Row] = {}
    rows: list[_Row] = []
    for index, sample in enumerate(samples):
        if not sample.token_ids:
            continue
        key = tuple(sample.prompt_ids)
        row = open_rows.get(key)
        if row is None or row.length + len(sample.token_ids) > tree_tokens:
            row = _Row(sample.prompt_ids, [])
            rows.append(row)
            open_rows[key] = row
        row.responses.append((index, sample.token_ids))
    return rows


def _microbatch(rows: list[_Row]) -> Microbatch:
    length = max(row.length for row in rows)
    input_BL = torch.zeros(len(rows), length, dtype=torch.long)
    position_BL = torch.zeros(len(rows), length, dtype=torch.long)
    segment_BL = torch.full((len(rows), length), -1, dtype=torch.long)
    predict: list[torch.Tensor] = []
    target: list[int] = []
    sample: list[torch.Tensor] = []
    offset: list[torch.Tensor] = []
    for b, row in enumerate(rows):
        start = len(row.prompt)
        input_BL[b, :start] = torch.tensor(row.prompt)
        position_BL[b, :start] = torch.arange(start)
        segment_BL[b, :start] = 0
        for j, (index, ids) in enumerate(row.responses, 1):
            end = start + len(ids)
            input_BL[b, start:end] = torch.tensor(ids)
            position_BL[b, start:end] = torch.arange(len(ids)) + len(row.prompt)
            segment_BL[b, start:end] = j
            where = torch.arange(start - 1, end - 1)
            where[0] = len(row.prompt) - 1  # the first token of every response is predicted by the prompt's last
            predict.append(where + b * length)
            target.extend(ids)
            sample.append(torch.full((len(ids),), index))
            offset.append(torch.arange(len(ids)))
            start = end
    is_tree = any(len(row.responses) > 1 for row in rows)
    segments = segment_BL if is_tree else None
    return Microbatch(
        input_BL, position_BL, segments, torch.cat(predict), torch.tensor(target), torch.cat(sample), torch.cat(offset)
    )


def _tree_mask(segment_BL: torch.Tensor) -> torch.Tensor:
    index_L = torch.arange(segment_BL.shape[1], device=segment_BL.device)
    causal_LL = index_L[:, None] >= index_L[None, :]
    same_BLL = segment_BL[:, :, None] == segment_BL[:, None, :]
    to_prompt_BLL = (segment_BL[:, None, :] == 0) & (segment_BL[:, :, None] >= 0)
    return (causal_LL & (same_BLL | to_prompt_BLL))[:, None]
