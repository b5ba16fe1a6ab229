"""A policy's weights sharded over ranks by FSDP2: each holds a share, and gathers a layer to compute it.

::

    rank 0   ¼ of every layer ─┐  layer n: gather ─▶ whole ─▶ forward or backward ─▶ ¼ again
    rank 1   ¼ of every layer ─┴─ …

Invariants
* All ranks make the same passes in the same order: a pass that one rank makes alone never ends. Who has fewer
  microbatches makes idle passes; what rank 0 computes between updates, the others compute with it.
* Between passes every rank holds its share and no more.
* Adapters stay whole on every rank: optimizer, checkpoints and versions know nothing of this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from kbrl_async.errors import ConfigError
from kbrl_async.learning.distributed.process_group import ProcessGroup
from kbrl_async.learning.policies.models import causal_lm, is_lora

Result = TypeVar("Result")


class ShardedModel:
    """The only way to compute with a sharded model: `sharded(lambda causal_lm: …)`, on every rank."""

    def __init__(self, model: torch.nn.Module, ranks: ProcessGroup) -> None:
        """Shards the frozen weights of `model`, which every rank has loaded alike, on the host or on its device."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if not is_lora(model):
            raise ConfigError(
                "only frozen weights are sharded over ranks, and this policy has none", "Add lora_rank=32"
            )
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        adapters = {p for p in model.parameters() if p.requires_grad}
        inner = causal_lm(model)
        self._ranks, self._whole = ranks, _Whole(inner)
        # For the outermost, too: saving an adapter gives shares back, and rank 0 alone would gather once more after it.
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": adapters, "reshard_after_forward": True}
        for layer in inner.get_decoder().layers:  # type: ignore[operator]
            fully_shard(layer, **options)
        fully_shard(self._whole, **options)
        for parameter in adapters:
            parameter.data = parameter.data.to(ranks.device)

    def __call__(self, compute: Callable[[torch.nn.Module], Result]) -> Result:
        """`compute` of the causal LM, inside which all its weights are there."""
        result: Result = self._whole(compute)
        return result

    def passes(self, mine: int) -> int:
        """How many passes this rank has to make, if it needs `mine`."""
        return self._ranks.most(mine)


class _Whole(torch.nn.Module):
    """Gives FSDP a forward pass around whatever is computed, the head's product included."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, compute: Callable[[torch.nn.Module], Any]) -> Any:
        return compute(self.inner)
