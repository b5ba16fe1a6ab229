"""How much of a forward pass can be kept for the backward pass, by estimate: the less is computed again the better.

Elements a token and layer, with H hidden, I intermediate, Q and K the widths of q and of k and v together, R what head
norms are taken of (Qwen3: Q + K, else 0), and the itemsize of what is computed with::

    path       lean (MLP again)        full           bare (layer again)
    fused      2H + 2Q + K + R         lean + 2I      H       LoRA by hand
    modules    4H + 2Q + K + R         lean + 3I      H       fused kernels in the modules
    plain      11H + 4Q + 2K + 2R      lean + 4I      2H      norms, rotation and what goes on in fp32

The first two are what autograd was seen to keep, to 5 %; the last holds for bf16 and families like these. For the pass
as a whole come, a token: `workspace` of one layer's backward pass, one layer more (`full`) while a layer is computed
again, its MLP (`full − lean`) while that is, `SLACK`, and the head's chunks (`logprobs`). With activations on the host
`bare` is 0. `python -m benchmarks.learner` prints peaks to hold against it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

MOMENT_BLOCK = 256
"""Numbers that share a scale where moments are kept in 8 bits."""
PACKED_MOMENTS = 2 * (1 + 4 / MOMENT_BLOCK)
"""Bytes of both moments of a number then."""

SLACK = 3e8
"""Bytes for what no estimate knows: cuBLAS workspaces, plans of attention, small tensors."""
Path = Literal["fused", "modules", "plain"]


class DecoderShape(NamedTuple):
    """Of a decoder, in elements; its properties are bytes a token and layer."""

    layers: int
    hidden: int
    intermediate: int
    query: int
    """Heads times their dimension."""
    key_value: int
    """k and v heads together, times their dimension."""
    itemsize: int
    has_head_norms: bool = False
    path: Path = "fused"
    on_host: bool = False
    """Inputs of layers that are computed again wait on the host."""

    @property
    def lean(self) -> int:
        h, q, k = self.hidden, self.query, self.key_value
        raw = q + k if self.has_head_norms else 0
        kept = {
            "fused": 2 * h + 2 * q + k + raw,
            "modules": 4 * h + 2 * q + k + raw,
            "plain": 11 * h + 4 * q + 2 * k + 2 * raw,
        }
        return kept[self.path] * self.itemsize

    @property
    def full(self) -> int:
        of_mlp = {"fused": 2, "modules": 3, "plain": 4}
        return self.lean + of_mlp[self.path] * self.intermediate * self.itemsize

    @property
    def bare(self) -> int:
        return 0 if self.on_host else self.hidden * self.itemsize * (2 if self.path == "plain" else 1)

    @property
    def workspace(self) -> int:
        """Of one layer's backward pass, a token: the gradient of silu(gate) · up, and of what is as wide as x."""
        return (self.intermediate + 6 * self.hidden + 2 * self.query) * self.itemsize


def shape_of(config: Any, itemsize: int, path: Path, on_host: bool = False) -> DecoderShape:
    """By a config of transformers; a mixture of experts computes `num_experts_per_tok` of them for a token."""
    depth, heads = head_depth(config), config.num_attention_heads
    return DecoderShape(
        config.num_hidden_layers,
        config.hidden_size,
        mlp_width(config),
        heads * depth,
        2 * (getattr(config, "num_key_value_heads", None) or heads) * depth,
        itemsize,
        str(getattr(config, "model_type", "")).startswith("qwen3"),
        path,
        on_host,
    )


def head_depth(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def mlp_width(config: Any) -> int:
    """Of all that a token goes through."""
    width = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None)
    return int(experts * getattr(config, "moe_intermediate_size", width) if experts else width)


class MemoryPlan(NamedTuple):
    kept: int
    """Layers that keep everything."""
    whole: int
    """Layers that keep all but the MLP, those of `kept` among them; the others keep their input only."""


def logits_at_once(*, on_gpu: bool) -> int:
    """Most logits that exist at once, in numbers: a GPU's matrix products want long chunks."""
    return 1 << (27 if on_gpu else 24)


class ActivationRoom:
    """Bytes that activations may take. Estimates are off by some per cent: a pass that is seen to lift the process's
    peak above its limit leaves that much less for those after it.
    """

    def __init__(self, limit: float, taken: float, peak: Callable[[], float] = lambda: 0.0) -> None:
        """`limit` of the process, of which `taken` is not for activations; `peak`: the most that it held so far."""
        self.bytes, self._limit, self._peak = limit - taken, limit, peak

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around forward and backward passes."""
        before = max(self._peak(), self._limit)
        yield
        self.bytes -= max(0.0, self._peak() - before)


def planned(mode: str, shape: DecoderShape, tokens: int, room: float) -> MemoryPlan:
    """What `learner.activation_checkpointing` asks for; `auto`: the most that fits."""
    fixed = {
        "none": MemoryPlan(shape.layers, shape.layers),
        "selective": MemoryPlan(0, shape.layers),
        "full": MemoryPlan(0, 0),
    }
    return fixed[mode] if mode in fixed else plan(shape, tokens, room)


def plan(shape: DecoderShape, tokens: int, room: float) -> MemoryPlan:
    """The most that fits into `room` bytes; `MemoryPlan(0, 0)` where not even that does: it is the least there is."""
    n = shape.layers
    if activation_bytes(shape, tokens, MemoryPlan(n, n)) <= room:
        return MemoryPlan(n, n)
    left = room - activation_bytes(shape, tokens, MemoryPlan(0, n))
    if left >= 0:
        return MemoryPlan(min(n - 1, int(left / (tokens * (shape.full - shape.lean)))), n)
    left = room - activation_bytes(shape, tokens, MemoryPlan(0, 0))
    return MemoryPlan(0, max(0, min(n - 1, int(left / (tokens * (shape.lean - shape.bare))))))


def activation_bytes(shape: DecoderShape, tokens: int, chosen: MemoryPlan) -> float:
    """Of a microbatch, at its peak, without the head: what `plan` holds against the room."""
    n = shape.layers
    held = chosen.kept * shape.full + (chosen.whole - chosen.kept) * shape.lean + (n - chosen.whole) * shape.bare
    again = shape.full if chosen.whole < n else shape.full - shape.lean if chosen.kept < n else 0
    return SLACK + tokens * (shape.workspace + held + again)
