"""Off-policy corrections: weights and masks over tokens, kept apart from the losses so that they compose.

A correction looks at ρ = exp(π_p − μ), the ratio between the learner before this batch and the behaviour policy (or at
the current learner's, where π_p is not computed), and returns one multiplier a token. Multipliers never carry a
gradient, and several of them are multiplied.

To add one: a function of `Ratios`, named by `corrections=package.module:function`, or an entry point of the group
`kbrl_async.corrections`. Ours are named in `settings.CORRECTIONS`.
"""

# ruff: noqa: N803, N806, N815 - capital suffixes of names give tensor shapes
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

LOG_RATIO_CLAMP = 20.0
"""Bound on |log ρ| before the exponential: a ratio beyond e^20 is a broken sample, not information."""


@dataclasses.dataclass(frozen=True)
class Ratios:
    """What a correction sees: all [T], none with a gradient. `sample_T` numbers the sequences of this microbatch."""

    log_rho_T: torch.Tensor
    advantage_T: torch.Tensor
    sample_T: torch.Tensor
    log_mu_T: torch.Tensor
    """Of the behaviour policy; with `log_rho_T` it is the learner's own."""


Correction = Callable[..., torch.Tensor]
"""`(ratios, **constants)` → one multiplier a token [T]."""


def over_batch(correction: Correction) -> Correction:
    """Marks a correction that compares tokens of different sequences. It sees a whole batch, so that it does not
    depend on how microbatches are packed; that needs π_p, which costs a forward pass over the batch."""
    correction.over_batch = True  # type: ignore[attr-defined]
    return correction


def is_over_batch(correction: Correction) -> bool:
    return bool(getattr(correction, "over_batch", False))


def safe_ratio(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """`exp` with its argument clamped, so that a broken sample can't make an infinity."""
    return log_ratio_T.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def sequence_sum(value_T: torch.Tensor, sample_T: torch.Tensor) -> torch.Tensor:
    """Σ over each token's sequence, at each token [T]."""
    size = int(sample_T.max()) + 1 if sample_T.numel() else 0
    return torch.zeros(size, dtype=value_T.dtype, device=value_T.device).index_add(0, sample_T, value_T)[sample_T]


def sequence_mean(value_T: torch.Tensor, sample_T: torch.Tensor) -> torch.Tensor:
    """The mean over each token's sequence, at each token [T]."""
    return sequence_sum(value_T, sample_T) / sequence_sum(torch.ones_like(value_T), sample_T)


def tis_weight(log_pi_T: torch.Tensor, log_mu_T: torch.Tensor, cap: float = 2.0) -> torch.Tensor:
    """Truncated importance sampling, per token: min(ρ, C) without gradient (IMPALA's ρ̄; C = 2)."""
    return safe_ratio(log_pi_T.detach() - log_mu_T).clamp(max=cap)


def tis(r: Ratios, cap: float = 2.0) -> torch.Tensor:
    """min(ρ, C), per token."""
    return safe_ratio(r.log_rho_T).clamp(max=cap)


def tis_sequence(r: Ratios, cap: float = 5.0) -> torch.Tensor:
    """min(Π ρ, C) with the log-sum clamped to ±20."""
    return safe_ratio(sequence_sum(r.log_rho_T, r.sample_T)).clamp(max=cap)


def _within(ratio_T: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return ((ratio_T >= low) & (ratio_T <= high)).to(ratio_T.dtype)


def icepop(r: Ratios, low: float = 0.5, high: float = 2.0) -> torch.Tensor:
    """1 where low ≤ ρ ≤ high, else 0 (IcePop): tokens whose two policies disagree are dropped, not clipped."""
    return _within(safe_ratio(r.log_rho_T), low, high)


def sequence_mask(r: Ratios, low: float = 0.5, high: float = 2.0) -> torch.Tensor:
    """Keeps sequences whose whole ratio Π ρ lies within the bounds."""
    return _within(safe_ratio(sequence_sum(r.log_rho_T, r.sample_T)), low, high)


def geometric_mask(r: Ratios, low: float = 0.99, high: float = 1.01) -> torch.Tensor:
    """Keeps sequences whose geometric mean ratio lies within the bounds."""
    return _within(safe_ratio(sequence_mean(r.log_rho_T, r.sample_T)), low, high)


def k3_reject(r: Ratios, limit: float = 0.1) -> torch.Tensor:
    """Drops sequences whose mean k3 estimate of KL(μ‖π_p) is above `limit`."""
    k3_T = safe_ratio(r.log_rho_T) - 1 - r.log_rho_T
    return (sequence_mean(k3_T, r.sample_T) <= limit).to(r.log_rho_T.dtype)


def veto(r: Ratios, least: float = 1e-4) -> torch.Tensor:
    """Drops sequences with a token that the learner finds all but impossible (ρ under `least`)."""
    bad_T = (safe_ratio(r.log_rho_T) < least).to(r.log_rho_T.dtype)
    return (sequence_sum(bad_T, r.sample_T) == 0).to(r.log_rho_T.dtype)


def opsm(r: Ratios, delta: float = 1e-4) -> torch.Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2): drops a sequence with A < 0 and mean(μ − π) > δ."""
    drift_T = sequence_mean(-r.log_rho_T, r.sample_T)
    return 1.0 - ((r.advantage_T < 0) & (drift_T > delta)).to(r.log_rho_T.dtype)


@over_batch
def m2po(r: Ratios, tau: float = 0.04) -> torch.Tensor:
    """Masks the tokens of a batch with the largest (log ρ)² until the mean of the others is at most τ (M2PO)."""
    square_T = r.log_rho_T.square()
    order_T = square_T.argsort()
    mean_T = square_T[order_T].cumsum(0) / torch.arange(1, len(order_T) + 1, device=square_T.device)
    mask_T = torch.zeros_like(square_T)
    mask_T[order_T] = (mean_T <= tau).to(square_T.dtype)
    return mask_T


@over_batch
def clip_cov(r: Ratios, share: float = 2e-3) -> torch.Tensor:
    """Drops the `share` of a batch's tokens for which log π and A vary together most: by these few, likely ones with
    large advantages, entropy falls (Clip-Cov and KL-Cov, Cui et al. 2025; theirs are drawn between two bounds)."""
    log_pi_T = r.log_rho_T + r.log_mu_T
    covariance_T = (log_pi_T - log_pi_T.mean()) * (r.advantage_T - r.advantage_T.mean())
    most = covariance_T.argsort(descending=True)[: math.ceil(share * len(covariance_T))]
    mask_T = torch.ones_like(r.log_rho_T)
    mask_T[most] = (covariance_T[most] <= 0).to(mask_T.dtype)
    return mask_T


def multiplier(ratios: Ratios, corrections: Sequence[Callable[[Ratios], torch.Tensor]]) -> torch.Tensor:
    """The product of all corrections [T]; ones where there are none."""
    product_T = torch.ones_like(ratios.log_rho_T)
    for correction in corrections:
        product_T = product_T * correction(ratios)
    return product_T
