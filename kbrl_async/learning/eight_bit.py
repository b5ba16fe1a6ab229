"""AdamW whose two moments of a matrix take a byte a number each, by torchao; it works on this rank's own rows.

::

    parameter (whole, or a DTensor) ─ its local rows ─▶ torchao's AdamW8bit ─▶ codes, and a scale for 256 numbers each
                                    ◀─ stored: codes and scales by rows, so that any number of ranks can read them

Numbers of a block lie in one row, so matrices whose rows are no multiple of 256, and vectors, keep fp32 moments: in a
language model those are less than a thousandth. Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise
Quantization".
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from kbrl_async.errors import MissingTool
from kbrl_async.learning.fused.memory import MOMENT_BLOCK

BLOCK = MOMENT_BLOCK
LEAST = 4096
"""Numbers of a tensor below which fp32 costs nothing."""
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""The moments, by the names that AdamW gives them."""


def library() -> Any:
    """`torchao.optim`.

    :raises MissingTool: it is not there, or does not load.
    """
    try:
        return importlib.import_module("torchao.optim")
    except (ImportError, OSError, RuntimeError) as error:
        cure = "Install it (pip install torchao), or use learner.optimizer=adamw"
        raise MissingTool(
            f"learner.optimizer=adamw_8bit needs torchao, which can't be loaded: {error}", cure
        ) from error


def is_packed(shape: torch.Size) -> bool:
    """Moments of a whole tensor of this shape are kept in 8 bits."""
    return len(shape) > 1 and shape.numel() >= LEAST and math.prod(shape[1:]) % BLOCK == 0


class EightBitAdamW(torch.optim.Optimizer):
    """In `state` stand the moments of this rank's rows, as torchao holds them."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], learning_rate: float, betas: tuple[float, float]
    ) -> None:
        """Without weight decay. MissingTool as `library`."""
        super().__init__(list(parameters), {"lr": learning_rate})
        given = library()
        self._packed_zeros = importlib.import_module("torchao.optim.subclass_8bit").OptimState8bit.zeros
        self._own = {p: torch.nn.Parameter(_local(p.detach())) for group in self.param_groups for p in group["params"]}
        held = [own for own in self._own.values() if own.numel()]
        self._inner = given.AdamW8bit(held, lr=learning_rate, betas=betas, weight_decay=0.0, block_size=BLOCK)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self._inner.param_groups:
            group["lr"].fill_(self.param_groups[0]["lr"])
        for parameter, own in self._own.items():
            if parameter.grad is not None and own.numel():
                self.make(parameter)
                own.data = _local(parameter.detach())  # who loads weights may give them other memory
                own.grad = _local(parameter.grad)
        self._inner.step()
        for own in self._own.values():
            own.grad = None

    def make(self, parameter: torch.nn.Parameter) -> None:
        """Empty moments, where there are none yet."""
        if self.state[parameter]:
            return
        own = self._own[parameter]
        held: dict[str, Any] = {"step": torch.zeros(())}
        for name, signed in SIGNED.items():
            if is_packed(parameter.shape) and own.numel():
                held[name] = self._packed_zeros(own.shape, signed, BLOCK, own.device, dtype=own.dtype)
            else:
                held[name] = torch.zeros_like(own, dtype=torch.float32, requires_grad=False)
        self.state[parameter] = self._inner.state[own] = held

    def forget(self, parameter: torch.nn.Parameter) -> None:
        self.state.pop(parameter, None)
        self._inner.state.pop(self._own[parameter], None)

    def stored(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The moments' own memory as plain tensors, by rows of the parameter: DTensors where it is one. Of packed ones
        `NAME.codes` [its shape] and `NAME.scale` [rows, blocks of a row]."""
        held = self.state.get(parameter)
        if not held:
            return {}
        out: dict[str, torch.Tensor] = {"step": held["step"]}
        for name in SIGNED:
            if not is_packed(parameter.shape):
                out[name] = _as(parameter, held[name], parameter.shape)
                continue
            own, blocks = self._own[parameter], math.prod(parameter.shape[1:]) // BLOCK
            codes = held[name].codes if own.numel() else torch.empty(own.shape, dtype=torch.uint8, device=own.device)
            scale = held[name].scale if own.numel() else torch.empty(0, device=own.device)
            out[f"{name}.codes"] = _as(parameter, codes, parameter.shape)
            out[f"{name}.scale"] = _as(parameter, scale.view(len(own), blocks), torch.Size([len(parameter), blocks]))
        return out


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as(parameter: torch.Tensor, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`rows` in the place of the parameter's own."""
    if not isinstance(parameter, DTensor):
        return rows
    stride = torch.empty(shape, device="meta").stride()
    made: DTensor = DTensor.from_local(
        rows, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
    return made
