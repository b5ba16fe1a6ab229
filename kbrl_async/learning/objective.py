"""What an update minimises: loss × corrections + KL penalty, composed by name and checked before the first batch.

::

    tokens ─▶ loss [T] ─▶ × correction weights and masks [T] ─▶ + β · KL(π‖π_ref) [T] ─▶ normalised sum

Invariants
* A loss that weighs by an importance ratio itself is not corrected by a weight again: that would square the ratio.
* Masks may stand beside any loss.
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

import torch

from kbrl_async.errors import ConfigError
from kbrl_async.learning.corrections import CorrectionOptions, Ratios, find_corrections, multiplier
from kbrl_async.learning.losses import Diagnostics, LossOptions, Tokens, find_loss

WEIGHTS = frozenset({"tis", "tis_sequence"})
"""Corrections that weigh by ρ; the others only drop."""
WEIGHS_ITSELF = frozenset({"decoupled", "a3po", "tis", "cispo", "dppo_tv", "ppo", "grpo", "gspo"})
"""Losses whose policy term carries an importance ratio against the behaviour policy."""
KL_ESTIMATORS = ("none", "k1", "k2", "k3")
KL_CLAMP = 10.0


class Objective:
    """`objective(tokens)` gives the per-token loss and its diagnostics."""

    def __init__(
        self,
        loss: str,
        options: LossOptions,
        corrections: tuple[str, ...] = (),
        correction_options: CorrectionOptions | None = None,
        kl: str = "none",
        kl_weight: float = 0.0,
    ) -> None:
        check_combination(loss, corrections, kl)
        self._loss, self._options = find_loss(loss), options
        self._corrections = find_corrections(corrections)
        self._correction_options = correction_options or CorrectionOptions()
        self._kl, self._kl_weight = kl, kl_weight

    @property
    def needs_reference(self) -> bool:
        return self._kl != "none" and self._kl_weight > 0

    def __call__(self, tokens: Tokens) -> tuple[torch.Tensor, Diagnostics]:
        loss_T, diagnostics = self._loss(tokens, self._options)
        if self._corrections:
            near_T = tokens.log_pi_T.detach() if tokens.log_prox_T is None else tokens.log_prox_T
            ratios = Ratios(near_T - tokens.log_mu_T, tokens.advantage_T, tokens.sequences())
            weight_T = multiplier(ratios, self._corrections, self._correction_options)
            diagnostics = {**diagnostics, "masked": (weight_T == 0).float()}
            # Where the weight is 0 the loss may be anything, even infinite: it must not become 0 · ∞.
            loss_T = torch.where(weight_T > 0, loss_T * weight_T, torch.zeros_like(loss_T))
        if self.needs_reference:
            assert tokens.log_ref_T is not None, "a KL penalty needs the reference's log-probs"
            penalty_T = kl_penalty(tokens.log_pi_T, tokens.log_ref_T, self._kl)
            diagnostics = {**diagnostics, "kl_reference": penalty_T.detach()}
            loss_T = loss_T + self._kl_weight * penalty_T
        return loss_T, diagnostics


def kl_penalty(log_pi_T: torch.Tensor, log_ref_T: torch.Tensor, estimator: str) -> torch.Tensor:
    """Schulman's estimators of KL(π‖π_ref) per token: k1 = π − π_ref; k2 = ½(π − π_ref)²; k3 = e^d − 1 − d with
    d = π_ref − π, clamped to ±10."""
    difference_T = (log_pi_T - log_ref_T).clamp(-KL_CLAMP, KL_CLAMP)
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return 0.5 * difference_T.square()
    if estimator == "k3":
        return (-difference_T).exp() - 1 + difference_T
    raise ConfigError(f"unknown KL estimator {estimator!r}", f"Known ones: {', '.join(KL_ESTIMATORS)}")


def check_combination(loss: str, corrections: tuple[str, ...], kl: str) -> None:
    """ConfigError for parts that do not go together."""
    find_loss(loss)
    find_corrections(corrections)
    if kl not in KL_ESTIMATORS:
        raise ConfigError(f"unknown KL estimator {kl!r}", f"Known ones: {', '.join(KL_ESTIMATORS)}")
    twice = [name for name in corrections if name in WEIGHTS]
    if twice and loss in WEIGHS_ITSELF:
        raise ConfigError(
            f"loss={loss} weighs by the importance ratio itself, and the correction {twice[0]!r} would do so again",
            "Take loss=reinforce with it, or one of the masks: icepop, sequence_mask, geometric_mask, veto, opsm, m2po",
        )
    if len(twice) > 1:
        raise ConfigError("two corrections weigh by the importance ratio", f"Keep one of {', '.join(twice)}")
