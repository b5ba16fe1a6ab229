"""Bytes of a learner and of a sampler, part by part. Pure: from a model's shape and how it is held.

What is held through an update adds up with the activations of one microbatch, as gradients are added up over several::

    peak = weights + gradients + moments + (references, casts, gathered layers) + activations + the larger of: loss, one
           layer's backward pass

Sources: two moments a trained weight (Kingma and Ba 2015, "Adam"), mixed precision (Micikevicius et al. 2018), shards
(Rajbhandari et al. 2020, "ZeRO"), recomputation (Chen et al. 2016, "Training deep nets with sublinear memory cost").
What a layer saves was counted by autograd's own hooks over models of eight widths; a test counts it again.

Suffix of names: bytes, unless something else is said. GB is 10^9 bytes.
"""

from __future__ import annotations

import enum
import math

import msgspec

from kbrl_async.learning.fused import memory
from kbrl_async.shapes import ModelShape

GB = 1e9
FP32, BF16 = 4, 2
CONTEXT = 0.6e9
"""Of CUDA and its libraries in one process (0.5 to 0.7 on H100 and H200)."""
HELD = {"bf16": 2.0, "fp32": 4.0, "int8": 1.03, "nf4": 0.53}
"""Of a frozen weight, with the scales of its blocks (Dettmers et al. 2023, "QLoRA")."""


class Recomputed(enum.StrEnum):
    """What the backward pass computes once more instead of finding it kept."""

    NONE = "none"
    SELECTIVE = "selective"
    """Each gated block, the widest of a layer."""
    FULL = "full"
    """Every layer from its input."""
    AUTO = "auto"
    """As little as there is room for."""


class Footprint(msgspec.Struct, frozen=True):
    """One process's memory."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        return math.fsum(self.parts.values())

    @property
    def largest(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])

    def gb(self, name: str) -> float:
        return self.parts.get(name, 0.0) / GB


class LearnerSizing(msgspec.Struct, frozen=True, kw_only=True):
    """How a policy is held and trained."""

    tokens: int
    """Of one microbatch, padding included."""
    scored: int = 0
    """Tokens of it that have a loss; 0: all."""
    rank: int = 0
    """Of the LoRA adapter; 0: all weights are trained."""
    adapters: int = 1
    eight_bit: bool = False
    """Moments of matrices take a byte each (`learning.eight_bit`)."""
    held: str = "fp32"
    """How weights stand in memory, a key of `HELD`; gradients and moments of all weights stand like them."""
    bf16: bool = True
    """Forward and backward pass compute in bf16."""
    path: memory.Path = "plain"
    """What computes: the model's own modules (plain), with fused kernels in them, or the fused decoder."""
    inputs_on_host: bool = False
    """Inputs of layers that are computed again wait on the host."""
    recomputed: Recomputed = Recomputed.NONE
    ranks: int = 1
    sharded: bool = False
    """Weights, gradients and moments are shared out over the ranks (FSDP2); a layer is gathered where it is used."""
    autocast: bool = True
    """bf16 is computed by autocast; else weights are gathered in bf16."""
    reference: bool = False
    """A frozen copy of the policy, for a KL penalty."""
    room: float = math.inf
    """Most bytes that the process may hold, where as much is computed again as that takes."""
    on_host: bool = False
    """Shares wait on the host, where the optimizer computes."""
    on_gpu: bool = True

    @property
    def item(self) -> int:
        """Of one number in a pass."""
        return BF16 if self.bf16 else FP32

    @property
    def casts(self) -> bool:
        """bf16 is computed by autocast, from numbers in fp32: each product makes a copy of its input."""
        return self.bf16 and (self.rank > 0 or not self.computes_held_bf16)

    @property
    def computes_held_bf16(self) -> bool:
        """Weights stand in bf16 where they are used, so what layers hand on does, too."""
        return self.held == "bf16" or (self.sharded and self.bf16 and not self.autocast)


def learner(shape: ModelShape, how: LearnerSizing) -> Footprint:
    """Of one rank, at the peak of an update."""
    split = how.ranks if how.sharded else 1
    parts = {"weights": HELD[how.held] * shape.parameters / split}
    item = float(FP32)
    if how.rank:
        trained = how.adapters * shape.adapter(how.rank) / split
        parts["adapter"] = item * trained
    else:
        trained, item = shape.parameters / split, HELD[how.held]
    parts |= {"gradients": item * trained, "moments": _moments(how, item) * trained}
    parts["reference"] = HELD[how.held] * shape.parameters / split if how.reference else 0.0
    if how.on_host:
        parts = {}
    parts["gathered layers"] = _gathered(shape, how) if split > 1 else 0.0
    parts |= _passes(shape, how, held=math.fsum(parts.values()))
    parts["CUDA"] = CONTEXT if how.on_gpu else 0.0
    return Footprint({name: count for name, count in parts.items() if count})


def checkpoint_bytes(shape: ModelShape, how: LearnerSizing) -> float:
    """Of all ranks together: what is trained, and its moments."""
    trained, item = float(shape.parameters), HELD[how.held]
    if how.rank:
        trained, item = how.adapters * shape.adapter(how.rank), FP32
    return (item + _moments(how, item)) * trained


def _moments(how: LearnerSizing, item: float) -> float:
    """Both, of a trained number that takes `item`."""
    return memory.PACKED_MOMENTS if how.eight_bit else 2 * item


def _gathered(shape: ModelShape, how: LearnerSizing) -> float:
    """The layer that is computed, the one that is fetched meanwhile, and what stands around all layers."""
    item = float(BF16) if how.computes_held_bf16 else HELD[how.held]
    return item * (2 * shape.layer + shape.embedding + shape.head)


def _passes(shape: ModelShape, how: LearnerSizing, held: float) -> dict[str, float]:
    """What a forward and backward pass adds to `held`."""
    loss = loss_bytes(shape, how)
    if how.path != "plain":
        # Kept for all layers until the forward pass is over, whatever is computed again.
        copies = _copies(shape, msgspec.structs.replace(how, recomputed=Recomputed.NONE))
        activations = _by_kernels(shape, how, how.room - held - copies - loss)
        return {"activations": activations, "bf16 copies of weights": copies, "loss": loss}
    if how.recomputed is Recomputed.AUTO:
        return _as_fits(shape, how, held)
    everything = layer_bytes(shape, how)
    kept, again = everything, 0.0
    if how.recomputed is Recomputed.FULL:
        kept, again = shape.hidden * (BF16 if how.computes_held_bf16 else FP32), everything
    if how.recomputed is Recomputed.SELECTIVE:
        again = 4.0 * how.item * shape.width
        kept -= again
    last = shape.hidden * (FP32 + _scaled(how) + how.item)
    wide, narrow = (3, 4) if how.bf16 else (1, 2)  # gradients of one layer's products, and their copies
    gradients = how.tokens * (wide * shape.width + narrow * shape.hidden) * how.item
    return {
        "activations": how.tokens * (shape.layers * kept + again + last),
        "bf16 copies of weights": _copies(shape, how),
        "loss": max(loss - how.tokens * again, gradients),  # it is over before the first layer is computed again
    }


def _as_fits(shape: ModelShape, how: LearnerSizing, held: float) -> dict[str, float]:
    """Layer by layer between nothing and all computed again."""
    most, least = (
        _passes(shape, msgspec.structs.replace(how, recomputed=which), held)
        for which in (Recomputed.NONE, Recomputed.FULL)
    )
    over = held + math.fsum(most.values()) - how.room
    if over <= 0:
        return most
    room = most["activations"] - over
    return {**least, "activations": max(least["activations"], min(room, most["activations"]))}


def layer_bytes(shape: ModelShape, how: LearnerSizing) -> float:
    """Of one token, all that a layer of transformers keeps for its backward pass.

    A norm keeps its input in fp32, and what it scales where its weight is trained; a product its input (LoRA: that of
    A); SwiGLU gate, silu(gate), up and their product; attention q, k, v, its output and a number a head.
    """
    item, is_lora = how.item, bool(how.rank)
    inputs = item * (5 if how.casts else 2)  # q k v and gate up: a copy each, or one for all
    attention = item * (2 * shape.query + 2 * shape.key_value) + FP32 * shape.heads
    if is_lora and how.bf16:
        attention += item * shape.query
    if shape.has_query_norm:
        attention += (shape.query + shape.key_value) * (FP32 + (0 if is_lora else item))
        attention += FP32 * (shape.heads + shape.kv_heads)
    norms = 2 * (FP32 + _scaled(how)) * shape.hidden + 2 * FP32
    return norms + inputs * shape.hidden + attention + 4 * item * shape.width + 7 * how.rank * item


def _scaled(how: LearnerSizing) -> int:
    """Bytes a number of what a norm scales, kept for the gradient of its weight."""
    return 0 if how.rank else BF16 if how.computes_held_bf16 else FP32


def _copies(shape: ModelShape, how: LearnerSizing) -> float:
    """autocast's, of weights in fp32: the graph holds them until the backward pass has used them."""
    if not how.bf16 or how.computes_held_bf16 or how.held != "fp32":
        return 0.0
    layers = shape.linear if how.recomputed is Recomputed.NONE else shape.linear / shape.layers
    return float(BF16 * (layers + shape.embedding))


def loss_bytes(shape: ModelShape, how: LearnerSizing) -> float:
    """Logits of a chunk of tokens with what softmax and its gradient make of them; see `learning.logprobs`."""
    scored = how.scored or how.tokens
    at_once = memory.logits_at_once(on_gpu=how.on_gpu)
    chunk = min(scored, max(1, at_once // shape.vocabulary)) * shape.vocabulary
    if how.rank:  # a frozen head: the gradient stands in place of the logits, the hidden states' is kept
        return float(chunk * (how.item + (0 if how.on_gpu else 3 * FP32)) + scored * shape.hidden * how.item)
    return float(chunk * (3 * FP32 + (how.item if how.bf16 else 0)))


def _by_kernels(shape: ModelShape, how: LearnerSizing, room: float) -> float:
    """What the learner itself plans to keep of a microbatch, see `learning.fused.memory`."""
    sizes = memory.DecoderShape(
        shape.layers,
        shape.hidden,
        shape.width,
        shape.query,
        2 * shape.key_value,
        how.item,
        shape.has_query_norm,
        how.path,
        how.inputs_on_host,
    )
    return memory.activation_bytes(sizes, how.tokens, memory.planned(how.recomputed, sizes, how.tokens, room))


class SamplerSizing(msgspec.Struct, frozen=True, kw_only=True):
    """How a policy is sampled from by transformers, in one process."""

    slots: int
    length: int
    """Of the longest prompt and answer together."""
    rank: int = 0
    """Of the LoRA adapter; 0: all weights are trained."""
    adapters: int = 1
    versions: int = 3
    on_gpu: bool = True
    prefix_tokens: int = 16_384
    prefill_tokens: int = 4096


def transformers_sampler(shape: ModelShape, how: SamplerSizing) -> Footprint:
    """fp32 throughout. Two copies of a LoRA base (one stays as it was loaded); a full version is a copy each."""
    versions = 1 if how.rank else how.versions
    drawn = 5 * FP32 * how.slots * shape.vocabulary  # logits, log-probs, their sum, and what sorts them
    step = how.prefill_tokens * FP32 * (3 * shape.width + 4 * shape.hidden)
    parts = {
        "weights": float(FP32 * shape.parameters),
        "versions": float(FP32 * shape.parameters * versions),
        "adapters": float(FP32 * shape.adapter(how.rank) * how.versions * how.adapters),
        "KV cache": float(shape.kv_bytes(FP32) * (how.slots * how.length + how.prefix_tokens)),
        "drawing": float(max(drawn, step)),
        "CUDA": CONTEXT if how.on_gpu else 0.0,
    }
    return Footprint({name: count for name, count in parts.items() if count})


def served_weights(shape: ModelShape, parts: int, item: int = BF16) -> float:
    """Of vLLM, on each of its GPUs."""
    return float(item * shape.parameters / parts)
