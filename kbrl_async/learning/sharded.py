"""A policy's weights sharded over ranks by FSDP2: each holds a share, and gathers a layer to compute it.

::

    rank 0   ¼ of every layer ─┐  layer n: gather ─▶ whole ─▶ forward or backward ─▶ gradients summed ─▶ ¼ again
    rank 1   ¼ of every layer ─┴─ …

Invariants
* All ranks make the same passes in the same order: who has fewer microbatches makes idle passes.
* Between passes every rank holds its share of weights, gradients and moments, and no more. Where the weights come from
  files, it never holds more than that and one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from kbrl_async.learning.distributed import ProcessGroup
from kbrl_async.learning.policies.models import causal_lm
from kbrl_async.learning.policies.streaming import Source, materialise

Result = TypeVar("Result")


class ShardedModel:
    """The only way to compute with such a model: `sharded(lambda causal_lm: …)`, on every rank."""

    def __init__(
        self,
        model: torch.nn.Module,
        ranks: ProcessGroup,
        *,
        arithmetic: torch.dtype | None = None,
        offload: bool,
        source: Source | None = None,
    ) -> None:
        """Shards `model`, which every rank has made alike: on the host, on its device, or without any weights, which
        `source` gives layer by layer.

        `arithmetic`: what weights are gathered as; None: as they are held. Gradients are summed in fp32. `offload`: the
        shares stay on the host, where the optimizer then computes.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

        inner = causal_lm(model)
        self._ranks, self._model, self._whole = ranks, model, _Whole(inner)
        options: dict[str, Any] = {
            "mesh": init_device_mesh(ranks.device.type, (ranks.size,)),
            # For the outermost, too: what comes after a pass finds shares, and gathers by itself.
            "reshard_after_forward": True,
        }
        if arithmetic is not None:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=arithmetic, reduce_dtype=torch.float32)
        if offload and ranks.device.type == "cuda":
            options["offload_policy"] = CPUOffloadPolicy()
        for layer in inner.get_decoder().layers:  # type: ignore[operator]
            materialise(inner, layer, ranks.device, source)
            fully_shard(layer, **options)
        materialise(inner, inner, ranks.device, source)
        fully_shard(self._whole, **options)
        for module in self._whole.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # a sum: the loss is weighted over all ranks already
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no other

    def __call__(self, compute: Callable[[torch.nn.Module], Result]) -> Result:
        """`compute` of the causal LM, inside which all its weights are there."""
        result: Result = self._whole(compute)
        return result

    def passes(self, mine: int) -> int:
        """How many passes this rank has to make, if it needs `mine`."""
        return self._ranks.most(mine)

    def gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All trained weights by their names in the model, one whole tensor after the other: all ranks go through them
        together."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, _on(self._ranks.device, parameter).full_tensor()

    def rows(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's of the same weights, a range of each one's first dimension: no rank waits for another."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                held: Any = parameter.detach()
                yield name, held.to_local()


class _Whole(torch.nn.Module):
    """Gives FSDP a forward pass around whatever is computed, the head's product included."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, compute: Callable[[torch.nn.Module], Any]) -> Any:
        return compute(self.inner)


def _on(device: torch.device, share: torch.Tensor) -> DTensor:
    """Gathered over the GPUs' own network, where shares lie on the host."""
    assert isinstance(share, DTensor)
    moved: DTensor = share.detach().to(device)  # type: ignore[assignment]
    return moved
