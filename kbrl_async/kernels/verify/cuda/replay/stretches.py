"""Stretches of an arena, as (begin, end) in bytes: where inputs lie, what is free, what meets, how it is poisoned."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence

import torch

from kbrl_async.kernels.verify import values, wire
from kbrl_async.kernels.verify.cuda.arena import ALIGNMENT

POISON = 0x7F
_GAPS = 32
"""A gap between two inputs is at most so many times the alignment."""
_LARGE, _PAGE, _PAGES = 1 << 20, 2 << 20, 3
SMALL = _GAPS * ALIGNMENT
"""Stretches up to this many bytes are poisoned all at once."""
Span = tuple[int, int]


def place_inputs(
    tensors: list[torch.Tensor], slots: int, rng: random.Random
) -> tuple[list[list[wire.TensorMeta]], int]:
    """Places for the inputs of each slot, at distances that nobody can foresee, and their end."""
    placed: list[list[wire.TensorMeta]] = []
    end = 0
    for _ in range(slots):
        metas: list[wire.TensorMeta] = []
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            step = ALIGNMENT if size < _LARGE else _PAGE  # large ones begin with a page, as the driver's own do
            end = values.padded(end, step) + rng.randint(1, _GAPS if size < _LARGE else _PAGES) * step
            metas += values.layout([tensor], end, step)[0]
            end += values.padded(size, ALIGNMENT)
        placed.append(metas)
    return placed, values.padded(end + ALIGNMENT, _PAGE)


class Stretches:
    """Memory that is poisoned together."""

    def __init__(self, raw: torch.Tensor, spans: Iterable[Span]) -> None:
        parts = [raw[begin:end] for begin, end in spans]
        self._large = [part for part in parts if part.numel() > SMALL]
        self._small = [part for part in parts if part.numel() <= SMALL]
        self._stamps = [_stamp(raw.device)[: part.numel()] for part in self._small]

    def poison(self) -> None:
        for part in self._large:
            part.fill_(POISON)
        if self._small:
            torch._foreach_copy_(self._small, self._stamps)


@functools.cache
def _stamp(device: torch.device) -> torch.Tensor:
    return torch.full((SMALL,), POISON, dtype=torch.uint8, device=device)


def complement(taken: Iterable[Span], end: int) -> list[Span]:
    """The stretches of (0, end) that none of these covers.

    >>> complement([(2, 4), (6, 8)], 10)
    [(0, 2), (4, 6), (8, 10)]
    """
    left, at = [], 0
    for begin, stop in sorted(taken):
        if begin > at:
            left.append((at, begin))
        at = max(at, stop)
    return [*left, (at, end)] if at < end else left


def touches(one: Span, others: Sequence[Span]) -> bool:
    return any(one[0] < end and begin < one[1] for begin, end in others)


def joined(spans: Iterable[Span]) -> list[Span]:
    """Those of one slot may share bytes: two outputs may be views of one buffer.

    >>> joined([(4, 8), (0, 6), (9, 9), (10, 12)])
    [(0, 8), (10, 12)]
    """
    found: list[Span] = []
    for begin, end in sorted(one for one in spans if one[0] < one[1]):
        if found and begin < found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def stretches_of(written: Iterable[Span], size: int) -> list[int]:
    """Where blocks of so many bytes may begin that several of these cover, and none alone; and such as several smaller
    ones cover on top of one that does, as what is filled with zeros before its parts are copied there.

    >>> stretches_of([(0, 256), (256, 512), (1024, 1280)], 512)
    [0]
    >>> stretches_of([(0, 512), (0, 256), (256, 512)], 512)
    [0]
    """
    spans = sorted(set(written))
    smaller = [(begin, end) for begin, end in spans if end - begin < size]
    alone = {begin for begin, end in spans if end - begin >= size}
    return sorted({*_covered(spans, size, alone), *_covered(smaller, size, set())})


def _covered(spans: list[Span], size: int, alone: set[int]) -> list[int]:
    covered: list[Span] = []
    for begin, end in spans:
        if covered and begin <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(end, covered[-1][1]))
        else:
            covered.append((begin, end))
    return [
        begin
        for first, last in covered
        for begin in dict.fromkeys(begin for begin, _ in spans if first <= begin and begin + size <= last)
        if size and begin not in alone and begin % ALIGNMENT == 0
    ]
