"""The optimizer and its schedule, shared by RL and supervised training."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from kbrl_async.errors import ConfigError, NonFiniteLoss
from kbrl_async.learning.eight_bit import EightBitAdamW

BETAS = (0.9, 0.95)


def make_adamw(
    parameters: Iterable[torch.nn.Parameter], learning_rate: float, *, eight_bit: bool = False
) -> torch.optim.Optimizer:
    """AdamW without weight decay over the trainable ones of `parameters`, fused (one pass over memory).

    :raises MissingTool: `eight_bit` moments, and no torchao.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if not trainable:
        raise ConfigError("the model has no trainable parameters", "Wrap it in LoRA or unfreeze its weights")
    if eight_bit:
        return EightBitAdamW(trainable, learning_rate, BETAS)
    return torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.0, betas=BETAS, fused=True)


def rate_at(step: int, peak: float, warmup: int, schedule: str, progress: float, floor: float = 0.1) -> float:
    """Learning rate of optimiser step `step` (from 0): linear warm-up, then constant or a cosine down to floor·peak.

    `progress` in [0, 1] is the share of the run that is done; a pure function, so that resume needs no state.
    """
    warm = min(1.0, (step + 1) / warmup) if warmup > 0 else 1.0
    if schedule == "constant":
        return peak * warm
    cosine = 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
    return peak * warm * (floor + (1 - floor) * cosine)


def guarded_step(optimizer: torch.optim.Optimizer, loss: float, clip: float, rate: float) -> float:
    """Clips, checks that loss and gradient are finite, then steps; returns the gradient norm before clipping.

    Where parameters are sharded, loss and norm are those of all ranks, which so decide alike. NonFiniteLoss leaves
    weights and optimizer state untouched and clears the gradients.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    total = total.full_tensor() if isinstance(total, DTensor) else total
    norm = float(total)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        optimizer.zero_grad(set_to_none=True)
        raise NonFiniteLoss(
            f"loss {loss} or gradient norm {norm} is not finite; the step was not taken",
            "Lower the learning rate, or look at the batch's log-probs and advantages",
        )
    torch.nn.utils.clip_grads_with_norm_(parameters, clip if clip > 0 else math.inf, total)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
