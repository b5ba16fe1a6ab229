"""Large tensors by parts: what is worked out of one takes memory for a part, and not for all of it again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

CHUNK = 1 << 24
"""Elements of a part."""
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.float64}


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same parts of tensors of one shape, as flat views in the order of their memory; where they have gaps, or lie
    in several ways, as `slices`. For what is done to each element alone.
    """
    first = tensors[0]
    if first.numel() <= CHUNK:
        yield tensors
        return
    if not _is_dense(first) or any(one.stride() != first.stride() for one in tensors):
        yield from zip(*(slices(one) for one in tensors), strict=True)
        return
    flat = [one.as_strided((one.numel(),), (1,)) for one in tensors]
    for begin in range(0, first.numel(), CHUNK):
        yield tuple(one[begin : begin + CHUNK] for one in flat)


def in_order(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parts of one tensor in the order of its elements, for numbers that are drawn one after the other."""
    return (part for (part,) in pieces(tensor)) if tensor.is_contiguous() else slices(tensor)


def slices(tensor: torch.Tensor, most: int = 0) -> Iterator[torch.Tensor]:
    """Views of at most `most` elements, by default `CHUNK`, in the order of elements, however they lie in memory."""
    most = most or CHUNK
    if tensor.numel() <= most:
        yield tensor
        return
    inner = tensor.numel() // tensor.shape[0]
    if inner > most:
        for one in tensor:
            yield from slices(one, most)
        return
    step = most // inner
    for begin in range(0, tensor.shape[0], step):
        yield tensor[begin : begin + step]


def first_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` of its rows, which lie along the last dimension. `reshape` of all of it would be a copy of all
    where it does not lie in the order of its elements.
    """
    while tensor.dim() > 2 and tensor.numel() and math.prod(tensor.shape[1:-1]) >= count:
        tensor = tensor[0]
    if tensor.dim() > 2 and tensor.numel():
        tensor = tensor[: -(-count // math.prod(tensor.shape[1:-1]))]
    return tensor.reshape(-1, tensor.shape[-1])[:count]


def row_sums(rows: torch.Tensor, widened: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Of a matrix, after each element was `widened`."""
    step = max(1, CHUNK // max(1, rows.shape[0]))
    begins = range(0, max(1, rows.shape[1]), step)
    return torch.stack([widened(rows[:, begin : begin + step]).sum(-1) for begin in begins]).sum(0)


def countable(tensor: torch.Tensor) -> torch.Tensor:
    """It, or in fp32 what has one byte for a number, and in wider integers those without a sign: torch neither compares
    nor rounds nor turns fp8, and has no order of `uint16` and wider. What no wider integer holds is rounded.
    """
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        return tensor.float()
    return tensor.to(_WIDER[tensor.dtype]) if tensor.dtype in _WIDER else tensor


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """It, or both parts of complex numbers as numbers of their own, along a last dimension."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of one shape, and equal at each place: NaN is not."""
    return one.shape == other.shape and all(torch.equal(*both) for both in pieces(one, other))


def ends(tensor: torch.Tensor) -> tuple[float, float]:
    """The least and the largest magnitude; NaN where there is one."""
    return _extremes(tensor, torch.Tensor.abs)


def bounds(tensor: torch.Tensor) -> tuple[float, float]:
    """The least and the largest value; NaN where there is one."""
    return _extremes(tensor, torch.Tensor.double)


def _extremes(tensor: torch.Tensor, of: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, float]:
    both = torch.stack([torch.stack(of(part).aminmax()) for (part,) in pieces(tensor)])
    least, most = torch.stack([both[:, 0].amin(), both[:, 1].amax()]).tolist()  # the device is waited for once
    return float(least), float(most)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one block of memory in some order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride() and tensor.numel() > 0
