"""How much of a GPU vLLM needs, where that follows from the model: then it measures nothing at its start.

What it measures is the GPU's memory before and after a trial, and a bench or a learner on the same GPU that gives some
back in between ends the start ("Error in memory profiling"); one that takes some leaves it with a smaller KV cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.sampling.vllm.options import VLLMOptions

BESIDE_BYTES = 4 << 30
"""CUDA's context and graphs, activations, adapters: of models that are fitted at all, generously."""
BLOCK_TOKENS = 128
"""More than vLLM rounds a sequence up to."""
NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")
STATEFUL = ("layers_block_type", "linear_num_key_heads", "mamba_d_state", "ssm_state_size", "state_size")
"""Models whose sequences hold more than keys and values."""


def fitted(options: VLLMOptions, total: int) -> VLLMOptions:
    """With a KV cache for every slot at its longest, and no more memory than that takes, in a GPU of `total` bytes.

    Unchanged where the model is no local folder or not of a plain kind, or where it does not all go into
    `memory_share`: then vLLM measures, and the cache gets what is left.
    """
    folder = Path(options.model)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    try:
        shape = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return options
    token = token_bytes(shape, 4 if options.resolved_dtype == "float32" else 2)
    if not token or not weights:
        return options
    longest = options.max_model_len or shape["max_position_embeddings"]
    cache = token * (longest + BLOCK_TOKENS) * (options.slots + 1)
    needed = cache + 2 * weights + BESIDE_BYTES  # twice: new full weights are read beside the old ones
    if needed > options.memory_share * total:
        return options
    return msgspec.structs.replace(options, kv_bytes=cache, memory_share=needed / total)


def token_bytes(shape: Mapping[str, Any], item: int) -> int:
    """Keys and values of one token in all layers, `item` bytes a number; 0 where the model is not of a plain kind."""
    if any(name not in shape for name in NEEDED) or any(name in shape for name in STATEFUL):
        return 0
    layers, heads = int(shape["num_hidden_layers"]), int(shape["num_attention_heads"])
    depth = int(shape.get("head_dim") or shape["hidden_size"] // heads)
    return 2 * layers * int(shape.get("num_key_value_heads") or heads) * depth * item
