"""Outputs that do not do the work, and how near they come to the right ones: functions of tensors, in little memory."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from kbrl_async.kernels.problems.audit_file import OutputTrial
from kbrl_async.kernels.verify import compare

CHUNK = 1 << 24
"""Elements that are compared at once."""
_HUGE = 1e300


class Fit(msgspec.Struct, frozen=True):
    """How one output compares with the right one."""

    passes: bool
    worst: float
    wrong_share: float


def fit(got: torch.Tensor, expected: torch.Tensor, figure: float) -> Fit:
    """As `torch.allclose` with `equal_nan` and `figure` for both tolerances; `got` may have one element for all."""
    wrong, worst, total = 0, 0.0, expected.numel()
    right, other = expected.flatten(), got.flatten()
    for start in range(0, total, CHUNK):
        want = _comparable(right[start : start + CHUNK])
        have = _comparable(other if other.numel() == 1 else other[start : start + CHUNK])
        same = (have == want) | (have.isnan() & want.isnan())  # infinity is the same as itself, too
        error = torch.where(same, 0.0, (have - want).abs())
        inside = same | (error <= figure + figure * want.abs())
        wrong += int((~inside).sum())
        finite = torch.nan_to_num(error, nan=float("inf"))
        worst = max(worst, float(finite.max())) if finite.numel() else worst
    return Fit(wrong == 0, worst, wrong / total if total else 0.0)


def all_fit(got: list[torch.Tensor], expected: list[torch.Tensor], figure: float) -> Fit:
    """Of several outputs, all must."""
    fits = [fit(a, b, figure) for a, b in zip(got, expected, strict=True)]
    return joined(fits)


def verified(got: list[torch.Tensor], expected: list[torch.Tensor], allowed: Sequence[compare.Tolerance]) -> Fit:
    """As a verdict would compare; what has other than one element or as many as it should is wrong altogether."""
    fits = []
    for tensor, right, tolerance in zip(got, expected, allowed, strict=True):
        whole = tensor.expand(right.numel()) if tensor.numel() == 1 else tensor
        if whole.numel() != right.numel():
            return Fit(False, float("inf"), 1.0)
        found = compare.difference(whole.reshape(right.shape), right, tolerance)
        fits.append(Fit(found.wrong == 0, found.worst, found.wrong / max(1, found.total)))
    return joined(fits)


def joined(fits: list[Fit]) -> Fit:
    return Fit(
        all(f.passes for f in fits),
        max((f.worst for f in fits), default=0.0),
        max((f.wrong_share for f in fits), default=0.0),
    )


def trial(name: str, tolerance: str, fits: list[Fit]) -> OutputTrial:
    """Passes where it passes on every input set, as a candidate has to."""
    best = min(fits, key=lambda f: (f.wrong_share, f.worst))
    passed = sum(f.passes for f in fits)
    return OutputTrial(
        name, tolerance, passed == len(fits), len(fits), passed, _short(best.worst), _short(best.wrong_share)
    )


def _short(value: float) -> float:
    """Four digits are evidence enough; JSON has no infinity."""
    return float(f"{min(value, _HUGE):.4g}")


def zeros(expected: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.new_zeros(1) for tensor in expected]


def constants(seen: list[torch.Tensor]) -> list[torch.Tensor]:
    """The mean of each output that was seen before, everywhere; the commonest value where it is an integer."""
    return [_typical(tensor) for tensor in seen]


def half_rows(expected: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """The first half right, the rest zero; None where there is no half."""
    if any(tensor.numel() < 2 for tensor in expected):
        return None
    halves = []
    for tensor in expected:
        flat = tensor.flatten().clone()
        flat[flat.numel() // 2 :] = 0
        halves.append(flat)
    return halves


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Floating point that torch can add up and look through, which it can't do in types of 8 bits."""
    return tensor if tensor.element_size() > 1 else tensor.float()


def _typical(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        return widened(tensor).mean().reshape(1)
    return tensor.flatten().mode().values.reshape(1)


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.double()
