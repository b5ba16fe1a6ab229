"""Off-policy corrections: weights and masks over tokens, kept apart from the losses so that they compose.

A correction looks at ρ = exp(π_p − μ), the ratio between the learner before this batch and the behaviour policy (or at
the current learner's, where π_p is not computed), and returns one multiplier a token. Multipliers never carry a
gradient, and several of them are multiplied.

Adding a correction is one function and one line in `CORRECTIONS`.
"""

# ruff: noqa: N803, N806, N815 - capital suffixes of names give tensor shapes
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
import torch

from kbrl_async.errors import ConfigError

LOG_RATIO_CLAMP = 20.0
"""Bound on |log ρ| before the exponential: a ratio beyond e^20 is a broken sample, not information."""


class CorrectionOptions(msgspec.Struct, frozen=True):
    """Constants of all corrections; each reads its own."""

    tis_cap: float = 2.0
    tis_sequence_cap: float = 5.0
    icepop: tuple[float, float] = (0.5, 2.0)
    sequence: tuple[float, float] = (0.5, 2.0)
    geometric: tuple[float, float] = (0.99, 1.01)
    k3_limit: float = 0.1
    """`k3_reject`: most mean k3 of a sequence."""
    veto: float = 1e-4
    """`veto`: smallest ratio of any token of a sequence."""
    opsm_delta: float = 1e-4
    m2po_tau: float = 0.04
    """`m2po`: most mean square of log ρ over the tokens that stay."""


@dataclasses.dataclass(frozen=True)
class Ratios:
    """What a correction sees: all [T], none with a gradient. `sample_T` numbers the sequences of this microbatch."""

    log_rho_T: torch.Tensor
    advantage_T: torch.Tensor
    sample_T: torch.Tensor


Correction = Callable[[Ratios, CorrectionOptions], torch.Tensor]


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


def _tis(r: Ratios, options: CorrectionOptions) -> torch.Tensor:
    return safe_ratio(r.log_rho_T).clamp(max=options.tis_cap)


def _tis_sequence(r: Ratios, options: CorrectionOptions) -> torch.Tensor:
    """min(Π ρ, C) with the log-sum clamped to ±20."""
    return safe_ratio(sequence_sum(r.log_rho_T, r.sample_T)).clamp(max=options.tis_sequence_cap)


def _within(ratio_T: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:
    return ((ratio_T >= bounds[0]) & (ratio_T <= bounds[1])).to(ratio_T.dtype)


def _icepop(r: Ratios, options: CorrectionOptions) -> torch.Tensor:
    """1 where low ≤ ρ ≤ high, else 0 (IcePop): tokens whose two policies disagree are dropped, not clipped."""
    return _within(safe_ratio(r.log_rho_T), options.icepop)


def _sequence_mask(r: Ratios, options: CorrectionOptions) -> torch.Tensor:
    """Keeps sequences whose whole ratio Π ρ lies within the bounds."""
    return _within(safe_ratio(sequence_sum(r.log_rho_T, r.sample_T)), options.sequence)


def _geometric_mask(r: Ratios, options: CorrectionOptions) -> torch.Tensor:
    """Keeps sequences whose geometric mean ratio lies within the bounds."""
    return _within(safe_ratio(sequence_mean(r.log_rho_T, r.sample_T)), options.geometric)


def _k3_reject(r: Ratios, options: CorrectionOptions) -> torch.Tensor:
    """Drops sequences whose mean k3 estimate of KL(μ‖π_p) is above the limit."""
    k3_T = safe_ratio(r.log_rho_T) - 1 - r.log_rho_T
    return (sequence_mean(k3_T, r.sample_T) <= options.k3_limit).to(r.log_rho_T.dtype)


def _veto(r: Ratios, options: CorrectionOptions) -> torch.Tensor:
    """Drops sequences with a token that the learner finds all but impossible (ρ under 1e-4)."""
    bad_T = (safe_ratio(r.log_rho_T) < options.veto).to(r.log_rho_T.dtype)
    return (sequence_sum(bad_T, r.sample_T) == 0).to(r.log_rho_T.dtype)


def _opsm(r: Ratios, options: CorrectionOptions) -> torch.Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2): drops a sequence with A < 0 and mean(μ − π) > δ."""
    drift_T = sequence_mean(-r.log_rho_T, r.sample_T)
    return 1.0 - ((r.advantage_T < 0) & (drift_T > options.opsm_delta)).to(r.log_rho_T.dtype)


def _m2po(r: Ratios, options: CorrectionOptions) -> torch.Tensor:
    """Masks the tokens with the largest (log ρ)² until the mean of the others is at most τ (M2PO)."""
    square_T = r.log_rho_T.square()
    order_T = square_T.argsort()
    mean_T = square_T[order_T].cumsum(0) / torch.arange(1, len(order_T) + 1, device=square_T.device)
    mask_T = torch.zeros_like(square_T)
    mask_T[order_T] = (mean_T <= options.m2po_tau).to(square_T.dtype)
    return mask_T


CORRECTIONS: dict[str, Correction] = {
    "tis": _tis,
    "tis_sequence": _tis_sequence,
    "icepop": _icepop,
    "sequence_mask": _sequence_mask,
    "geometric_mask": _geometric_mask,
    "k3_reject": _k3_reject,
    "veto": _veto,
    "opsm": _opsm,
    "m2po": _m2po,
}


def find_corrections(names: Sequence[str]) -> list[Correction]:
    """The corrections called `names`; ConfigError names the known ones."""
    for name in names:
        if name not in CORRECTIONS:
            raise ConfigError(f"unknown correction {name!r}", f"Known ones: {', '.join(CORRECTIONS)}")
    return [CORRECTIONS[name] for name in names]


def multiplier(ratios: Ratios, corrections: Sequence[Correction], options: CorrectionOptions) -> torch.Tensor:
    """The product of all corrections [T]; ones where there are none."""
    product_T = torch.ones_like(ratios.log_rho_T)
    for correction in corrections:
        product_T = product_T * correction(ratios, options)
    return product_T
