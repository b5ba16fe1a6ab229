"""Which models the fused layers fit, and why another one is computed by its own modules alone.

A decoder layer of these families is norm → q, k, v → (a norm over each head: Qwen3) → rotation → causal attention →
output, then norm → silu(gate) · up → down. What a config adds to that (windows, other activations, biases in the MLP)
is looked for by name, so that nothing is left out in silence.
"""

from __future__ import annotations

from typing import Any

import torch

from kbrl_async.learning.fused.memory import head_depth
from kbrl_async.learning.policies.models import causal_lm

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def why_not(model: torch.nn.Module) -> str:
    """Why the layers of `model`, LoRA-wrapped or not, can't be fused; empty where they can."""
    inner = causal_lm(model)
    config: Any = inner.config
    if getattr(config, "model_type", "") not in FAMILIES:
        return f"its family is {getattr(config, 'model_type', 'unknown')}"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"its activation is {config.hidden_act}"
    if _windowed(config):
        return "it attends within a sliding window"
    if getattr(config, "mlp_bias", False):
        return "its MLP has biases"
    if (depth := head_depth(config)) & (depth - 1):
        return f"its heads are {depth} wide, no power of two"
    linear = (module for layer in inner.get_decoder().layers for module in linear_of(layer))  # type: ignore[operator]
    kinds = {type(getattr(module, "base_layer", module)) for module in linear} - {torch.nn.Linear}
    return f"its linear layers are {kinds.pop().__name__}" if kinds else ""


def _windowed(config: Any) -> bool:
    """Some position sees less than all before it."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", None) is False:
        return False
    return int(window) < int(config.max_position_embeddings)


def why_not_by_hand(model: torch.nn.Module) -> str:
    """Why the backward pass of a LoRA policy, of a family that fits, can't be `decoder.FusedDecoder`'s."""
    adapters: dict[str, Any] = getattr(model, "peft_config", {})
    if not adapters:
        return "it has no LoRA adapter"
    if len(adapters) > 1:
        return "it has several adapters"
    (adapter,) = adapters
    layers = causal_lm(model).get_decoder().layers  # type: ignore[operator]
    odd = (_odd(module, adapter) for layer in layers for module in linear_of(layer))
    return next(filter(None, odd), "")


def linear_of(layer: Any) -> tuple[Any, ...]:
    """The linear layers of a decoder layer, in the order of their use."""
    attention, mlp = layer.self_attn, layer.mlp
    of_attention = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return *of_attention, mlp.gate_proj, mlp.up_proj, mlp.down_proj


def _odd(module: Any, adapter: str) -> str:
    if adapter not in getattr(module, "lora_A", {}):
        return "a linear layer has no adapter"
    if module.use_dora.get(adapter) or module.lora_A[adapter].bias is not None:
        return "its adapters are more than A and B"
    return "its base is trained" if module.base_layer.weight.requires_grad else ""
