"""A policy loss: `loss=kbrl_example_parts.loss:successes`, or by the entry point: `loss=example_loss`."""

# ruff: noqa: N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

import torch

from kbrl_async.learning.losses import Tokens
from kbrl_async.learning.settings import Learner


def successes(tokens: Tokens, learner: Learner) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """−ratio·A where A > 0, else nothing: learns from what went better than expected, and forgets the rest. [T]"""
    ratio_T = (tokens.log_pi_T - tokens.log_mu_T).clamp(-20, 20).exp()
    dropped_T = tokens.advantage_T <= 0
    loss_T = torch.where(dropped_T, torch.zeros_like(ratio_T), -ratio_T * tokens.advantage_T)
    return loss_T, {"dropped": dropped_T.to(loss_T.dtype)}
