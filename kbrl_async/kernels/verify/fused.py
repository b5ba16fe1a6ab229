"""Where a device puts its own way to go over whole tensors in one pass; `compare` and `tolerance` ask it first."""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch


class Allowed(Protocol):
    """What of a `tolerance.Tolerance` a comparison in one pass needs."""

    @property
    def relative(self) -> float: ...
    @property
    def absolute(self) -> float: ...
    @property
    def honest(self) -> float: ...


class Counted(msgspec.Struct, frozen=True):
    """A comparison; `worst` and `worst_wrong` are an error and the number of its element."""

    wrong: int
    nans: int
    worst: tuple[float, int]
    worst_wrong: tuple[float, int] | None
    values: tuple[float, float] | None = None
    """Of both tensors at the place that counts; None: they have to be read."""


class Fused(Protocol):
    """Each gives None for tensors that it has no way for."""

    def difference(self, got: torch.Tensor, expected: torch.Tensor, allowed: Allowed) -> Counted | None:
        """As `compare.difference` says."""
        ...

    def furthest(self, a: torch.Tensor, b: torch.Tensor) -> float | None:
        """The largest finite distance of two elements at one place."""
        ...

    def same(self, a: torch.Tensor, b: torch.Tensor) -> bool | None:
        """Whether two tensors are the same bytes."""
        ...

    def is_all(self, block: torch.Tensor, byte: int) -> bool | None:
        """Whether each byte is this one."""
        ...


known: dict[torch.device, Fused] = {}


def use(device: torch.device, fused: Fused) -> None:
    """From now on, for tensors on this device."""
    known[device] = fused


def of(device: torch.device) -> Fused | None:
    return known.get(device)
