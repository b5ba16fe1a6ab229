"""What lower precision that a problem declares allows: how far its reference moves, simulated, and half as much more.

An element may be off by that much of the farthest one; and all of an output by that much of its root mean square. The
latter is what tells one precision from the next, and work that is left out: 4 % of an output's spread for fp8, 13 to
20 % for four bits, 71 % for half of the products.

The same where a problem's own inputs make the library's ordinary rounding that large: a hundred layers, each behind a
normalisation, on a GPU whose convolutions round to TF32. There the reference in fp64 takes the simulation's place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec
import torch

from kbrl_async.kernels.verify.compare import bands, rms
from kbrl_async.kernels.verify.pieces import countable, pieces
from kbrl_async.kernels.verify.tolerance import HONEST_FACTOR, Tolerance, is_noise, largest_error

_FACTOR, _FEW = 1.5, 4.0
"""Times what was simulated, and more where few elements tell little: one and four roots of their number."""
_OF_BAND = 4.0
"""The same of one band, whose rows may be off by one common rounding error."""
_SHARE = 0.5
"""Of an output's deviation: beyond it a constant is about as near."""
_ROUNDED = 2.0**-8
"""Of each element: what is not multiplied may be rounded to bfloat16, twice."""
_WHOLE = ("int8", "int4")
"""One scale for all, as some kernels have it, leaves nothing of rows that are small beside others."""
_MANY = 1 << 10
"""Elements that tell enough in one simulation."""
_SECOND = 3.0
"""Times the reference's own distance from fp64, of all of an output: another's adds to it, and differs."""


class Moved(msgspec.Struct, frozen=True):
    """How far one output is from the reference's."""

    largest: float
    mean_square: float
    by_band: tuple[float, ...] = ()
    """The same of each band."""
    overflows: bool = False
    """What was a number is none."""


def is_few(outputs: Sequence[torch.Tensor]) -> bool:
    return any(one.is_floating_point() and 0 < one.numel() < _MANY for one in outputs)


def moved(expected: torch.Tensor, other: torch.Tensor) -> Moved:
    if not expected.is_floating_point() or expected.numel() == 0 or expected.shape != other.shape:
        return Moved(0.0, 0.0)
    by_band = tuple(rms(*both) ** 2 for both in zip(bands(expected), bands(other), strict=True))
    overflows = any(bool((one.isfinite() & ~two.isfinite()).any()) for one, two in pieces(expected, other))
    return Moved(largest_error(expected, other), rms(expected, other) ** 2, by_band, overflows)


def allowed(
    found: Tolerance, expected: torch.Tensor, seen: Sequence[Moved], precision: str, is_binary: bool = False
) -> Tolerance:
    """`found`, and the room that simulations need. `seen`: one for each. `is_binary`: the inputs are {0, 1}, and
    whatever is not exact then is rounded alike.
    """
    count = expected.numel()
    if not seen or not expected.is_floating_point() or count == 0:
        return found
    relative = max(found.relative, 0.0 if precision == "tf32" else _ROUNDED)
    least = _least(found, relative, expected)
    room, most = _room(count) * (2 if is_binary else 1), _SHARE * _deviation(expected)
    whole = room * _root_mean([one.mean_square for one in seen])
    is_even = precision in _WHOLE or is_binary
    return msgspec.structs.replace(
        found,
        relative=relative,
        honest=max(found.honest, room * max(one.largest for one in seen)),
        spread=max(least, min(whole, most)),
        by_band=() if is_even else tuple(_of_bands(found, relative, expected, seen)),
        elements=count,
        ill=found.ill or whole > max(least, most) or any(one.overflows for one in seen),
    )


def as_drawn(found: Tolerance, expected: torch.Tensor, wide: torch.Tensor, is_simulated: bool = False) -> Tolerance:
    """`found`, where an honest error was cut on inputs as the problem draws them. `wide`: the output in fp64.
    `is_simulated`: what the problem declares is (`allowed`).

    Nothing but rounding errors tells nothing, and refuses nobody. Else an element may be off by four times the largest
    error that the reference itself makes, and all of them together by three times its root mean square, as long as a
    constant is farther away. Who was right by each element before is right still.
    """
    if not found.ill or wide.shape != expected.shape:
        return found
    if is_noise(expected, wide):
        return msgspec.structs.replace(found, honest=found.uncut)
    whole = _SECOND * rms(expected, wide)
    if is_simulated or whole > _SHARE * _deviation(expected):
        return found
    honest = max(found.honest, HONEST_FACTOR * largest_error(expected, wide))
    return msgspec.structs.replace(found, honest=honest, spread=max(_least(found, found.relative, expected), whole))


def together(drawn: Sequence[Sequence[Tolerance]]) -> list[list[Tolerance]]:
    """Of each set that is as the problem draws it, for each output: all have the widest room that `as_drawn` found.
    Where an output jumps, as behind a maximum of equals, it is chance in which draw the reference shows that.
    """
    wide = [[one for one in each if one.spread < math.inf] for each in zip(*drawn, strict=True)]
    return [[_as_wide(one, shown) for one, shown in zip(each, wide, strict=True)] for each in drawn]


def _as_wide(found: Tolerance, shown: Sequence[Tolerance]) -> Tolerance:
    if found.exact or not shown:
        return found
    so_far = found.honest if found.spread == math.inf else found.spread
    spread = max(so_far, *(one.spread for one in shown))
    return msgspec.structs.replace(found, honest=max(found.honest, *(one.honest for one in shown)), spread=spread)


def _of_bands(found: Tolerance, relative: float, expected: torch.Tensor, seen: Sequence[Moved]) -> Iterator[float]:
    for number, band in enumerate(bands(expected)):
        squares = [one.by_band[number] for one in seen if one.by_band]
        yield max(_least(found, relative, band), _OF_BAND * _root_mean(squares))


def _room(count: int) -> float:
    return _FACTOR * (1 + _FEW / math.sqrt(count))


def _root_mean(squares: Sequence[float]) -> float:
    return math.sqrt(sum(squares) / max(1, len(squares)))


def _least(found: Tolerance, relative: float, expected: torch.Tensor) -> float:
    """What each element may be off by in any case."""
    return max(found.absolute + relative * _root(expected), found.honest)


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
