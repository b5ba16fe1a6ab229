"""Models of real shapes with random weights, their tokenizer and adapters, to be sampled from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from kbrl_async.lab.rehearsal.model import config_of
from kbrl_async.learning.policies.models import wrap_lora
from kbrl_async.learning.policies.streaming import skeleton
from kbrl_async.shapes import CONFIG, KNOWN, ModelShape
from kbrl_async.weights import FILES

QWEN = KNOWN["Qwen2.5-7B"]
SHAPES: dict[str, ModelShape] = {
    "tiny": msgspec.structs.replace(
        QWEN, layers=4, hidden=192, intermediate=512, heads=3, kv_heads=3, head_dim=64, vocabulary=2048, positions=768
    ),
    "1b": msgspec.structs.replace(
        QWEN, layers=16, hidden=2048, intermediate=8192, heads=16, kv_heads=4, vocabulary=65_536, positions=4096
    ),
    "7b": msgspec.structs.replace(QWEN, positions=4096),
    "32b": msgspec.structs.replace(KNOWN["Qwen3-32B"], positions=4096),
}


def make_weights(folder: Path, shape: ModelShape, rank: int) -> None:
    """The base, and two adapters or, with `rank` 0, two sets of whole weights, of which the base has the first."""
    base = folder / "base"
    base.mkdir()
    (base / CONFIG).write_text(json.dumps({**config_of(shape), "torch_dtype": "bfloat16", "eos_token_id": 1}))
    for number in range(2):
        place = folder / f"weights{number}"
        place.mkdir()
        torch.manual_seed(number)
        if rank:
            write_adapter(place, base, rank)
        else:
            write_weights(place, base)
    if not rank:
        os.link(folder / "weights0" / FILES["full"], base / FILES["full"])


def write_weights(folder: Path, base: Path) -> None:
    """Whole weights as the learner publishes them. Blocks are alike: drawing takes long, and their size counts."""
    blocks: dict[str, torch.Tensor] = {}

    def drawn(name: str, like: torch.Tensor) -> torch.Tensor:
        words = name.split(".")
        kind = ".".join(word for word in words if not word.isdigit())
        if kind not in blocks:
            blocks[kind] = float("norm" in kind) + torch.empty(like.shape, dtype=like.dtype).normal_(0.0, 0.02)
        return blocks[kind].clone()

    tensors = {name: drawn(name, tensor) for name, tensor in skeleton(str(base), torch.bfloat16).state_dict().items()}
    save_file(tensors, str(folder / FILES["full"]), metadata={"format": "pt"})


def write_adapter(folder: Path, base: Path, rank: int) -> None:
    """An adapter on all linear layers, as peft writes it."""
    from peft import get_peft_model_state_dict

    adapted: Any = wrap_lora(skeleton(str(base), torch.bfloat16), rank)
    shapes = {name: tensor.shape for name, tensor in get_peft_model_state_dict(adapted).items()}
    tensors = {name: torch.randn(shape).mul_(0.02).to(torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, str(folder / FILES["lora"]), metadata={"format": "pt"})
    adapted.peft_config["default"].save_pretrained(folder)
