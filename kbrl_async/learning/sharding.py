"""A policy's weights spread over the ranks of a team by FSDP2: each holds a share, and a layer's rest while it computes it.

::

    rank 0   ¼ of every layer ─┐  layer n: gather ─▶ whole ─▶ forward or backward ─▶ ¼ again
    rank 1   ¼ of every layer ─┴─ …

Invariants
* All ranks make the same passes in the same order: a pass that one rank makes alone never ends. Who has fewer
  microbatches makes idle passes; what rank 0 computes between updates, the others compute with it.
* Between passes every rank holds its share and no more.
* Adapters stay whole on every rank. Without adapters all weights are trained, and with them their gradients and Adam's
  moments are spread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from kbrl_async.learning.models import causal_lm, is_lora

if TYPE_CHECKING:
    from kbrl_async.learning.team import Team

Result = TypeVar("Result")


class Spread:
    """The only way to compute with a spread model: `spread(lambda causal_lm: …)`, on every rank."""

    def __init__(self, model: torch.nn.Module, team: Team) -> None:
        """Spreads `model`, which every rank has loaded alike, on the host or on its device."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(team.device.type, (team.size,))
        adapters = {p for p in model.parameters() if p.requires_grad} if is_lora(model) else set()
        inner = causal_lm(model)
        self._team, self._whole = team, _Whole(inner)
        # Forced for the outermost, too: a rank that saves its adapter would otherwise gather at other times than others.
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": adapters, "reshard_after_forward": True}
        for layer in inner.get_decoder().layers:  # type: ignore[operator]
            fully_shard(layer, **options)
        fully_shard(self._whole, **options)
        for parameter in adapters:
            parameter.data = parameter.data.to(team.device)

    def __call__(self, compute: Callable[[torch.nn.Module], Result]) -> Result:
        """`compute` of the causal LM, inside which all its weights are there."""
        result: Result = self._whole(compute)
        return result

    def passes(self, mine: int) -> int:
        """How many passes this rank has to make, if it needs `mine`."""
        return self._team.most(mine)


class _Whole(torch.nn.Module):
    """Gives FSDP a forward pass around whatever is computed, the head's product included."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, compute: Callable[[torch.nn.Module], Any]) -> Any:
        return compute(self.inner)


def is_share(tensor: torch.Tensor | None) -> TypeGuard[DTensor]:
    """This rank's part of a spread tensor."""
    return isinstance(tensor, DTensor)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor; of a spread one every rank must ask."""
    return tensor.full_tensor() if is_share(tensor) else tensor


@torch.no_grad()
def scatter(target: torch.Tensor, content: torch.Tensor | None) -> None:
    """Rank 0's `content` into every rank's share of `target`. All ranks call it."""
    assert is_share(target)
    mesh = target.device_mesh
    whole = torch.empty(target.shape, dtype=target.dtype, device=mesh.device_type) if content is None else content
    target.copy_(distribute_tensor(whole.to(mesh.device_type, target.dtype), mesh, target.placements))
