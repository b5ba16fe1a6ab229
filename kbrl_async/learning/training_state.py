"""What of a trainer a checkpoint holds, as tensors by name: weights, moments and random state.

`model.NAME`, `optimizer.INDEX.KEY` (by the order of the trained parameters; of 8-bit moments `KEY.codes` and
`KEY.scale`) and `rng.*`. Tensors are the trainer's own,
so that reading into them is restoring it; sharded ones are DTensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

import torch

from kbrl_async.errors import CheckpointError
from kbrl_async.learning.eight_bit import EightBitAdamW, is_packed

ORDER = "rng.order"
_TORCH, _CUDA = "rng.torch", "rng.cuda"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainingState(Protocol):
    """`trainer.Trainer` fits."""

    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    order: torch.Generator
    device: torch.device


def tensors(trainer: TrainingState) -> dict[str, torch.Tensor]:
    """Weights and moments as they are now, in the trainer's memory. A tied weight stands there once."""
    out: dict[str, torch.Tensor] = {f"model.{name}": p.detach() for name, p in trainer.parameters.items()}
    for index, parameter in enumerate(trainer.parameters.values()):
        for key, value in moments(trainer.optimizer, parameter).items():
            out[f"optimizer.{index}.{key}"] = value.view(1) if value.ndim == 0 else value
    return out


def random_state(trainer: TrainingState) -> dict[str, torch.Tensor]:
    """Copies of this process's."""
    out = {_TORCH: torch.get_rng_state(), ORDER: trainer.order.get_state()}
    if trainer.device.type == "cuda":
        out[_CUDA] = torch.cuda.get_rng_state(trainer.device)
    return out


def set_random_state(trainer: TrainingState, state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state[_TORCH])
    trainer.order.set_state(state[ORDER])
    if trainer.device.type == "cuda" and _CUDA in state:
        torch.cuda.set_rng_state(state[_CUDA], trainer.device)


def check(trainer: TrainingState, stored: Mapping[str, torch.Size], where: Path) -> None:
    """:raises CheckpointError: what is stored is of another model than the trainer's."""
    needed = {f"model.{name}": p.shape for name, p in trainer.parameters.items()}
    cure = "Use the run's own model"
    if any(name.startswith("optimizer.") for name in stored):
        was_8bit, is_8bit = any(name.endswith(".codes") for name in stored), _packs(trainer)
        if was_8bit != is_8bit:
            cause = f"{where} has moments of {'8' if was_8bit else '32'} bits, and learner.optimizer asks for others"
            raise CheckpointError(cause, "Set learner.optimizer as the run began")
    if missing := sorted({*needed, _TORCH, ORDER} - stored.keys()):
        raise CheckpointError(f"{where} lacks {missing[0]}: it is of another model", cure)
    if odd := [name for name, shape in needed.items() if stored[name] != shape]:
        raise CheckpointError(f"{where}: {odd[0].removeprefix('model.')} has another shape", cure)


@torch.no_grad()
def to_read_into(trainer: TrainingState, stored: Collection[str]) -> dict[str, torch.Tensor]:
    """`tensors`, with the moments that `stored` has, and without those that it hasn't."""
    for index, parameter in enumerate(trainer.parameters.values()):
        if f"optimizer.{index}.step" in stored:
            empty_moments(trainer.optimizer, parameter)
        else:
            forget_moments(trainer.optimizer, parameter)
    return tensors(trainer)


def _packs(trainer: TrainingState) -> bool:
    """Some of its moments are kept in 8 bits."""
    return isinstance(trainer.optimizer, EightBitAdamW) and any(is_packed(p.shape) for p in trainer.parameters.values())


def moments(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Those of `parameter` and its count of steps, in the optimizer's memory; none before the first step."""
    if isinstance(optimizer, EightBitAdamW):
        return optimizer.stored(parameter)
    held: dict[str, torch.Tensor] = optimizer.state.get(parameter, {})
    return held


def forget_moments(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> None:
    if isinstance(optimizer, EightBitAdamW):
        optimizer.forget(parameter)
    else:
        optimizer.state.pop(parameter, None)


def empty_moments(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Those of `parameter`, which are made where it has none yet: as AdamW's first step would."""
    if isinstance(optimizer, EightBitAdamW):
        optimizer.make(parameter)
    elif not (held := optimizer.state[parameter]):
        held["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        held |= {name: torch.zeros_like(parameter) for name in _MOMENTS}
    return moments(optimizer, parameter)
