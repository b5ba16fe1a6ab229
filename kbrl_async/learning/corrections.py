"""Off-policy corrections: weights and masks over tokens, kept apart from the losses so that they compose.

A correction looks at ρ = exp(π_p − μ), the ratio between the learner before this batch and the behaviour policy, and
returns one multiplier a token. Multipliers never carry a gradient.
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

import torch

LOG_RATIO_CLAMP = 20.0
"""Bound on |log ρ| before the exponential: a ratio beyond e^20 is a broken sample, not information."""


def safe_ratio(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """`exp` with its argument clamped, so that a broken sample can't make an infinity."""
    return log_ratio_T.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def tis_weight(log_pi_T: torch.Tensor, log_mu_T: torch.Tensor, cap: float = 2.0) -> torch.Tensor:
    """Truncated importance sampling, per token: min(ρ, C) without gradient (IMPALA's ρ̄; C = 2)."""
    return safe_ratio(log_pi_T.detach() - log_mu_T).clamp(max=cap)


def icepop_mask(
    log_pi_T: torch.Tensor,
    log_mu_T: torch.Tensor,
    low: float = 0.5,
    high: float = 2.0,
) -> torch.Tensor:
    """1 where low ≤ ρ ≤ high, else 0 (IcePop): tokens whose two policies disagree are dropped, not clipped."""
    ratio_T = safe_ratio(log_pi_T.detach() - log_mu_T)
    return ((ratio_T >= low) & (ratio_T <= high)).to(log_mu_T.dtype)
