"""What an update minimises: loss × corrections + KL penalty, composed by name and checked before the first batch.

::

    tokens ─▶ loss [T] ─▶ × correction weights and masks [T] ─▶ + β · KL(π‖π_ref) [T] ─▶ normalised sum

A loss that weighs by an importance ratio itself is not corrected by a weight again (`settings.check_combination`).
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kbrl_async.errors import ConfigError
from kbrl_async.learning.corrections import Ratios, is_over_batch, multiplier
from kbrl_async.learning.losses import Diagnostics, LossFunction, Tokens
from kbrl_async.learning.settings import CORRECTIONS, LOSSES, Learner, check_combination

KL_CLAMP = 10.0


class Objective:
    """`objective(tokens)` gives the per-token loss and its diagnostics."""

    def __init__(self, loss: str, learner: Learner, corrections: Sequence[str] = ()) -> None:
        """:raises UserError: a name stands for nothing, or parts do not go together."""
        check_combination(loss, corrections)
        found: LossFunction = LOSSES.load(loss)
        parts = {name: CORRECTIONS.load(name) for name in corrections}
        given = constants_of(learner.constants, {loss: found, **parts})
        self._loss = functools.partial(found, **given.get(loss, {}))
        bound = {name: functools.partial(part, **given.get(name, {})) for name, part in parts.items()}
        self._corrections = [bound[name] for name, part in parts.items() if not is_over_batch(part)]
        self._over_batch = [bound[name] for name, part in parts.items() if is_over_batch(part)]
        self._learner = learner
        self.needs_reference = learner.kl != "none" and learner.kl_weight > 0
        self.needs_proximal = bool(getattr(found, "needs_proximal", False)) or bool(self._over_batch)

    def batch_weights(self, ratios: Ratios) -> torch.Tensor | None:
        """The corrections that see a whole batch at once, multiplied [T]; None where there are none."""
        return multiplier(ratios, self._over_batch) if self._over_batch else None

    def __call__(self, tokens: Tokens) -> tuple[torch.Tensor, Diagnostics]:
        loss_T, diagnostics = self._loss(tokens, self._learner)
        if self._corrections or tokens.weight_T is not None:
            near_T = tokens.log_pi_T.detach() if tokens.log_prox_T is None else tokens.log_prox_T
            ratios = Ratios(near_T - tokens.log_mu_T, tokens.advantage_T, tokens.sequences(), tokens.log_mu_T)
            weight_T = multiplier(ratios, self._corrections)
            weight_T = weight_T if tokens.weight_T is None else weight_T * tokens.weight_T
            diagnostics = {**diagnostics, "masked": (weight_T == 0).float()}
            # Where the weight is 0 the loss may be anything, even infinite: it must not become 0 · ∞.
            loss_T = torch.where(weight_T > 0, loss_T * weight_T, torch.zeros_like(loss_T))
        if self.needs_reference:
            assert tokens.log_ref_T is not None, "a KL penalty needs the reference's log-probs"
            penalty_T = kl_penalty(tokens.log_pi_T, tokens.log_ref_T, self._learner.kl)
            diagnostics = {**diagnostics, "kl_reference": penalty_T.detach()}
            loss_T = loss_T + self._learner.kl_weight * penalty_T
        return loss_T, diagnostics


def constants_of(given: Sequence[str], parts: Mapping[str, Callable[..., Any]]) -> dict[str, dict[str, float]]:
    """`["tis.cap=3"]` → `{"tis": {"cap": 3.0}}`, for parts whose functions take such numbers.

    :raises ConfigError: no such part is used, it has no such constant, or it is no number.
    """
    found: dict[str, dict[str, float]] = {}
    known = {
        f"{name}.{parameter.name}": parameter.default
        for name, part in parts.items()
        for parameter in inspect.signature(part).parameters.values()
        if isinstance(parameter.default, float)
    }
    for text in given:
        key, _, number = text.partition("=")
        if key not in known:
            takes = ", ".join(f"{name}={default:g}" for name, default in known.items()) or "none"
            raise ConfigError(f"learner.constants: {key!r} is no constant of this run", f"It has {takes}")
        name, _, constant = key.rpartition(".")
        try:
            found.setdefault(name, {})[constant] = float(number)
        except ValueError:
            raise ConfigError(f"learner.constants: {text!r} gives no number", f"Write {key}=2") from None
    return found


def kl_penalty(log_pi_T: torch.Tensor, log_ref_T: torch.Tensor, estimator: str) -> torch.Tensor:
    """Schulman's estimators of KL(π‖π_ref) per token: k1 = π − π_ref; k2 = ½(π − π_ref)²; k3 = e^d − 1 − d with
    d = π_ref − π, clamped to ±10.

    As losses, k1 has no gradient on-policy (its mean is that of a score function, 0), and k3's is that of the other
    divergence. k2's gradient (π − π_ref)·∇π is that of KL(π‖π_ref) on-policy: `k1+` and `k3+` have its gradient and
    their own value (straight through).
    """
    difference_T = (log_pi_T - log_ref_T).clamp(-KL_CLAMP, KL_CLAMP)
    if estimator.endswith("+"):
        k2_T = 0.5 * difference_T.square()
        return k2_T + (kl_penalty(log_pi_T, log_ref_T, estimator[:-1]) - k2_T).detach()
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return 0.5 * difference_T.square()
    return (-difference_T).exp() - 1 + difference_T
