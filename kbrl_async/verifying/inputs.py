"""Secret input sets, made from what the problem's own `get_inputs` draws: pure functions of tensors and a generator.

A set keeps what its problem may rely on: integers and 0/1 masks stay as they are, inputs that are never
negative stay so.
Timed calls get convex mixtures of two secret draws, which keep every convex property (positive, in [0, 1], triangular,
symmetric, rows that sum to 1) and cost one pass over memory.
"""

from __future__ import annotations

import random

import msgspec
import torch


class Kind(msgspec.Struct, frozen=True):
    """One variation of the nominal inputs."""

    name: str
    scale: float = 1.0
    flip: bool = False


KINDS = (
    Kind("nominal"),
    Kind("nominal"),
    Kind("small", 1e-2),
    Kind("large", 8.0),
    Kind("negated", 1.0, True),
)


def is_continuous(tensor: torch.Tensor) -> bool:
    """Floating point, and not a mask, class label or count in disguise."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return False
    return not bool((tensor == tensor.round()).all())


def vary(tensors: list[torch.Tensor], kind: Kind, rng: random.Random) -> list[torch.Tensor]:
    """The inputs of a set, from one nominal draw. `flip` negates signed inputs and thins out the others."""
    if kind.scale == 1.0 and not kind.flip:
        return [tensor.clone() for tensor in tensors]
    varied = []
    for tensor in tensors:
        changed = tensor.clone()
        if is_continuous(tensor):
            changed.mul_(kind.scale)
            if kind.flip and bool((tensor < 0).any()):
                changed.neg_()
            elif kind.flip:
                generator = torch.Generator().manual_seed(rng.getrandbits(63))
                changed.mul_(torch.rand(changed.shape, generator=generator) < 0.25)
        varied.append(changed)
    return varied


class Pool:
    """Secret draws that timed calls are mixed from. `tensors[k][i]` is input *i* of draw *k*, as one flat block."""

    def __init__(self, draws: list[list[torch.Tensor]]) -> None:
        assert len(draws) >= 2, "mixing needs two draws"
        self._draws = draws
        self._continuous = [all(is_continuous(draw[i]) for draw in draws) for i in range(len(draws[0]))]

    def mix(self, outs: list[list[torch.Tensor]], rng: random.Random) -> None:
        """Write one fresh set into each of `outs`: the same values in all of them."""
        first, second = rng.sample(range(len(self._draws)), 2)
        weight = rng.uniform(0.2, 0.8)
        for i, continuous in enumerate(self._continuous):
            a, b = self._draws[first][i], self._draws[second][i]
            if continuous:
                torch.lerp(a, b, weight, out=outs[0][i])
            else:
                outs[0][i].copy_(a)
            for out in outs[1:]:
                out[i].copy_(outs[0][i])
