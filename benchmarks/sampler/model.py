"""Models of real shapes with random weights, their tokenizer and adapters, to be sampled from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from kbrl_async.weights import FILES


class BenchmarkShape(msgspec.Struct, frozen=True):
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    context: int


SHAPES = {
    "tiny": BenchmarkShape(192, 4, 3, 3, 512, 2048, 768),
    "1b": BenchmarkShape(2048, 16, 16, 4, 8192, 65_536, 4096),
    "7b": BenchmarkShape(3584, 28, 28, 4, 18_944, 152_064, 4096),
}
"""`7b` is that of Qwen2.5-7B."""


def write_config(folder: Path, shape: BenchmarkShape) -> None:
    """A model folder without weights: vLLM fills them by load_format=dummy, or they are put there."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.inner,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))


def make_tokenizer(shape: BenchmarkShape) -> Any:
    """A real tokenizer of that many entries, all of them made up: words `t7`, and no end-of-text that is ever drawn."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(shape.vocabulary)}
    fast = Tokenizer(models.WordLevel(words, unk_token="t0"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="t1")


def linear_layers(shape: BenchmarkShape) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear layers of one block."""
    head = shape.hidden // shape.heads
    return {
        "self_attn.q_proj": (shape.hidden, shape.hidden),
        "self_attn.k_proj": (shape.hidden, head * shape.kv_heads),
        "self_attn.v_proj": (shape.hidden, head * shape.kv_heads),
        "self_attn.o_proj": (shape.hidden, shape.hidden),
        "mlp.gate_proj": (shape.hidden, shape.inner),
        "mlp.up_proj": (shape.hidden, shape.inner),
        "mlp.down_proj": (shape.inner, shape.hidden),
    }


def write_weights(folder: Path, shape: BenchmarkShape, seed: int) -> None:
    """Whole weights in bfloat16, as the learner publishes them. Blocks are alike: it is their size that matters."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)

    def drawn(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)

    block = {f"{name}.weight": drawn(outputs, inputs) for name, (inputs, outputs) in linear_layers(shape).items()}
    block |= {f"self_attn.{name}_proj.bias": drawn(block[f"self_attn.{name}_proj.weight"].shape[0]) for name in "qkv"}
    block |= {f"{name}_layernorm.weight": 1 + drawn(shape.hidden) for name in ("input", "post_attention")}
    tensors = {f"model.layers.{n}.{name}": value.clone() for n in range(shape.layers) for name, value in block.items()}
    tensors["model.embed_tokens.weight"] = drawn(shape.vocabulary, shape.hidden)
    tensors["lm_head.weight"] = drawn(shape.vocabulary, shape.hidden)
    tensors["model.norm.weight"] = 1 + drawn(shape.hidden)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def write_adapter(folder: Path, shape: BenchmarkShape, rank: int, seed: int) -> None:
    """An adapter on all linear layers, as peft writes it."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    sizes = linear_layers(shape)
    tensors = {}
    for layer in range(shape.layers):
        for name, (inputs, outputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for part, size, scale in (("lora_A", (rank, inputs), inputs**-0.5), ("lora_B", (outputs, rank), 0.02)):
                values = torch.randn(size, generator=generator) * scale
                tensors[f"{prefix}.{part}.weight"] = values.to(torch.bfloat16)
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(name.rpartition(".")[2] for name in sizes),
        "base_model_name_or_path": "",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def make_weights(folder: Path, shape: BenchmarkShape, rank: int) -> None:
    """The base, and two adapters or, with `rank` 0, two sets of whole weights, of which the base has the first."""
    write_config(folder / "base", shape)
    for number in range(2):
        place = folder / f"weights{number}"
        if rank:
            write_adapter(place, shape, rank, number)
        else:
            write_weights(place, shape, number)
    if not rank:
        os.link(folder / "weights0" / FILES["full"], folder / "base" / FILES["full"])
