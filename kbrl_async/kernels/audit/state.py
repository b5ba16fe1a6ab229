"""What a module holds besides its code, so that it can be said what a call of it has changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_SHOWN = 3
_PLAIN = (bool, int, float, str, bytes, type(None))
_OF_ANY = frozenset(vars(torch.nn.Module()))


def kept(model: torch.nn.Module) -> dict[str, str]:
    """Of every parameter, buffer, attribute and module in it, by name, enough to see a change."""
    return {name: _token(value) for name, value in _held(model)}


def changed(before: dict[str, str], after: dict[str, str]) -> str:
    """Names of what is other than before or new, few of them; empty where nothing of it is."""
    names = [name for name, token in after.items() if before.get(name) != token]
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def apart_from(model: torch.nn.Module, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs that no later call writes to: copies of those that lie in the module's own memory."""
    own = {place for _, value in _held(model) for place in _places(value)}
    return [tensor.clone() if own.intersection(_places(tensor)) else tensor for tensor in outputs]


def _held(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_ANY}
        held = {**own, **module._buffers, **module._parameters, **dict.fromkeys(module._modules, "a module")}
        yield from ((f"{path}.{name}".lstrip("."), value) for name, value in held.items())


def _places(value: Any) -> Iterator[int]:
    """Where its tensors' memory begins."""
    if isinstance(value, torch.Tensor):
        if value.numel() and value.layout is torch.strided and not value.is_meta:
            yield value.untyped_storage().data_ptr()
    elif isinstance(value, (list, tuple, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _places(one)


def _token(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} {float(value.detach().double().sum()) if value.numel() else 0}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_token, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_token(one)}' for key, one in value.items())}}}"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
