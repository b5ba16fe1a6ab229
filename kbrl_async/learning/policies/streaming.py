"""Weights that come layer by layer: a model is built without any, and each layer gets its own when it is its turn.

::

    skeleton(config) ─ no memory ─▶ materialise(layer) ─▶ shard it ─▶ the next layer
                                        └─ Folder: its safetensors · Drawn: random, as a new model begins

A skeleton has the names and shapes of the model that `from_pretrained` gives. Where a family's files have other names
than its modules, `Folder.of` says so, and the model is loaded whole on the host instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import safe_open

from kbrl_async.learning.policies.models import MAIN

_ADAPTER = ".lora_"
"""In the name of what peft has added to a model."""
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Source(Protocol):
    """Where weights come from."""

    def fill(self, lm: Any, module: torch.nn.Module, prefix: str, names: list[str]) -> None:
        """Sets the parameters `names` of `module` itself, which are there and hold nothing. `prefix` is its place in
        the causal LM, with its dot."""


class Folder:
    """The safetensors of a Hugging Face folder."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        """`files`: file name by tensor."""
        self._folder, self._files = folder, files
        self._open: dict[str, Any] = {}

    @classmethod
    def of(cls, path: str, lm: Any) -> Folder | None:
        """None where the folder does not hold every weight of `lm` under its own name, or where buffers can't be made
        again: before transformers 5."""
        import transformers

        if int(transformers.__version__.partition(".")[0]) < 5:
            return None
        folder = _folder(path)
        files = None if folder is None else _files(folder)
        if folder is None or files is None:
            return None
        tied = set(getattr(lm, "all_tied_weights_keys", None) or getattr(lm, "_tied_weights_keys", None) or ())
        lacking = {_stored(name) for name, p in lm.named_parameters() if p.is_meta} - files.keys() - tied
        return None if lacking else cls(folder, files)

    def fill(self, lm: Any, module: torch.nn.Module, prefix: str, names: list[str]) -> None:
        for name in names:
            stored = _stored(prefix + name)
            file = self._files[stored]
            if file not in self._open:
                self._open[file] = safe_open(str(self._folder / file), framework="pt")
            module._parameters[name].copy_(self._open[file].get_tensor(stored))  # type: ignore[union-attr]


class RandomWeights:
    """Random weights as the family begins with, drawn on the device: the shape of a model is enough."""

    def fill(self, lm: Any, module: torch.nn.Module, prefix: str, names: list[str]) -> None:
        lm._init_weights(module)


def skeleton(path: str, dtype: torch.dtype) -> torch.nn.Module:
    """The causal LM of a folder or hub name without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        made: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return made.eval()


@torch.no_grad()
def materialise(lm: Any, unit: torch.nn.Module, device: torch.device, source: Source | None) -> None:
    """Puts what of `unit`, a part of `lm`, has no memory yet on `device`, with the weights that `source` has.

    Tied weights stay one. Adapters, which begin as peft has them begin, are on the host. Buffers are constants of the
    configuration, which their modules make again.
    """
    prefixes = {module: f"{name}." if name else "" for name, module in lm.named_modules()}
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in unit.modules():
        names, is_adapter = [], _ADAPTER in prefixes[module]
        for name, parameter in _on_meta(module._parameters):
            if parameter not in made:
                fresh = torch.empty_like(parameter, device="cpu" if is_adapter else device)
                made[parameter] = torch.nn.Parameter(fresh, requires_grad=parameter.requires_grad)
                names.append(name)
            module._parameters[name] = made[parameter]
        if buffers := list(_on_meta(module._buffers)):
            for name, buffer in buffers:
                module._buffers[name] = torch.empty_like(buffer, device=device)
            lm._init_weights(module)  # before its weights: it draws those, too
        if names and not is_adapter:
            assert source is not None, "a model without weights needs a source of them"
            source.fill(lm, module, prefixes[module], names)
    drawn = set(made.values())
    for module in unit.modules():
        if hasattr(module, "reset_lora_parameters") and any(p in drawn for p in module.parameters()):
            _begin(module)


def _begin(adapted: Any) -> None:
    """An adapter as peft makes it around a whole model, by the same draws: its modules draw their weights before."""
    for part in (adapted.lora_A, adapted.lora_B):
        part[MAIN].reset_parameters()
    adapted.reset_lora_parameters(MAIN, True)


def _on_meta(tensors: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, tensor) for name, tensor in list(tensors.items()) if tensor is not None and tensor.is_meta)


def _stored(name: str) -> str:
    """A weight's name in its file: peft puts adapters around the layers that they adapt."""
    return name.replace(".base_layer.", ".")


def _folder(path: str) -> Path | None:
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError):
        return None  # `load_model` says what is wrong with it


def _files(folder: Path) -> dict[str, str] | None:
    if (folder / _INDEX).is_file():
        found = msgspec.json.decode((folder / _INDEX).read_bytes(), type=dict[str, Any])["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    if not (folder / _SINGLE).is_file():
        return None
    with safe_open(str(folder / _SINGLE), framework="pt") as file:
        return dict.fromkeys(file.keys(), _SINGLE)
