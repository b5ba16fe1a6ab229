"""Large tensors by parts: what is worked out of one takes memory for a part, and not for all of it again."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CHUNK = 1 << 24
"""Elements of a part."""


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same parts of tensors of one shape and one layout, as they lie in memory, as flat views; all at once where
    they have gaps, or lie otherwise. For what is done to each element alone.
    """
    first = tensors[0]
    if first.numel() <= CHUNK or not _is_dense(first) or any(one.stride() != first.stride() for one in tensors):
        yield tensors
        return
    flat = [one.as_strided((one.numel(),), (1,)) for one in tensors]
    for begin in range(0, first.numel(), CHUNK):
        yield tuple(one[begin : begin + CHUNK] for one in flat)


def in_order(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parts of one tensor in the order of its elements, for numbers that are drawn one after the other."""
    return (part for (part,) in pieces(tensor)) if tensor.is_contiguous() else iter([tensor])


def ends(tensor: torch.Tensor) -> tuple[float, float]:
    """The least and the largest magnitude; NaN where there is one."""
    found = [torch.stack(part.abs().aminmax()) for (part,) in pieces(tensor)]
    both = torch.stack(found)
    return float(both[:, 0].amin()), float(both[:, 1].amax())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one block of memory in some order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride() and tensor.numel() > 0
