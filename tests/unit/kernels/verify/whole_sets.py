"""How sets were made before they were made by parts: the same values, with several times the memory."""

from __future__ import annotations

import random

import torch

from kbrl_async.kernels.verify.fresh import SecretWeights, Structure
from kbrl_async.kernels.verify.inputs import KINDS, NOMINAL, Kind, is_continuous, is_distribution

_SAMPLE, _NEAR_ZERO, _COARSE = 1 << 16, 1e-2, 2.0**-9


def vary(tensors: list[torch.Tensor], kind: Kind, rng: random.Random) -> list[torch.Tensor]:
    factor = kind.scale if kind.scale_to <= kind.scale else rng.uniform(kind.scale, kind.scale_to)
    seed = rng.getrandbits(63)
    return [
        tensor
        if not is_continuous(tensor) or kind in (NOMINAL, KINDS[-1]) or is_distribution(tensor)
        else _shaped(tensor, kind, seed).mul_(factor)
        for tensor in tensors
    ]


def _shaped(tensor: torch.Tensor, kind: Kind, seed: int) -> torch.Tensor:
    changed = _changed(tensor, kind, seed)
    magnitude = tensor.abs()
    least, most = (float(end) for end in magnitude.aminmax())
    if least > _NEAR_ZERO * most and kind.shape != "graded":
        nearer = magnitude.add_(least).mul_(0.5).copysign_(tensor)
        torch.where(changed == 0, nearer, changed, out=changed)
    return changed


def _changed(tensor: torch.Tensor, kind: Kind, seed: int) -> torch.Tensor:
    changed = tensor.clone()
    if kind.shape == "spikes":
        magnitude = tensor.abs()
        return changed.mul_(magnitude >= _quantile(magnitude, 0.9))
    if kind.shape == "binary":
        changed.copy_((tensor > _quantile(tensor, 0.5)) & (tensor != 0))
        return changed if bool((tensor > 0).any()) else changed.neg_()
    if kind.shape == "graded":
        return _grade(changed)
    if kind.flip and bool((tensor < 0).any()) and bool((tensor > 0).any()):
        return changed.neg_()
    if kind.flip:
        generator = torch.Generator(tensor.device).manual_seed(seed)
        return changed.mul_(torch.rand(tensor.shape, generator=generator, device=tensor.device) < 0.25)
    return changed


def _quantile(tensor: torch.Tensor, share: float) -> torch.Tensor:
    sample = tensor.flatten()[:: max(1, tensor.numel() // _SAMPLE)].float()
    return sample.sort().values[int(share * (sample.numel() - 1))]


def _grade(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    ramp = torch.linspace(0.1, 4.0, tensor.shape[-1], device=tensor.device).to(tensor.dtype)
    if tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2]:
        ramp = ramp.unsqueeze(-1) * ramp
    return tensor.mul_(ramp)


def moved(tensors: list[torch.Tensor], rng: random.Random, coarse: bool = False) -> list[torch.Tensor]:
    out = []
    for tensor in tensors:
        changed = tensor.clone()
        is_wide = tensor.dtype.itemsize >= 4
        if is_continuous(tensor) and (is_wide or coarse):
            generator = torch.Generator(tensor.device).manual_seed(rng.getrandbits(63))
            steps = torch.randint(-1, 2, tensor.shape, generator=generator, device=tensor.device, dtype=torch.int8)
            changed.addcmul_(
                tensor, steps.to(tensor.dtype), value=_COARSE if coarse and is_wide else torch.finfo(tensor.dtype).eps
            )
        out.append(changed)
    return out


def blend(
    a: torch.Tensor,
    b: torch.Tensor,
    structure: Structure,
    is_number: bool,
    weights: SecretWeights,
    rng: random.Random,
    chunk: int,
) -> torch.Tensor:
    """In memory of its own."""
    out = torch.empty_like(a)
    if structure == "each":
        flat = [one.as_strided((one.numel(),), (1,)) for one in (a, b, out)]
        for begin in range(0, a.numel(), chunk):
            x, y, target = (one[begin : begin + chunk] for one in flat)
            window = weights.window(x.numel(), x.dtype if is_number else torch.bool, rng)
            torch.lerp(x, y, window, out=target) if is_number else torch.where(window, x, y, out=target)
        return out
    if structure == "turned":
        shifts = [rng.randrange(size) for size in a.shape]
        if a.dim() >= 2 and a.shape[-1] == a.shape[-2]:
            shifts[-1] = shifts[-2]
        a = a.roll(shifts, tuple(range(a.dim())))
    return torch.lerp(a, b, rng.uniform(0.2, 0.8)) if structure != "fixed" and is_number else out.copy_(a)
