"""Stands for torchao where it is not installed: what `learning.eight_bit` uses of it, with codes by fourth roots
instead of its dynamic ones. Blocks are as small as the models of these tests."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers.utils import is_torchao_available

from kbrl_async.learning import eight_bit

BLOCK, LEAST = 32, 64
LEVELS = 127.0


class OptimState8bit:
    """`codes` [shape] of uint8, `scale` [numbers / block]."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def zeros(
        cls, shape: torch.Size, signed: bool, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> OptimState8bit:
        codes = torch.full(shape, 127, dtype=torch.uint8, device=device)
        return cls(codes, torch.zeros(codes.numel() // block_size, device=device))

    def float(self) -> torch.Tensor:
        roots = (self.codes.to(torch.float32) - LEVELS) / LEVELS
        levels = roots.sign() * roots.abs() ** 4
        return (levels.view(len(self.scale), -1) * self.scale[:, None]).view(self.codes.shape)

    def copy_(self, exact: torch.Tensor) -> None:
        blocks = exact.view(len(self.scale), -1)
        self.scale.copy_(blocks.abs().amax(1))
        levels = blocks / self.scale.clamp_min(1e-12)[:, None]
        roots = levels.sign() * levels.abs() ** 0.25
        self.codes.copy_((roots * LEVELS + LEVELS).round().to(torch.uint8).view(self.codes.shape))


class AdamW8bit(torch.optim.Optimizer):
    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        *,
        block_size: int,
    ) -> None:
        super().__init__(list(params), {"lr": torch.tensor(lr), "betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (first, second), rate = group["betas"], float(group["lr"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                held = self.state[p]
                held["step"] += 1
                mean = held["exp_avg"].float().lerp(p.grad.float(), 1 - first)
                square = held["exp_avg_sq"].float().lerp(p.grad.float().square(), 1 - second)
                held["exp_avg"].copy_(mean)
                held["exp_avg_sq"].copy_(square)
                count = float(held["step"])
                root = (square / (1 - second**count)).sqrt() + 1e-8
                p.sub_((rate * mean / (1 - first**count) / root).to(p.dtype))


def _set_item(table: Any, name: str, value: object) -> None:
    table[name] = value


def install(
    set_item: Callable[[Any, str, object], object] = _set_item,
    set_value: Callable[[Any, str, object], object] = setattr,
) -> None:
    """Blocks of `BLOCK`, and this module in torchao's place unless it is there."""
    set_value(eight_bit, "BLOCK", BLOCK)
    set_value(eight_bit, "LEAST", LEAST)
    if "torchao" in sys.modules or importlib.util.find_spec("torchao"):
        return
    is_torchao_available()  # transformers asks once: a stand-in has no version to tell it
    optim, inner = types.ModuleType("torchao.optim"), types.ModuleType("torchao.optim.subclass_8bit")
    optim.AdamW8bit, inner.OptimState8bit = AdamW8bit, OptimState8bit  # type: ignore[attr-defined]
    for name, module in (("torchao", types.ModuleType("torchao")), (optim.__name__, optim), (inner.__name__, inner)):
        set_item(sys.modules, name, module)
