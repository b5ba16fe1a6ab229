"""How well an update uses the hardware: model-FLOP utilisation and peak memory.

FLOPs are those that the model needs for the tokens as they are packed: recomputation by gradient checkpointing does not
count, and a prompt that a group shares counts once, as it is computed once.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch

from kbrl_async.learning.fused.memory import head_depth

_MIB = 1 << 20


def flops_per_token(model: torch.nn.Module, length: float) -> float:
    """Of a forward and backward pass: 6 a weight (4 a frozen one: it needs no gradient of its own) and 12·L·d·T of
    attention, halved because it is causal. Input embeddings are looked up, not multiplied; of experts those count that
    a token goes through."""
    config: Any = model.config
    chosen = getattr(config, "num_experts_per_tok", None)
    every = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    share = chosen / every if chosen and every else 1.0
    weights = 0.0
    is_frozen = any(not p.requires_grad for p in model.parameters())
    for name, p in model.named_parameters():
        weights += (6.0 if p.requires_grad else 4.0) * p.numel() * (share if ".experts." in name else 1.0)
    if not getattr(config, "tie_word_embeddings", False):
        weights -= (4.0 if is_frozen else 6.0) * config.vocab_size * config.hidden_size
    query = config.num_attention_heads * head_depth(config)
    return float(weights + 6.0 * config.num_hidden_layers * query * length)


def shape_flops_per_token(config: Any, rank: int, length: float, scored: float, recomputed: bool = False) -> float:
    """The same of a dense model that there need not be, with LoRA of `rank` on every linear layer (0: all weights are
    trained), per token of causal sequences.

    6 a trained weight, 4 a frozen one (2 forward, 2 for the input's gradient), attention 2·d·L forward (causal) and
    twice and a half of it backward, the head at the `scored` share of tokens. `recomputed` adds the layers' forward
    pass once more, as full gradient checkpointing does.
    """
    d, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    depth = head_depth(config)
    query, kv = config.num_attention_heads * depth, config.num_key_value_heads * depth
    linear = layers * (2 * d * query + 2 * d * kv + 3 * d * inner)
    adapters = layers * rank * (2 * (d + query) + 2 * (d + kv) + 3 * (d + inner))
    attention = 2.0 * layers * query * length
    each = 4.0 if rank else 6.0
    again = 2.0 * (linear + adapters) + attention if recomputed else 0.0
    head = each * config.vocab_size * d * scored
    return float(each * linear + 6.0 * adapters + 3.5 * attention + head + again)


def measured_peak(device: torch.device, bf16: bool, repeats: int = 5) -> float:
    """FLOP/s of a large matrix product here and now: the best of a few, under a second."""
    size = 768 if device.type == "cpu" else 8192
    kind = torch.bfloat16 if bf16 else torch.float32
    a = torch.randn(size, size, device=device, dtype=kind)
    best = float("inf")
    for _ in range(repeats):
        _wait(device)
        started = time.perf_counter()
        a @ a
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best


def utilisation(flops: float, seconds: float, peak: float) -> float:
    """Share of the peak; 0 where nothing was measured."""
    return flops / (seconds * peak) if seconds > 0 and peak > 0 else 0.0


def peak_memory_mb(device: torch.device) -> float:
    """Most memory so far: of the GPU's allocator, or resident of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _MIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _MIB


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
