"""Samples → flat rows for the fused decoder: sequences end to end, without padding, and a group's prompt computed once.

::

    alone     [p p a a a | p p b b]                    each sequence with its prompt
    shared    [p p]  then  [a a a | b b]               one pass over the prompt, its k and v in front of every response

A bundle is what shares a prompt: its batches run one after the other, each with its own backward pass, and the prompt's
comes last with the gradients that they left at its k and v. So sharing needs no more memory than one sequence does.

Invariant: every response token stands in exactly one batch.
"""

# ruff: noqa: N815 - capital suffixes of names give tensor shapes
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from kbrl_async.learning.packing import Packable

LEAST_SHARED = 64
"""Tokens of a prompt that is computed once."""
_Member = tuple[int, list[int], list[int]]
"""Index of a sample, its prompt, its response."""


@dataclasses.dataclass(frozen=True)
class FlatBatch:
    """T tokens in segments of `lengths`; N response tokens. `predict_N` indexes the T hidden states, and T itself is
    the hidden state of the shared prompt's last token."""

    input_T: torch.Tensor
    position_T: torch.Tensor
    lengths: tuple[int, ...]
    predict_N: torch.Tensor
    target_N: torch.Tensor
    sample_T: torch.Tensor
    """[N], as in `packing.Microbatch`: index of the sample in the list that was packed."""
    offset_T: torch.Tensor
    """[N]: index of the token in its response."""

    @property
    def inputs(self) -> int:
        """Tokens that are computed."""
        return len(self.input_T)

    def to(self, device: torch.device) -> FlatBatch:
        """The same on another device, copied without waiting."""
        tensors = (self.predict_N, self.target_N, self.sample_T, self.offset_T)
        inputs = to_device(self.input_T, device), to_device(self.position_T, device)
        return FlatBatch(*inputs, self.lengths, *(to_device(tensor, device) for tensor in tensors))


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Batches with a shared prompt, or a single one without."""

    batches: list[FlatBatch]
    prompt: FlatBatch | None = None
    """No response tokens; its k, v and last hidden state (`predict_N`) are what the batches continue."""

    def to(self, device: torch.device) -> Bundle:
        """The same on another device, copied without waiting."""
        prompt = None if self.prompt is None else self.prompt.to(device)
        return Bundle([batch.to(device) for batch in self.batches], prompt)

    @property
    def tokens(self) -> int:
        """All that are computed."""
        prompt = 0 if self.prompt is None else len(self.prompt.input_T)
        return prompt + sum(len(batch.input_T) for batch in self.batches)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def by_prompt(samples: Sequence[Packable]) -> dict[tuple[int, ...], list[int]]:
    """Indices of those that have an answer."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        if sample.token_ids:
            groups.setdefault(tuple(sample.prompt_ids), []).append(index)
    return groups


def bundle(
    samples: Sequence[Packable], token_budget: int, share: bool, least_shared: int = LEAST_SHARED
) -> Iterator[Bundle]:
    """Batches of at most `token_budget` tokens (a longer sequence stands alone), a shared prompt counted to each.

    A prompt is shared by samples that have it in common where it is at least `least_shared` tokens long.
    """
    single: list[_Member] = []
    for prompt, indices in by_prompt(samples).items():
        members = [(i, list(prompt), list(samples[i].token_ids)) for i in indices]
        if share and len(members) > 1 and len(prompt) >= least_shared:
            rows = _filled(members, token_budget - len(prompt), lambda m: len(m[2]))
            yield Bundle([_flat(row, len(prompt)) for row in rows], _prompt(prompt))
        else:
            single += members
    for row in _filled(single, token_budget, lambda m: len(m[1]) + len(m[2])):
        yield Bundle([_flat(row, 0)])


def _filled(members: list[_Member], room: int, size: Callable[[_Member], int]) -> list[list[_Member]]:
    """First fit, longest first: few rows, none longer than `room` unless one member alone is."""
    rows: list[tuple[int, list[_Member]]] = []
    for member in sorted(members, key=lambda m: (-size(m), m[0])):
        for number, (used, row) in enumerate(rows):
            if used + size(member) <= room:
                row.append(member)
                rows[number] = (used + size(member), row)
                break
        else:
            rows.append((size(member), [member]))
    return [row for _, row in rows]


def _flat(row: list[_Member], shared: int) -> FlatBatch:
    """`shared` tokens of each prompt stand elsewhere: the row begins behind them."""
    ids: list[int] = []
    positions: list[torch.Tensor] = []
    lengths: list[int] = []
    predict: list[torch.Tensor] = []
    total = sum(len(prompt) - shared + len(response) for _, prompt, response in row)
    for _, prompt, response in row:
        own = prompt[shared:] + response
        first = len(ids) + len(prompt) - shared  # where the response begins
        where = torch.arange(first - 1, first + len(response) - 1)
        if shared:
            where[0] = total  # predicted by the shared prompt's last token
        predict.append(where)
        positions.append(torch.arange(shared, shared + len(own)))
        lengths.append(len(own))
        ids += own
    return FlatBatch(
        torch.tensor(ids),
        torch.cat(positions),
        tuple(lengths),
        torch.cat(predict),
        torch.tensor([token for _, _, response in row for token in response]),
        torch.cat([torch.full((len(response),), index) for index, _, response in row]),
        torch.cat([torch.arange(len(response)) for _, _, response in row]),
    )


def _prompt(ids: Sequence[int]) -> FlatBatch:
    none = torch.empty(0, dtype=torch.long)
    last = torch.tensor([len(ids) - 1])
    return FlatBatch(torch.tensor(ids), torch.arange(len(ids)), (len(ids),), last, none, none, none)
