"""What one update says of itself: gathered by microbatch, reduced in one place.

The importance ratio here is exp(π − μ). `mismatch_*` is taken in the first minibatch before any step: with fresh
samples it measures the numerics of sampler against learner, with stale ones their age too.
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

from collections.abc import Sequence

import torch

from kbrl_async.learning.corrections import safe_ratio
from kbrl_async.learning.distributed import ProcessGroup
from kbrl_async.learning.losses import Diagnostics, Tokens
from protocols.records import TrainSample

_SHARES = {"dropped": "dropped_share", "masked": "masked_share", "kl_reference": "kl_reference"}


class StepLog:
    """Accumulates one `Trainer.step`."""

    def __init__(self, proximal_s: float) -> None:
        self.proximal_s = proximal_s
        self.gradient_s = 0.0
        self.total_s = 0.0
        self._log_ratios: list[torch.Tensor] = []
        self._fresh: list[torch.Tensor] = []
        self._entropies: list[torch.Tensor] = []
        self._diagnostics: dict[str, list[torch.Tensor]] = {}
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._rate = 0.0
        self._inputs = 0
        self._first_minibatch = -1
        self._first_epoch = -1
        self._merged = 0
        self._inputs_merged = 0

    def microbatch(self, tokens: Tokens, entropy_T: torch.Tensor, diagnostics: Diagnostics, inputs: int) -> None:
        # Stays on the device: bringing it here would make the host wait between microbatches.
        self._log_ratios.append((tokens.log_pi_T.detach() - tokens.log_mu_T).float())
        if self._first_minibatch < 0 and tokens.lag_T is not None:
            self._fresh.append(tokens.lag_T == 0)
        self._entropies.append(entropy_T.float())
        for name, value_T in diagnostics.items():
            self._diagnostics.setdefault(name, []).append(value_T.detach().float())
        self._inputs += inputs

    def merge(self, ranks: ProcessGroup) -> None:
        """Puts the other ranks' tokens of this minibatch beside this one's."""
        series: list[list[torch.Tensor]] = [self._log_ratios, self._entropies]
        series += [self._diagnostics[name] for name in sorted(self._diagnostics)]
        if self._first_minibatch < 0 and self._fresh:
            series.append(self._fresh)
        new = [values[self._merged :] for values in series]
        mine_KT = torch.stack([torch.cat(values).float() for values in new]) if new[0] else torch.zeros(0, 0)
        for values, merged_T in zip(series, ranks.gathered(mine_KT.to(ranks.device)), strict=False):
            values[self._merged :] = [merged_T.bool() if values is self._fresh else merged_T]
        self._merged += 1
        self._inputs = self._inputs_merged + int(ranks.total(torch.tensor(self._inputs - self._inputs_merged)))
        self._inputs_merged = self._inputs

    def optimizer(self, loss: float, norm: float | None, rate: float) -> None:
        """`norm` of the gradient: None where who takes the step does not say."""
        self._losses.append(loss)
        self._norms += [] if norm is None else [norm]
        self._rate = rate
        if self._first_minibatch < 0:
            self._first_minibatch = len(self._log_ratios)

    def end_of_first_epoch(self) -> None:
        self._first_epoch = len(self._log_ratios)

    def summary(self, samples: Sequence[TrainSample], optimizer_step: int) -> dict[str, float]:
        """Flat metrics of the whole update."""
        log_ratio_T = torch.cat(self._log_ratios).cpu()
        ratio_T = safe_ratio(log_ratio_T)
        first_T = torch.cat(self._log_ratios[: self._first_minibatch]).cpu()
        lengths = [len(s.token_ids) for s in samples]
        return {
            "loss": sum(self._losses) / len(self._losses),
            **self._gradient_norms(),
            "lr": self._rate,
            "optimizer_step": float(optimizer_step),
            **_quantiles(ratio_T),
            **{_SHARES.get(name, name): float(torch.cat(values).mean()) for name, values in self._diagnostics.items()},
            "mismatch_kl": k3(first_T),
            **self._mismatch_on_equal_weights(first_T),
            "mismatch_ratio_max": float(safe_ratio(first_T.abs()).max()),
            "entropy": float(torch.cat(self._entropies[: self._first_epoch]).mean()),
            "entropy_last": float(torch.cat(self._entropies[self._first_epoch :] or self._entropies).mean()),
            "ess": ess(safe_ratio(torch.cat(self._log_ratios[: self._first_epoch]))),
            "samples": float(len(samples)),
            "response_tokens": float(sum(lengths)),
            "response_length": sum(lengths) / len(lengths),
            "input_tokens": float(self._inputs),
            "reward_mean": sum(s.reward for s in samples) / len(samples),
            "advantage_abs": sum(abs(s.advantage) for s in samples) / len(samples),
            "proximal_s": self.proximal_s,
            "gradient_s": self.gradient_s,
            "total_s": self.total_s,
            "tokens_per_s": self._inputs / max(self.gradient_s, 1e-9),
        }

    def _gradient_norms(self) -> dict[str, float]:
        norms = self._norms
        return {"grad_norm": sum(norms) / len(norms), "grad_norm_max": max(norms)} if norms else {}

    def _mismatch_on_equal_weights(self, first_T: torch.Tensor) -> dict[str, float]:
        """Of samples as new as the policy: what sampler and learner differ by in their numerics alone."""
        chosen_T = first_T[torch.cat(self._fresh).cpu()] if self._fresh else first_T[:0]
        return {"mismatch_kl_fresh": k3(chosen_T)} if len(chosen_T) else {}


def staleness(samples: Sequence[TrainSample], version: int) -> dict[str, float]:
    """Mean and largest age, in versions, of samples trained on `version`."""
    ages = [version - s.policy_version for s in samples]
    return {"staleness_mean": sum(ages) / len(ages), "staleness_max": float(max(ages))}


def ess(weight_T: torch.Tensor) -> float:
    """Effective sample size as a share: (Σw)² / (N·Σw²); 1 when all weights are equal."""
    w = weight_T.double()
    return float(w.sum().square() / (len(w) * w.square().sum()))


def k3(log_ratio_T: torch.Tensor) -> float:
    """Schulman's k3 estimate of KL(μ‖π) from samples of μ: mean of exp(d) − 1 − d with d = π − μ; never negative."""
    d = log_ratio_T.double().clamp(-20, 20)
    return float((d.exp() - 1 - d).mean())


def _quantiles(ratio_T: torch.Tensor) -> dict[str, float]:
    # torch.quantile refuses more than 2^24 elements; sorting does not.
    ordered_T = ratio_T.sort().values
    last = len(ordered_T) - 1
    picks = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
    return {
        **{f"ratio_{name}": float(ordered_T[round(q * last)]) for name, q in picks.items()},
        "ratio_max": float(ordered_T[-1]),
    }
