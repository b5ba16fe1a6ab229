"""Policy losses: one small pure function each, on flat token tensors, so that each can be held against its formula.

Notation per token t: μ the log-prob that the sampler recorded, π the learner's now (with gradient), π_p the learner's
before this batch's first step, A the advantage, ratio = exp(π − μ), ρ = exp(π_p − μ), r = exp(π − π_p).

Each takes the settings `learner.*` too, and returns the per-token loss and its diagnostics, also per token: `dropped`
is 1 where the token gave no policy gradient. To add one: such a function, named by `loss=package.module:function`, or
an entry point of the group `kbrl_async.losses`. Ours are named in `settings.LOSSES`.
"""

# ruff: noqa: N803, N806, N815 - capital suffixes of names give tensor shapes
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from kbrl_async.learning.corrections import safe_ratio, sequence_mean, tis_weight
from kbrl_async.learning.settings import Learner

Diagnostics = dict[str, torch.Tensor]


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
    weight_T: torch.Tensor | None = None
    """The corrections that see all of a batch at once, multiplied; None where there are none."""

    def sequences(self) -> torch.Tensor:
        """`sample_T` [T], or one sequence for all."""
        return torch.zeros_like(self.log_mu_T, dtype=torch.long) if self.sample_T is None else self.sample_T


LossFunction = Callable[..., tuple[torch.Tensor, Diagnostics]]
"""`(tokens, learner settings, **constants)` → the loss [T], and what is logged of it."""


def needs_proximal(loss: LossFunction) -> LossFunction:
    """Marks a loss that reads `log_prox_T`, which costs a forward pass over the batch."""
    loss.needs_proximal = True  # type: ignore[attr-defined]
    return loss


def dppo_tv(t: Tokens, learner: Learner, penalty: float = 1e-3, cap: float = 10.0) -> tuple[torch.Tensor, Diagnostics]:
    """−ratio·A·keep + λ·(π − μ)². Drops a token where the step would leave a total-variation ball around μ:
    A > 0 and e^π − e^μ > δ, or A < 0 and e^μ − e^π > δ (DPPO with binary TV; δ .2, λ 1e-3).

    Beyond `cap` the gradient's weight stays at `cap`: a token that the sampler found all but impossible, and that moved
    up although A < 0, is dropped by neither bound, and would outweigh all others."""
    log_ratio_T = t.log_pi_T - t.log_mu_T
    rise_T = (t.log_pi_T.exp() - t.log_mu_T.exp()).detach()
    too_far_T = ((t.advantage_T > 0) & (rise_T > learner.dppo_delta)) | (
        (t.advantage_T < 0) & (-rise_T > learner.dppo_delta)
    )
    ratio_T = safe_ratio(log_ratio_T)
    # capped: value and gradient are those of cap · (1 + log π − sg(log π))
    capped_T = torch.where(ratio_T > cap, cap * (1 + log_ratio_T - log_ratio_T.detach()), ratio_T)
    policy_T = -capped_T * t.advantage_T
    loss_T = torch.where(too_far_T, torch.zeros_like(policy_T), policy_T) + penalty * log_ratio_T.square()
    return loss_T, {"dropped": too_far_T.float()}


def ppo_clip(t: Tokens, learner: Learner) -> tuple[torch.Tensor, Diagnostics]:
    """−min(ratio·A, clip(ratio, 1−ε, 1+ε_hi)·A) (PPO, eq. 7; ε_hi > ε is DAPO's clip-higher), optionally with the dual
    clip max(·, c·A) for A < 0."""
    return _clipped(t.log_pi_T - t.log_mu_T, t.advantage_T, learner.clip_low, learner.clip_high, learner.dual_clip)


@needs_proximal
def decoupled(t: Tokens, learner: Learner, cap: float = 5.0) -> tuple[torch.Tensor, Diagnostics]:
    """min(ρ, C)·max(−r·A, −clip(r)·A): clips around the proximal policy and corrects for the behaviour policy apart
    (Hilton et al., batch-size invariance; AReaL, which caps ρ, too)."""
    assert t.log_prox_T is not None, "decoupled needs the proximal policy's log-probs"
    log_ratio_T = t.log_pi_T - t.log_prox_T
    loss_T, diagnostics = _clipped(log_ratio_T, t.advantage_T, learner.clip_low, learner.clip_high, learner.dual_clip)
    return tis_weight(t.log_prox_T, t.log_mu_T, cap) * loss_T, diagnostics


def tis(t: Tokens, learner: Learner, cap: float = 2.0) -> tuple[torch.Tensor, Diagnostics]:
    """−min(ρ, C)·A·π with ρ taken at the current learner: policy gradient with truncated importance weights."""
    weight_T = tis_weight(t.log_pi_T, t.log_mu_T, cap)
    return -weight_T * t.advantage_T * t.log_pi_T, {"dropped": (weight_T >= cap).float()}


def cispo(t: Tokens, learner: Learner, cap: float = 5.0) -> tuple[torch.Tensor, Diagnostics]:
    """−sg(clip(ratio, 0, C))·A·π (MiniMax-M1's CISPO, C = 5): the weight is clipped, the gradient never vanishes."""
    weight_T = tis_weight(t.log_pi_T, t.log_mu_T, cap)
    return -weight_T * t.advantage_T * t.log_pi_T, {"dropped": torch.zeros_like(weight_T)}


def gspo(t: Tokens, learner: Learner, low: float = 3e-4, high: float = 4e-4) -> tuple[torch.Tensor, Diagnostics]:
    """−min(s·A, clip(s, 1−3e-4, 1+4e-4)·A) with the sequence's ratio s = exp(mean(π − μ)) (GSPO, eq. 5)."""
    log_s_T = sequence_mean(t.log_pi_T - t.log_mu_T, t.sequences())
    return _clipped(log_s_T, t.advantage_T, low, high)


def a3po(t: Tokens, learner: Learner, cap: float = 5.0) -> tuple[torch.Tensor, Diagnostics]:
    """`decoupled` with log π_p ≈ μ + α(π − μ) and α = lag / (lag + 1): no forward pass for the proximal policy
    (A-3PO). Fresh samples have π_p = μ; the older they are, the nearer π_p is to the learner."""
    lag_T = torch.zeros_like(t.log_mu_T) if t.lag_T is None else t.lag_T
    log_prox_T = t.log_mu_T + lag_T / (lag_T + 1) * (t.log_pi_T.detach() - t.log_mu_T)
    return decoupled(dataclasses.replace(t, log_prox_T=log_prox_T), learner, cap)


def reinforce(t: Tokens, learner: Learner) -> tuple[torch.Tensor, Diagnostics]:
    """−A·π (Williams 1992): right only for on-policy samples."""
    return -t.advantage_T * t.log_pi_T, {"dropped": torch.zeros_like(t.log_mu_T)}


def importance_sampling(t: Tokens, learner: Learner) -> tuple[torch.Tensor, Diagnostics]:
    """−ratio·A: the policy gradient for samples of another policy, unbounded; Tinker's loss of that name."""
    ratio_T = safe_ratio(t.log_pi_T - t.log_mu_T)
    return -ratio_T * t.advantage_T, {"dropped": torch.zeros_like(ratio_T)}


def _clipped(
    log_ratio_T: torch.Tensor, advantage_T: torch.Tensor, low: float, high: float, dual: float = 0.0
) -> tuple[torch.Tensor, Diagnostics]:
    ratio_T = safe_ratio(log_ratio_T)
    clipped_T = ratio_T.clamp(1 - low, 1 + high)
    loss_T = torch.maximum(-ratio_T * advantage_T, -clipped_T * advantage_T)
    dropped_T = (-clipped_T * advantage_T > -ratio_T * advantage_T).float()
    if dual > 0:
        bounded_T = torch.minimum(loss_T, -dual * advantage_T)
        dropped_T = torch.where((advantage_T < 0) & (bounded_T < loss_T), torch.ones_like(dropped_T), dropped_T)
        loss_T = torch.where(advantage_T < 0, bounded_T, loss_T)
    return loss_T, {"dropped": dropped_T}


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
    return torch.full(sample_T.shape, 1.0 / (lengths_S.numel() * max(constant, 1)), device=sample_T.device)
