"""Several LoRA adapters on one base, one a role. A model with none, or with one, has only `MAIN`.

Invariant: exactly one adapter is active at a time; whoever switches, switches back to `MAIN`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

MAIN = "default"
"""peft's own name of the first adapter; the solver's."""


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
