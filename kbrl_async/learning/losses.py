"""Policy losses: one small pure function each, on flat token tensors, so that each can be held against its formula.

Notation per token t: μ the log-prob that the sampler recorded, π the learner's now (with gradient), π_p the learner's
before this batch's first step, A the advantage, ratio = exp(π − μ), ρ = exp(π_p − μ), r = exp(π − π_p).

Adding a loss is one function and one line in `LOSSES`. Each returns the per-token loss and its diagnostics, also per
token: `dropped` is 1 where the token gave no policy gradient.
"""

# ruff: noqa: N803, N806, N815 - capital suffixes of names give tensor shapes
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import torch

from kbrl_async.errors import ConfigError
from kbrl_async.learning.corrections import safe_ratio, sequence_mean, tis_weight

Diagnostics = dict[str, torch.Tensor]


class LossOptions(msgspec.Struct, frozen=True):
    """Constants of all losses; each reads its own."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    """DAPO's clip-higher; .2 is the symmetric PPO clip."""
    dual_clip: float = 0.0
    """Floor c·A of the loss for A < 0 (c = 3 is usual); 0 switches it off."""
    tv_delta: float = 0.2
    tv_penalty: float = 1e-3
    tis_cap: float = 2.0
    cispo_cap: float = 5.0
    gspo_low: float = 3e-4
    gspo_high: float = 4e-4


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Response tokens of a microbatch, flat. All tensors have shape [T]; only `log_pi_T` carries a gradient."""

    log_pi_T: torch.Tensor
    log_mu_T: torch.Tensor
    advantage_T: torch.Tensor
    log_prox_T: torch.Tensor | None = None
    """π_p; None where the loss does not need it."""
    sample_T: torch.Tensor | None = None
    """Number of the sequence in this microbatch that each token belongs to."""
    lag_T: torch.Tensor | None = None
    """Versions between writing the token and this update."""
    log_ref_T: torch.Tensor | None = None
    """The reference policy's log-probs, for a KL penalty."""

    def sequences(self) -> torch.Tensor:
        """`sample_T` [T], or one sequence for all."""
        return torch.zeros_like(self.log_mu_T, dtype=torch.long) if self.sample_T is None else self.sample_T


LossFunction = Callable[[Tokens, LossOptions], tuple[torch.Tensor, Diagnostics]]


def dppo_tv(t: Tokens, options: LossOptions) -> tuple[torch.Tensor, Diagnostics]:
    """−ratio·A·keep + λ·(π − μ)². Drops a token where the step would leave a total-variation ball around μ:
    A > 0 and e^π − e^μ > δ, or A < 0 and e^μ − e^π > δ (DPPO with binary TV; δ .2, λ 1e-3)."""
    log_ratio_T = t.log_pi_T - t.log_mu_T
    rise_T = (t.log_pi_T.exp() - t.log_mu_T.exp()).detach()
    too_far_T = ((t.advantage_T > 0) & (rise_T > options.tv_delta)) | (
        (t.advantage_T < 0) & (-rise_T > options.tv_delta)
    )
    policy_T = -safe_ratio(log_ratio_T) * t.advantage_T
    loss_T = torch.where(too_far_T, torch.zeros_like(policy_T), policy_T) + options.tv_penalty * log_ratio_T.square()
    return loss_T, {"dropped": too_far_T.float()}


def ppo_clip(t: Tokens, options: LossOptions) -> tuple[torch.Tensor, Diagnostics]:
    """−min(ratio·A, clip(ratio, 1−ε, 1+ε_hi)·A) (PPO, eq. 7; ε_hi > ε is DAPO's clip-higher), optionally with the dual
    clip max(·, c·A) for A < 0."""
    return _clipped(t.log_pi_T - t.log_mu_T, t.advantage_T, options)


def decoupled(t: Tokens, options: LossOptions) -> tuple[torch.Tensor, Diagnostics]:
    """ρ·max(−r·A, −clip(r)·A): clips around the proximal policy and corrects for the behaviour policy apart
    (Hilton et al., batch-size invariance; AReaL)."""
    assert t.log_prox_T is not None, "decoupled needs the proximal policy's log-probs"
    loss_T, diagnostics = _clipped(t.log_pi_T - t.log_prox_T, t.advantage_T, options)
    return safe_ratio(t.log_prox_T - t.log_mu_T) * loss_T, diagnostics


def tis(t: Tokens, options: LossOptions) -> tuple[torch.Tensor, Diagnostics]:
    """−min(ρ, C)·A·π with ρ taken at the current learner: policy gradient with truncated importance weights."""
    weight_T = tis_weight(t.log_pi_T, t.log_mu_T, options.tis_cap)
    return -weight_T * t.advantage_T * t.log_pi_T, {"dropped": (weight_T >= options.tis_cap).float()}


def cispo(t: Tokens, options: LossOptions) -> tuple[torch.Tensor, Diagnostics]:
    """−sg(clip(ratio, 0, C))·A·π (MiniMax-M1's CISPO, C = 5): the weight is clipped, the gradient never vanishes."""
    weight_T = tis_weight(t.log_pi_T, t.log_mu_T, options.cispo_cap)
    return -weight_T * t.advantage_T * t.log_pi_T, {"dropped": torch.zeros_like(weight_T)}


def gspo(t: Tokens, options: LossOptions) -> tuple[torch.Tensor, Diagnostics]:
    """−min(s·A, clip(s, 1−3e-4, 1+4e-4)·A) with the sequence's ratio s = exp(mean(π − μ)) (GSPO, eq. 5)."""
    log_s_T = sequence_mean(t.log_pi_T - t.log_mu_T, t.sequences())
    bounds = msgspec.structs.replace(options, clip_low=options.gspo_low, clip_high=options.gspo_high, dual_clip=0.0)
    return _clipped(log_s_T, t.advantage_T, bounds)


def a3po(t: Tokens, options: LossOptions) -> tuple[torch.Tensor, Diagnostics]:
    """`decoupled` with log π_p ≈ μ + α(π − μ) and α = lag / (lag + 1): no forward pass for the proximal policy
    (A-3PO). Fresh samples have π_p = μ; the older they are, the nearer π_p is to the learner."""
    lag_T = torch.zeros_like(t.log_mu_T) if t.lag_T is None else t.lag_T
    log_prox_T = t.log_mu_T + lag_T / (lag_T + 1) * (t.log_pi_T.detach() - t.log_mu_T)
    return decoupled(dataclasses.replace(t, log_prox_T=log_prox_T), options)


def reinforce(t: Tokens, options: LossOptions) -> tuple[torch.Tensor, Diagnostics]:
    """−A·π (Williams 1992): right only for on-policy samples."""
    return -t.advantage_T * t.log_pi_T, {"dropped": torch.zeros_like(t.log_mu_T)}


def _clipped(
    log_ratio_T: torch.Tensor, advantage_T: torch.Tensor, options: LossOptions
) -> tuple[torch.Tensor, Diagnostics]:
    ratio_T = safe_ratio(log_ratio_T)
    clipped_T = ratio_T.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss_T = torch.maximum(-ratio_T * advantage_T, -clipped_T * advantage_T)
    dropped_T = (-clipped_T * advantage_T > -ratio_T * advantage_T).float()
    if options.dual_clip > 0:
        bounded_T = torch.minimum(loss_T, -options.dual_clip * advantage_T)
        dropped_T = torch.where((advantage_T < 0) & (bounded_T < loss_T), torch.ones_like(dropped_T), dropped_T)
        loss_T = torch.where(advantage_T < 0, bounded_T, loss_T)
    return loss_T, {"dropped": dropped_T}


LOSSES: dict[str, LossFunction] = {
    "dppo_tv": dppo_tv,
    "grpo": ppo_clip,
    "ppo": ppo_clip,
    "decoupled": decoupled,
    "tis": tis,
    "cispo": cispo,
    "gspo": gspo,
    "a3po": a3po,
    "reinforce": reinforce,
}
NEEDS_PROXIMAL = frozenset({"decoupled"})
NORMALISATIONS = ("token_mean", "sequence_mean", "dr_grpo")


def find_loss(name: str) -> LossFunction:
    """The loss called `name`; ConfigError names the known ones."""
    if name not in LOSSES:
        raise ConfigError(f"unknown loss {name!r}", f"Known losses: {', '.join(LOSSES)}")
    return LOSSES[name]


def token_weights(lengths_S: torch.Tensor, sample_T: torch.Tensor, how: str, constant: int) -> torch.Tensor:
    """Weights [T] that make a sum over all tokens of a minibatch the wanted mean.

    `lengths_S` are the response lengths of ALL samples of the minibatch, `sample_T` the sample of each token here.
    `token_mean`: 1/Σ lengths (DAPO). `sequence_mean`: 1/(S·length) (GRPO). `dr_grpo`: 1/(S·constant), which takes the
    length bias out (Dr. GRPO, eq. 3).
    """
    if how == "token_mean":
        return torch.full(sample_T.shape, 1.0 / float(lengths_S.sum().clamp(min=1)), device=sample_T.device)
    if how == "sequence_mean":
        return 1.0 / (lengths_S.numel() * lengths_S[sample_T].clamp(min=1).float())
    if how == "dr_grpo":
        return torch.full(sample_T.shape, 1.0 / (lengths_S.numel() * max(constant, 1)), device=sample_T.device)
    raise ConfigError(f"unknown loss normalisation {how!r}", f"Known ones: {', '.join(NORMALISATIONS)}")
