"""Loads policies: a Hugging Face folder or hub name into a causal LM with its tokenizer, optionally wrapped in LoRA.

A model may have several LoRA adapters on one base, one a role; with none, or with one, it has only `MAIN`. Exactly one
is active at a time: whoever switches, switches back to `MAIN`.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from kbrl_async.errors import ConfigError, MissingTool

MAIN = "default"
"""peft's own name of the first adapter; the solver's."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model(
    path: str,
    device: str = "cpu",
    *,
    dtype: str = "fp32",
    lora_rank: int = 0,
    adapters: Sequence[str] = (),
    base_quantisation: str = "none",
) -> torch.nn.Module:
    """The causal LM in eval mode (no dropout: sampler and learner must agree), LoRA-wrapped if asked for.

    `path` is a folder with `config.json` and safetensors, or a hub name; `dtype` that of the stored weights, a key of
    `DTYPES`; `adapters` are more LoRA adapters beside the main one.

    :raises ConfigError: it can't be loaded.
    :raises MissingTool: bitsandbytes is asked for, and not there.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()

    _check_path(path)
    quantised = _quantised(base_quantisation, device)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=DTYPES[dtype], attn_implementation="sdpa", use_safetensors=True, **quantised
        )
    except (OSError, ValueError) as error:
        raise _cannot_load("model", path, error) from error
    model = (model if quantised else model.to(device)).eval()
    if lora_rank:
        model = wrap_lora(model, lora_rank)
        add_adapters(model, adapters)
    loaded: torch.nn.Module = model
    return loaded


def _quantised(kind: str, device: str) -> dict[str, Any]:
    """What `from_pretrained` is given so that it loads the frozen base in 4 or 8 bits (QLoRA); nothing for `none`.

    :raises ConfigError: what is asked for can't be computed.
    :raises MissingTool: bitsandbytes is not there, or does not load.
    """
    if kind == "none":
        return {}
    asked = f"learner.base_quantisation={kind}"
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


def load_tokenizer(path: str) -> Any:
    """The tokenizer beside the model; must know its end-of-text token."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    _check_path(path)
    # By a model's type alone, AutoTokenizer would put that family's own word splitting over a custom tokenizer.json.
    chosen = PreTrainedTokenizerFast if _is_plain_tokenizer(path) else AutoTokenizer
    try:
        tokenizer = chosen.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise _cannot_load("tokenizer", path, error) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {path} has no end-of-text token", "Set eos_token in its config")
    return tokenizer


def _is_plain_tokenizer(path: str) -> bool:
    """A folder whose `tokenizer.json` says everything, as `PreTrainedTokenizerFast` saves it."""
    settings = Path(path).expanduser() / "tokenizer_config.json"
    if not settings.is_file():
        return False
    named = msgspec.json.decode(settings.read_bytes()).get("tokenizer_class")
    return named in ("PreTrainedTokenizerFast", "TokenizersBackend")


def wrap_lora(model: torch.nn.Module, rank: int) -> torch.nn.Module:
    """`model` with a LoRA adapter of `rank` on all linear layers; only the adapter is trainable.

    Of a mixture of experts those of attention alone: a router that is adapted sends tokens elsewhere than the sampler's
    did, and experts are stacked weights that samplers load no adapters for.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules=_adapted(model),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # peft asks transformers for a property by its deprecated name; nothing a user could do about it.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        wrapped: torch.nn.Module = get_peft_model(model, config)
    return wrapped


def _adapted(model: torch.nn.Module) -> str | list[str]:
    if not getattr(model.config, "num_experts_per_tok", None):
        return "all-linear"
    linear = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return [name for name in linear if "attn" in name or "attention" in name]


def add_adapters(model: torch.nn.Module, names: Sequence[str]) -> None:
    """Adds adapters like the first one to a peft model, all trainable; `MAIN` stays active."""
    for name in names:
        model.add_adapter(name, model.peft_config[MAIN])  # type: ignore[operator, index]
    model.set_adapter(MAIN)  # type: ignore[operator]
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            parameter.requires_grad_(True)


def adapter_names(model: torch.nn.Module) -> tuple[str, ...]:
    """`MAIN` first."""
    found: dict[str, object] = getattr(model, "peft_config", {})
    return (MAIN, *(name for name in found if name != MAIN))


def adapter_of(role: str, names: Sequence[str]) -> str:
    """The adapter that a role's samples belong to: its own, else the main one."""
    return role if role in names else MAIN


@contextlib.contextmanager
def active(model: torch.nn.Module, name: str) -> Iterator[None]:
    """With adapter `name` in use; nothing happens for a model without several."""
    several = len(adapter_names(model)) > 1
    if several:
        model.set_adapter(name)  # type: ignore[operator]
    try:
        yield
    finally:
        if several:
            model.set_adapter(MAIN)  # type: ignore[operator]


def causal_lm(model: torch.nn.Module) -> torch.nn.Module:
    """The causal LM inside a peft wrapper, its LoRA layers included; the model itself otherwise."""
    inner: torch.nn.Module = model.get_base_model() if is_lora(model) else model  # type: ignore[operator]
    return inner


def is_lora(model: torch.nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _check_path(path: str) -> None:
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    folder = Path(path).expanduser()
    if looks_local and not (folder / "config.json").is_file():
        state = "does not exist" if not folder.exists() else "holds no config.json"
        raise ConfigError(f"model folder {path} {state}", "Give a Hugging Face model folder or a hub name")


def _cannot_load(what: str, path: str, error: Exception) -> ConfigError:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ConfigError(
        f"can't load the {what} {path!r}: {first_line}",
        "Check the name, the network or HF_TOKEN, or give a local folder with config.json and safetensors",
    )
