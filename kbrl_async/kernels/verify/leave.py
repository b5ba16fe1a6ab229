"""What lower precision that a problem declares allows: how far its reference moves, simulated, and half as much more.

An element may be off by that much of the farthest one; and all of an output by that much of its root mean square. The
latter is what tells one precision from the next, and work that is left out: 4 % of an output's spread for fp8, 13 to
20 % for four bits, 71 % for half of the products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

from kbrl_async.kernels.verify.compare import rms
from kbrl_async.kernels.verify.pieces import countable, pieces
from kbrl_async.kernels.verify.tolerance import Tolerance, largest_error

_FACTOR, _FEW = 1.5, 4.0
"""Times what was simulated, and more where few elements tell little: one and four roots of their number."""
_SHARE = 0.5
"""Of an output's deviation: beyond it a constant is about as near."""
_ROUNDED = 2.0**-8
"""Of each element: what is not multiplied may be rounded to bfloat16, twice."""
_MANY = 1 << 10
"""Elements that tell enough in one simulation."""


class Moved(msgspec.Struct, frozen=True):
    """How far one output is from the reference's."""

    largest: float
    mean_square: float


def is_few(outputs: Sequence[torch.Tensor]) -> bool:
    return any(one.is_floating_point() and 0 < one.numel() < _MANY for one in outputs)


def moved(expected: torch.Tensor, other: torch.Tensor) -> Moved:
    if not expected.is_floating_point() or expected.numel() == 0 or expected.shape != other.shape:
        return Moved(0.0, 0.0)
    return Moved(largest_error(expected, other), rms(expected, other) ** 2)


def allowed(found: Tolerance, expected: torch.Tensor, seen: Sequence[Moved], *, rounds: bool = True) -> Tolerance:
    """`found`, and the room that simulations need. `seen`: one for each. `rounds`: what is multiplied is no wider than
    bfloat16, so all else may be rounded to that.
    """
    count = expected.numel()
    if not seen or not expected.is_floating_point() or count == 0:
        return found
    room = _FACTOR * (1 + _FEW / math.sqrt(count))
    size, spread = _root(expected), _deviation(expected)
    relative = max(found.relative, _ROUNDED if rounds else 0.0)
    whole = room * math.sqrt(sum(one.mean_square for one in seen) / len(seen))
    least = max(found.absolute + relative * size, found.honest)
    return msgspec.structs.replace(
        found,
        relative=relative,
        honest=max(found.honest, room * max(one.largest for one in seen)),
        spread=max(least, min(whole, _SHARE * spread)),
        ill=found.ill or whole > max(least, _SHARE * spread),
    )


def _root(expected: torch.Tensor) -> float:
    return rms(expected, torch.zeros((), dtype=expected.dtype, device=expected.device).expand_as(expected))


def _deviation(expected: torch.Tensor) -> float:
    """Of one value alone, its size."""
    if expected.numel() == 1:
        return _root(expected)
    mean = sum(float(countable(part).double().nan_to_num_(0.0, 0.0, 0.0).sum()) for (part,) in pieces(expected))
    mean /= expected.numel()
    total = sum(
        float((countable(part).double().nan_to_num_(0.0, 0.0, 0.0) - mean).square_().sum())
        for (part,) in pieces(expected)
    )
    return math.sqrt(total / expected.numel())
