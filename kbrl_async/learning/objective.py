"""What an update minimises: loss × corrections + KL penalty, composed by name and checked before the first batch.

::

    tokens ─▶ loss [T] ─▶ × correction weights and masks [T] ─▶ + β · KL(π‖π_ref) [T] ─▶ normalised sum

A loss that weighs by an importance ratio itself is not corrected by a weight again (`settings.check_combination`).
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

from collections.abc import Sequence

import torch

from kbrl_async.learning.corrections import Correction, Ratios, multiplier
from kbrl_async.learning.losses import Diagnostics, LossFunction, Tokens
from kbrl_async.learning.settings import CORRECTIONS, LOSSES, Learner, check_combination

KL_CLAMP = 10.0


class Objective:
    """`objective(tokens)` gives the per-token loss and its diagnostics."""

    def __init__(self, loss: str, learner: Learner, corrections: Sequence[str] = ()) -> None:
        """:raises UserError: a name stands for nothing, or parts do not go together."""
        check_combination(loss, corrections)
        self._loss: LossFunction = LOSSES.load(loss)
        self._corrections: list[Correction] = [CORRECTIONS.load(name) for name in corrections]
        self._learner = learner
        self.needs_reference = learner.kl != "none" and learner.kl_weight > 0
        self.needs_proximal = bool(getattr(self._loss, "needs_proximal", False))

    def __call__(self, tokens: Tokens) -> tuple[torch.Tensor, Diagnostics]:
        loss_T, diagnostics = self._loss(tokens, self._learner)
        if self._corrections:
            near_T = tokens.log_pi_T.detach() if tokens.log_prox_T is None else tokens.log_prox_T
            ratios = Ratios(near_T - tokens.log_mu_T, tokens.advantage_T, tokens.sequences())
            weight_T = multiplier(ratios, self._corrections)
            diagnostics = {**diagnostics, "masked": (weight_T == 0).float()}
            # Where the weight is 0 the loss may be anything, even infinite: it must not become 0 · ∞.
            loss_T = torch.where(weight_T > 0, loss_T * weight_T, torch.zeros_like(loss_T))
        if self.needs_reference:
            assert tokens.log_ref_T is not None, "a KL penalty needs the reference's log-probs"
            penalty_T = kl_penalty(tokens.log_pi_T, tokens.log_ref_T, self._learner.kl)
            diagnostics = {**diagnostics, "kl_reference": penalty_T.detach()}
            loss_T = loss_T + self._learner.kl_weight * penalty_T
        return loss_T, diagnostics


def kl_penalty(log_pi_T: torch.Tensor, log_ref_T: torch.Tensor, estimator: str) -> torch.Tensor:
    """Schulman's estimators of KL(π‖π_ref) per token: k1 = π − π_ref; k2 = ½(π − π_ref)²; k3 = e^d − 1 − d with
    d = π_ref − π, clamped to ±10."""
    difference_T = (log_pi_T - log_ref_T).clamp(-KL_CLAMP, KL_CLAMP)
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return 0.5 * difference_T.square()
    return (-difference_T).exp() - 1 + difference_T
