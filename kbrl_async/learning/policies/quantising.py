"""QLoRA: the frozen base in 4 or 8 bits by bitsandbytes, an adapter in full precision on top of it."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from kbrl_async.errors import ConfigError, MissingTool

KINDS = ("none", "nf4", "int8")


def loading_options(kind: str, device: str) -> dict[str, Any]:
    """What `from_pretrained` is given so that it loads the base quantised; nothing for `none`.

    :raises ConfigError: what is asked for can't be computed.
    :raises MissingTool: bitsandbytes is not there, or does not load.
    """
    if kind == "none":
        return {}
    asked = f"learner.base_quantisation={kind}"
    if kind not in KINDS:
        raise ConfigError(f"unknown {asked}", f"Known ones: {', '.join(KINDS)}")
    place = torch.device(device)
    if place.type != "cuda":
        raise ConfigError(f"{asked} needs a GPU, and the learner is on {device}", "Use device=cuda, or none")
    try:
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        cure = "Install it (pip install bitsandbytes), or use learner.base_quantisation=none"
        raise MissingTool(f"{asked} needs bitsandbytes, which can't be loaded: {error}", cure) from error
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        settings = BitsAndBytesConfig(load_in_8bit=True)
    else:
        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    # Placed while it is loaded: a quantised model can't be moved afterwards.
    return {"quantization_config": settings, "device_map": {"": place.index or 0}}
