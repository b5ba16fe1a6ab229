"""Comparing a candidate's output with the reference's: pure functions of tensors, on any device.

What is allowed is in `tolerance.py`. NaN fails unless the reference has it at the same place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import torch

from kbrl_async.kernels.verify import fused
from kbrl_async.kernels.verify.fused import Counted
from kbrl_async.kernels.verify.pieces import CHUNK, are_equal, countable, pieces, slices
from kbrl_async.kernels.verify.tolerance import HALF, Tolerance, base, largest_error, output_scale, tolerance

__all__ = [
    "Difference",
    "Tolerance",
    "difference",
    "kernelbench",
    "largest_error",
    "output_scale",
    "same_values",
    "tolerance",
]

CACHED = 1 << 17
"""Elements that are compared at once on a processor."""
_FAR_SHARE = 0.01
_BANDS, _LEAST_BAND = 256, 256
"""At most so many, and of so many elements at least but the last one."""
_LARGEST = torch.finfo(torch.float32).max


class Difference(msgspec.Struct, frozen=True):
    """How an output differs; `wrong == 0` is a pass."""

    wrong: int
    total: int
    worst: float
    allowed: float
    where: tuple[int, ...] = ()
    got: float = 0.0
    expected: float = 0.0
    nans: int = 0


def kernelbench(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """KernelBench's own verdict on two tensors of one shape and dtype, reported beside ours."""
    if not expected.is_floating_point():
        return are_equal(got, expected)
    figure = base(expected.dtype)
    if (counted := _counted(got, expected, Tolerance(figure, figure))) is not None:
        return counted.wrong == 0 == counted.nans
    parts = ((_wide_enough(a), _wide_enough(b)) for a, b in pieces(got, expected))
    return all(torch.allclose(*both, rtol=figure, atol=figure) for both in parts)


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit (so that NaN equals its own bytes)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    way = fused.of(a.device) if a.device == b.device else None
    if way is not None and (found := way.same(a, b)) is not None:
        return found
    return all(_are_same(one.to(other.device), other) for one, other in pieces(a, b))


def _are_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if torch.equal(a, b):
        return True
    if not a.is_floating_point() and not a.is_complex():
        return False
    return torch.equal(*(one.contiguous().view(-1).view(torch.uint8) for one in (a, b)))


def agrees(got: torch.Tensor, expected: torch.Tensor, allowed: Tolerance) -> bool:
    """Whether `difference` surely finds nothing wrong, in half as many passes over memory; False says nothing."""
    if allowed.exact or not expected.is_floating_point() or expected.numel() == 0:
        return are_equal(got, expected)
    if allowed.spread < math.inf:
        return difference(got, expected, allowed).wrong == 0
    if (counted := _counted(got, expected, allowed)) is not None:
        return counted.wrong == 0
    parts = _cached_parts(got, expected) or pieces(got, expected)
    return all(_agree(_wide_enough(a), _wide_enough(b), allowed) for a, b in parts)


def _agree(got: torch.Tensor, expected: torch.Tensor, allowed: Tolerance) -> bool:
    excess = torch.sub(got, expected).abs_().sub_(expected.abs(), alpha=allowed.relative)
    return bool(excess.max() <= allowed.absolute)


def difference(got: torch.Tensor, expected: torch.Tensor, allowed: Tolerance) -> Difference:
    """Compare two tensors of one shape and dtype. Integers and booleans must be equal. Where each element is near
    enough and all together are not, those are wrong that are off by more than all may be.
    """
    found = _of_each(got, expected, allowed)
    if found.wrong or allowed.spread == math.inf:
        return found
    if rms(got, expected) > allowed.spread:
        return _of_each(got, expected, Tolerance(0.0, allowed.spread))
    return (_of_a_band(got, expected, allowed) if allowed.elements == found.total else None) or found


def _of_a_band(got: torch.Tensor, expected: torch.Tensor, allowed: Tolerance) -> Difference | None:
    """The first one that is off by more than it may be: it is small beside others."""
    begin, width = 0, expected.shape[-1] if expected.dim() else 1
    for one, other, limit in zip(bands(got), bands(expected), allowed.by_band, strict=False):
        if rms(one, other) > limit:
            found = _of_each(one.reshape(-1), other.reshape(-1), Tolerance(0.0, limit))
            place = torch.unravel_index(torch.tensor(begin * width + found.where[0]), expected.shape)
            return msgspec.structs.replace(found, total=expected.numel(), where=tuple(map(int, place)))
        begin += one.shape[0]
    return None


def bands(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Rows that follow each other, which lie along the last dimension; none where there are too few elements."""
    if tensor.dim() < 2 or tensor.numel() < 2 * _LEAST_BAND:
        return []
    rows = tensor.reshape(-1, tensor.shape[-1])
    return list(torch.split(rows, max(-(-len(rows) // _BANDS), -(-_LEAST_BAND // rows.shape[1]))))


def _of_each(got: torch.Tensor, expected: torch.Tensor, allowed: Tolerance) -> Difference:
    total = expected.numel()
    if total == 0:
        return Difference(0, 0, 0.0, 0.0)
    if (counted := _counted(got, expected, allowed)) is not None:
        return difference_of(counted, got, expected, allowed)
    if (parts := _cached_parts(got, expected)) and (passed := _passed(parts, total, allowed)) is not None:
        return passed
    if total > CHUNK:
        return _in_chunks(got, expected, allowed)
    return _of_all(got, expected, allowed)


def _cached_parts(a: torch.Tensor, b: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of large ones on a processor, so that what comes in between stays in its cache: new memory of a large tensor
    costs several times what is done with it. Else none.
    """
    size = min(CACHED, CHUNK)
    if b.numel() <= size or not b.is_floating_point():
        return []
    if not all(one.is_cpu and one.is_contiguous() and not one.requires_grad for one in (a, b)):
        return []
    return list(zip(slices(a.view(-1), size), slices(b.view(-1), size), strict=True))


def _passed(parts: list[tuple[torch.Tensor, torch.Tensor]], total: int, allowed: Tolerance) -> Difference | None:
    """The difference where nothing is wrong; None where something is."""
    if allowed.exact:
        return None
    first = _wide_enough(parts[0][1])
    errors, limits = torch.empty_like(first), torch.empty_like(first)
    worst = (-1.0, 0.0)
    for one, other in parts:
        got, expected = _wide_enough(one), _wide_enough(other)
        error = torch.sub(got, expected, out=errors[: got.numel()]).abs_()
        limit = _limit(expected, allowed, limits[: got.numel()])
        if not bool((error <= limit).all()):
            return None
        most, place = error.max(0)
        if float(most) > worst[0]:
            worst = float(most), float(limit[place])
    return Difference(0, total, *worst)


def rms(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The root of the mean square of their distance; what is no finite number in either is left out."""
    total = 0.0
    for one, other in _cached_parts(got, expected) or pieces(got, expected):
        apart = torch.sub(countable(one).double(), countable(other))
        total += float(apart.nan_to_num_(0.0, 0.0, 0.0).square_().sum())
    return math.sqrt(total / max(1, expected.numel()))


def _limit(expected: torch.Tensor, allowed: Tolerance, out: torch.Tensor | None = None) -> torch.Tensor:
    """What each element may be off by; finite, because what is to be infinite must be."""
    limit = torch.abs(expected, out=out).mul_(allowed.relative).add_(allowed.absolute)
    return limit.clamp_(allowed.honest, torch.finfo(limit.dtype).max)


def is_all(block: torch.Tensor, byte: int) -> bool:
    """Whether each byte of a block of bytes is this one."""
    way = fused.of(block.device)
    if way is not None and (found := way.is_all(block, byte)) is not None:
        return found
    return all(bool((part == byte).all()) for (part,) in pieces(block))


def is_roughly(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether all but a hundredth of the values are about the same: atomic additions come in any order."""
    return got.shape == wanted.shape and far_apart(got, wanted) <= _FAR_SHARE * max(1, wanted.numel())


def is_much_nearer(got: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether `got` is at most a tenth as far from the one as from the other, on the mean: where a bias outweighs all
    else every result is about the same.
    """
    return 10 * _far(got, one) < _far(got, other)


def _far(a: torch.Tensor, b: torch.Tensor) -> float:
    """The sum of distances of elements that are numbers."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return sum(float((x.double() - y.double()).abs().nan_to_num(0.0, 0.0).sum()) for x, y in pieces(a, b))


def far_apart(got: torch.Tensor, wanted: torch.Tensor) -> int:
    if not got.is_floating_point():
        return sum(int((a != b).sum()) for a, b in pieces(got, wanted))
    pairs = list(pieces(got, wanted))
    scale = sum(float(b.float().abs().nan_to_num(posinf=0.0).sum()) for _, b in pairs) / max(1, wanted.numel())
    near = (torch.isclose(a.float(), b.float(), rtol=0.05, atol=0.05 * scale, equal_nan=True) for a, b in pairs)
    return sum(int((~close).sum()) for close in near)


def _counted(got: torch.Tensor, expected: torch.Tensor, allowed: Tolerance) -> Counted | None:
    way = fused.of(expected.device)
    return None if way is None else way.difference(got, expected, allowed)


def difference_of(counted: Counted, got: torch.Tensor, expected: torch.Tensor, allowed: Tolerance) -> Difference:
    error, place = counted.worst if counted.worst_wrong is None else counted.worst_wrong
    values = counted.values or torch.stack((got.view(-1)[place], expected.view(-1)[place])).tolist()
    limit = min(max(allowed.honest, abs(values[1]) * allowed.relative + allowed.absolute), _LARGEST)
    if counted.worst_wrong is None:
        return Difference(0, expected.numel(), error, limit)
    index = tuple(map(int, torch.unravel_index(torch.tensor(place), expected.shape)))
    return Difference(counted.wrong, expected.numel(), error, limit, index, values[0], values[1], counted.nans)


def _in_chunks(got: torch.Tensor, expected: torch.Tensor, allowed: Tolerance) -> Difference:
    """The same, with intermediate results of a chunk in memory and not of all."""
    found: list[Difference] = []
    begins = [0]
    for one, other in _flat_chunks(got, expected):
        found.append(_of_all(one, other, allowed))
        begins.append(begins[-1] + one.numel())
    begin, worst = max(zip(begins, found, strict=False), key=lambda part: _badness(part[1]))
    place = torch.unravel_index(torch.tensor(begin + worst.where[0]), expected.shape) if worst.where else ()
    return msgspec.structs.replace(
        worst,
        wrong=sum(part.wrong for part in found),
        total=expected.numel(),
        where=tuple(map(int, place)),
        nans=sum(part.nans for part in found),
    )


def _flat_chunks(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """In the order of their elements; what lies otherwise is copied chunk by chunk."""
    if a.is_contiguous() and b.is_contiguous():
        a, b = a.view(-1), b.view(-1)
    both = zip(slices(a, CHUNK), slices(b, CHUNK), strict=True)
    return ((one.reshape(-1), other.reshape(-1)) for one, other in both)


def _badness(found: Difference) -> tuple[bool, int, float]:
    return found.wrong > 0, found.nans, math.inf if math.isnan(found.worst) else found.worst


def _of_all(got: torch.Tensor, expected: torch.Tensor, allowed: Tolerance) -> Difference:
    total = expected.numel()
    if expected.is_complex():
        got, expected = torch.view_as_real(got), torch.view_as_real(expected)
    if not expected.is_floating_point():
        wrong = got != expected
        error = (got.double() - expected.double()).abs()
        return _difference(wrong, error, torch.zeros_like(error), got, expected)
    got, expected = _wide_enough(got), _wide_enough(expected)
    error = (got - expected).abs()
    limit = torch.zeros_like(error) if allowed.exact else _limit(expected, allowed)
    passes = error <= limit
    if bool(passes.all()):
        worst = int(error.argmax())
        return Difference(0, total, float(error.flatten()[worst]), float(limit.flatten()[worst]))
    if not bool(error.max().isnan()):  # neither has a NaN, nor two infinities at one place
        return _difference(passes.logical_not_(), error, limit, got, expected)
    same = (got == expected) | (torch.isnan(got) & torch.isnan(expected))
    # A NaN is worse than any number: it is what the message should name.
    nans = int(torch.isnan(got).sum())
    return _difference(~(passes | same), torch.nan_to_num(error, nan=float("inf")), limit, got, expected, nans)


def _wide_enough(tensor: torch.Tensor) -> torch.Tensor:
    """Half precision and narrower can't hold small tolerances."""
    return tensor.float() if tensor.dtype in HALF or tensor.dtype.itemsize == 1 else tensor


def _difference(
    wrong: torch.Tensor,
    error: torch.Tensor,
    limit: torch.Tensor,
    got: torch.Tensor,
    expected: torch.Tensor,
    nans: int = 0,
) -> Difference:
    count = int(wrong.sum())
    if count == 0:
        return Difference(0, expected.numel(), 0.0, 0.0)
    place = int(torch.where(wrong, error, -1.0).flatten().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), expected.shape))
    return Difference(
        count,
        expected.numel(),
        float(error.flatten()[place]),
        float(limit.flatten()[place]),
        index,
        float(got.flatten()[place]),
        float(expected.flatten()[place]),
        nans,
    )
