"""Comparing a candidate's output with the reference's: pure functions of tensors.

The tolerance of an element is the largest of

* KernelBench's default, `1e-4 + 1e-4·|expected|` in fp32 (1e-2 in half precision), whose absolute part
  follows the scale of
  the outputs: tiny outputs get a tighter one (so that zeros do not pass), large inputs a looser one;
* four times the error of the reference itself against its fp64 run, as an honest implementation errs as much.

NaN fails unless the reference has it at the same place.
"""

from __future__ import annotations

import msgspec
import torch

_HALF = (torch.float16, torch.bfloat16)


class Tolerance(msgspec.Struct, frozen=True):
    relative: float
    absolute: float
    honest: float = 0.0
    """Four times the reference's own error against fp64, largest over the output."""


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


def tolerance(expected: torch.Tensor, wide: torch.Tensor | None, nominal_scale: float) -> Tolerance:
    """From one expected output, its fp64 version (None where there is none) and the scale of the nominal output."""
    base = 1e-2 if expected.dtype in _HALF else 1e-4
    scale, nominal = output_scale(expected), max(nominal_scale, 1e-30)
    absolute = base * min(1.0, nominal) * min(max(scale / nominal, 1e-2), 1e6)
    honest = 0.0
    if wide is not None and wide.shape == expected.shape:
        error = (expected.double() - wide.double()).abs()
        finite = error[torch.isfinite(error)]
        honest = 4.0 * float(finite.max()) if finite.numel() else 0.0
    return Tolerance(base, absolute, honest)


def output_scale(tensor: torch.Tensor) -> float:
    """Largest finite magnitude; 0 for an empty or integer tensor."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0.0
    low, high = torch.aminmax(tensor)
    scale = max(abs(float(low)), abs(float(high)))
    if scale < float("inf"):
        return scale
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def difference(got: torch.Tensor, expected: torch.Tensor, allowed: Tolerance) -> Difference:
    """Compare two tensors of one shape and dtype. Integers and booleans must be equal."""
    total = expected.numel()
    if total == 0:
        return Difference(0, 0, 0.0, 0.0)
    if not expected.is_floating_point():
        wrong = got != expected
        error = (got.double() - expected.double()).abs()
        return _difference(wrong, error, torch.zeros_like(error), got, expected)
    error = (got - expected).abs()
    limit = (expected.abs() * allowed.relative + allowed.absolute).clamp_(min=allowed.honest)
    passes = error <= limit
    if bool(passes.all()):
        worst = int(error.argmax())
        return Difference(0, total, float(error.flatten()[worst]), float(limit.flatten()[worst]))
    same = (got == expected) | (torch.isnan(got) & torch.isnan(expected))
    return _difference(~(passes | same), error, limit, got, expected)


def _difference(
    wrong: torch.Tensor, error: torch.Tensor, limit: torch.Tensor, got: torch.Tensor, expected: torch.Tensor
) -> Difference:
    count = int(wrong.sum())
    if count == 0:
        return Difference(0, expected.numel(), 0.0, 0.0)
    # A NaN is worse than any number: it is what the message should name.
    excess = torch.where(wrong, torch.nan_to_num(error, nan=float("inf")), torch.full_like(error, -1.0)).flatten()
    place = int(excess.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), expected.shape))
    nans = int(torch.isnan(got).sum()) if got.is_floating_point() else 0
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
