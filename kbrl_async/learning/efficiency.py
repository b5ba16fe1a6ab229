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

_MIB = 1 << 20


def flops_per_token(model: torch.nn.Module, length: float) -> float:
    """Of a forward and backward pass: 6 a weight (4 a frozen one: it needs no gradient of its own) and 12·L·d·T of
    attention, halved because it is causal. Input embeddings are looked up, not multiplied."""
    config = model.config
    tied = bool(getattr(config, "tie_word_embeddings", False))
    embedding = 0 if tied else int(config.vocab_size) * int(config.hidden_size)  # type: ignore[union-attr, arg-type]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    if frozen:
        frozen -= embedding
    else:
        trained -= embedding
    attention = 6.0 * int(config.num_hidden_layers) * int(config.hidden_size) * length  # type: ignore[union-attr, arg-type]
    return float(6.0 * trained + 4.0 * frozen + attention)


def lora_flops_per_token(config: Any, rank: int, length: float, scored: float, recomputed: bool = False) -> float:
    """FLOPs that a forward and backward pass with LoRA on every linear layer needs, per token of causal sequences.

    4 a frozen weight (2 forward, 2 for the input's gradient), 6 an adapter weight, attention 2·d·L forward (causal) and
    twice and a half of it backward, the head at the `scored` share of tokens. `recomputed` adds the layers' forward
    pass once more, as full gradient checkpointing does.
    """
    d, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    depth = getattr(config, "head_dim", None) or d // config.num_attention_heads
    query, kv = config.num_attention_heads * depth, config.num_key_value_heads * depth
    linear = layers * (2 * d * query + 2 * d * kv + 3 * d * inner)
    adapters = layers * rank * (2 * (d + query) + 2 * (d + kv) + 3 * (d + inner))
    attention = 2.0 * layers * query * length
    head = 4.0 * config.vocab_size * d * scored
    again = 2.0 * (linear + adapters) + attention if recomputed else 0.0
    return float(4.0 * linear + 6.0 * adapters + 3.5 * attention + head + again)


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
