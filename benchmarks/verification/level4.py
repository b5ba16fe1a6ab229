"""KernelBench's level 4 without the hub: its models with random weights, in a folder as the hub's cache has it.

Shapes are those of the published models, which decide what a verification takes; values do not.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from benchmarks.harness import Result, say
from kbrl_async.kernels.problems import downloads

_REVISION = "random"


class Shape(NamedTuple):
    """A model's kind, as transformers calls it, and what of its configuration is not that kind's default."""

    kind: str
    fields: dict[str, Any] = {}  # noqa: RUF012 - never written to


MODELS = {
    "gpt2": Shape("gpt2"),
    "facebook/opt-1.3b": Shape(
        "opt",
        {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192}
        | {"word_embed_proj_dim": 2048},
    ),
    "EleutherAI/gpt-neo-2.7B": Shape(
        "gpt_neo",
        {"hidden_size": 2560, "num_layers": 32, "num_heads": 20, "attention_types": [[["global", "local"], 16]]},
    ),
    "facebook/bart-large": Shape("bart"),
    "google/bigbird-roberta-base": Shape("big_bird", {"is_decoder": True}),
    "google/electra-small-discriminator": Shape("electra", {"is_decoder": True}),
    "google/reformer-enwik8": Shape(
        "reformer",
        {"hidden_size": 1024, "num_attention_heads": 8, "attention_head_size": 128, "feed_forward_size": 4096}
        | {"attn_layers": 3 * ["local", "local", "lsh", "local"], "axial_pos_embds_dim": [256, 768]}
        | {"axial_pos_shape": [128, 512], "max_position_embeddings": 65536, "vocab_size": 258, "is_decoder": True}
        | {"local_attn_chunk_length": 128, "lsh_attn_chunk_length": 256, "num_hashes": 4, "num_buckets": 512},
    ),
}


def models(
    *,
    to: Annotated[Path, "a folder, for HF_HUB_CACHE"],
    only: Annotated[str, "of names, a regular expression"] = "",
) -> Result:
    """Writes each model that transformers knows the architecture of; those that it does not are named."""
    from transformers import CONFIG_MAPPING

    made: list[str] = []
    unknown: list[str] = []
    for name, shape in MODELS.items():
        if not re.search(only, name):
            continue
        if shape.kind.replace("_", "-") in CONFIG_MAPPING or shape.kind in CONFIG_MAPPING:
            _write(name, shape, to)
            made.append(name)
            say(f"written: {name}")
        else:
            unknown.append(name)
    return {"ok": bool(made), "written": made, "unknown": unknown, "use": f"{downloads.CACHE}={to}"}


def _write(name: str, shape: Shape, to: Path) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = shape.kind if shape.kind in CONFIG_MAPPING else shape.kind.replace("_", "-")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**shape.fields))
    place = to / f"models--{name.replace('/', '--')}"
    model.save_pretrained(place / "snapshots" / _REVISION)
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text(_REVISION)
