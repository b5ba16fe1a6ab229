"""Activation checkpointing of any transformers model: which layers are computed again in the backward pass.

::

    none        nothing is computed again
    selective   the MLP of each layer: two thirds of what a layer keeps, a fifth more time
    full        each layer, from its input: a third more time
    auto        as little as the memory allows, layer by layer (`fused.memory.plan`)

Invariants
* A layer is wrapped inside of its `forward`, so hooks of FSDP run around both computations, and gather once for each.
* Nothing depends on training mode: a policy is computed without dropout, as its sampler does.
* The plan stays as it is between a forward pass and its backward pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from kbrl_async.learning.fused.memory import MemoryPlan


def again(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """`forward`, keeping its arguments only."""
    return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **named)


class Recompute:
    """Has the decoder layers of `causal_lm` ask `plan` before each forward pass."""

    def __init__(self, causal_lm: torch.nn.Module, offload: bool) -> None:
        self._offload = offload
        causal_lm.eval()
        layers = decoder_layers(causal_lm)
        self._count = len(layers)
        self.plan = MemoryPlan(self._count, self._count)
        for number, layer in enumerate(layers):
            behind = self._count - number
            if (mlp := getattr(layer, "mlp", None)) is not None:
                mlp.forward = functools.partial(self._mlp, behind, mlp.forward)
            layer.forward = functools.partial(self._layer, behind, mlp is None, layer.forward)

    def _layer(self, behind: int, is_one: bool, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """`is_one`: it has no MLP of its own that could be computed again alone."""
        least = self.plan.kept if is_one else self.plan.whole
        if behind <= least or not torch.is_grad_enabled():
            return forward(*arguments, **named)
        with waiting_on_host(self._offload):
            return again(forward, *arguments, **named)

    def _mlp(self, behind: int, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        # A layer that is computed again keeps all of it then: only those between are halved.
        if self.plan.kept < behind <= self.plan.whole and torch.is_grad_enabled():
            return again(forward, *arguments, **named)
        return forward(*arguments, **named)


def decoder_layers(causal_lm: torch.nn.Module) -> list[Any]:
    """The layers of a causal LM: its longest list of modules."""
    lists = [m for m in causal_lm.modules() if isinstance(m, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


# ── activations on the host ─────────────────────────────────────────────────────────────────────────────────────

LEAST_OFFLOADED = 1 << 20
"""Elements: what is smaller (rotations, masks) stays, a copy of its own would cost more than it frees."""


def waiting_on_host(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """What autograd keeps of the calls inside waits in pinned memory of the host; nothing changes on a CPU.

    Copied on a stream of its own, so the layers behind it don't wait; brought back when its backward pass asks.
    """
    if not wanted:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host)


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _to_host(tensor: torch.Tensor) -> Any:
    if not tensor.is_cuda or tensor.numel() < LEAST_OFFLOADED or isinstance(tensor, torch.nn.Parameter):
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    stream = _copying(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        host.copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)
    return host, tensor.device


def _from_host(kept: Any) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    host, device = kept
    torch.cuda.current_stream(device).wait_stream(_copying(device))
    back: torch.Tensor = host.to(device, non_blocking=True)
    return back
