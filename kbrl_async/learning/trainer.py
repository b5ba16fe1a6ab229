"""The RL trainer: groups of samples in, one policy update and its metrics out.

::

    groups ─ flatten, shuffle ─▶ minibatches ─ pack ─▶ microbatches ─ forward, loss, backward ─▶ AdamW
                 └─ × epochs                                └─ π_p first, where the loss needs it

Invariants
* Nothing that isn't finite reaches the weights: inputs are checked before the first step, loss and gradient norm before
  each step.
* The same state, groups and options give the same weights: order comes from the trainer's own generator.
* The temperature is that of the samples, so an unchanged policy has importance ratio 1.
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from kbrl_async.errors import ConfigError, NonFiniteLoss
from kbrl_async.learning import metrics as m
from kbrl_async.learning.adapters import active, adapter_names, adapter_of
from kbrl_async.learning.corrections import CorrectionOptions
from kbrl_async.learning.logprobs import batch_logprobs
from kbrl_async.learning.losses import NEEDS_PROXIMAL, LossOptions, Tokens, token_weights
from kbrl_async.learning.models import causal_lm
from kbrl_async.learning.objective import Objective
from kbrl_async.learning.optimizer import guarded_step, make_adamw, rate_at
from kbrl_async.learning.packing import Microbatch, pack
from protocols.records import TrainGroup, TrainSample


class TrainerOptions(msgspec.Struct, frozen=True):
    """Everything that shapes an update. Defaults suit a small policy on a CPU."""

    loss: str = "dppo_tv"
    loss_options: LossOptions = LossOptions()
    corrections: tuple[str, ...] = ()
    correction_options: CorrectionOptions = CorrectionOptions()
    kl: str = "none"
    """Estimator of the KL divergence from the reference policy: none, k1, k2 or k3."""
    kl_weight: float = 0.0
    normalise: str = "token_mean"
    dr_grpo_length: int = 256
    """The constant of `normalise = "dr_grpo"`."""
    negative_scale: float = 1.0
    """Negative advantages are multiplied by this; below 1 keeps entropy up."""
    learning_rate: float = 2e-4
    warmup_steps: int = 8
    """Optimiser steps, not batches."""
    schedule: str = "constant"
    total_steps: int = 0
    """Optimiser steps of the whole run, for `cosine`."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    epochs: int = 2
    minibatches: int = 2
    token_budget: int = 2048
    """Input tokens of one microbatch, padding included."""
    tree_tokens: int = 768
    """Longest row in which samples share their prompt; 0 switches sharing off."""
    chunk_elements: int = 1 << 24
    """Most logits that exist at once."""
    dtype: str = "fp32"
    """`"bf16"` runs forward and backward in autocast."""
    seed: int = 0


class Trainer:
    """Owns optimizer, step counter and data order of one policy.

    trainer = Trainer(model, TrainerOptions(), "cpu")
    metrics = trainer.step(groups, temperature=1.0)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: TrainerOptions,
        device: str | torch.device = "cpu",
        clock: Callable[[], float] = time.perf_counter,
        reference: torch.nn.Module | None = None,
    ) -> None:
        if options.dtype not in ("fp32", "bf16"):
            raise ConfigError(f"unknown training dtype {options.dtype!r}", "Use fp32 or bf16")
        self.model = model
        self.options = options
        self.device = torch.device(device)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        """All that is trained, by name: switching between adapters hides the others' from `requires_grad`."""
        self._adapters = adapter_names(model)
        self.optimizer = make_adamw(
            self.parameters.values(), options.learning_rate, options.weight_decay, options.betas
        )
        self.optimizer_step = 0
        self.order = torch.Generator().manual_seed(options.seed)
        self.objective = Objective(
            options.loss,
            options.loss_options,
            options.corrections,
            options.correction_options,
            options.kl,
            options.kl_weight,
        )
        if self.objective.needs_reference and reference is None and not hasattr(model, "disable_adapter"):
            raise ConfigError("a KL penalty needs a reference policy", "Give one, or train a LoRA adapter")
        self._reference = reference
        self._clock = clock

    def step(
        self,
        groups: Sequence[TrainGroup],
        temperature: float,
        tick: Callable[[], None] = lambda: None,
        version: int | None = None,
    ) -> dict[str, float]:
        """`epochs` × `minibatches` optimiser steps on `groups`. `tick` is called after every microbatch.

        With `version`, the policy version before this step, the metrics tell the samples' ages. Raises NonFiniteLoss
        before the optimiser step that would have been spoilt (earlier ones of this call have been taken).
        """
        samples = [sample for group in groups for sample in group.samples if sample.token_ids]
        if not samples:
            raise ConfigError("a batch without response tokens", "Groups must hold samples with tokens")
        _check_finite(samples)
        started = self._clock()
        recorded = self._flatten(samples)
        if self.options.loss in NEEDS_PROXIMAL:
            recorded.log_prox_T = self._proximal(samples, temperature, tick)
        if self.objective.needs_reference:
            recorded.log_ref_T = self._reference_logprobs(samples, temperature, tick)
        if version is not None:
            recorded.lag_T = self._spread([float(max(0, version - s.policy_version)) for s in samples], samples)
        log = m.StepLog(proximal_s=self._clock() - started)
        for epoch in range(self.options.epochs):
            for chosen in self._minibatches(len(samples)):
                self._minibatch(samples, chosen, recorded, temperature, log, tick)
            if epoch == 0:
                log.end_of_first_epoch()
        log.total_s = self._clock() - started
        ages = {} if version is None else m.staleness(samples, version)
        return {**log.summary(samples, self.optimizer_step), **ages}

    def _minibatches(self, n: int) -> list[list[int]]:
        """A partition of the samples into at most `minibatches` parts, in random order."""
        order: list[int] = torch.randperm(n, generator=self.order).tolist()
        parts = min(self.options.minibatches, n)
        # Sorted inside a part: neighbours share their prompt, and packing keys on that.
        return [sorted(order[i::parts]) for i in range(parts)]

    def _minibatch(
        self,
        samples: list[TrainSample],
        chosen: list[int],
        recorded: _Flat,
        temperature: float,
        log: m.StepLog,
        tick: Callable[[], None],
    ) -> None:
        lengths_S = torch.tensor([len(samples[i].token_ids) for i in chosen], device=self.device)
        where = torch.tensor(chosen)
        total = 0.0
        started = self._clock()
        for adapter, batch in self._pack([samples[i] for i in chosen]):
            # Held through the backward pass: gradient checkpointing runs the forward pass again there.
            with active(self.model, adapter):
                flat_T = recorded.start_S[where[batch.sample_T]] + batch.offset_T
                total += self._microbatch(batch, flat_T, lengths_S, recorded, temperature, log)
            tick()
        log.gradient_s += self._clock() - started
        rate = self._rate()
        norm = guarded_step(self.optimizer, total, self.options.grad_clip, rate)
        self.optimizer_step += 1
        log.optimizer(total, norm, rate)

    def _microbatch(
        self,
        batch: Microbatch,
        flat_T: torch.Tensor,
        lengths_S: torch.Tensor,
        recorded: _Flat,
        temperature: float,
        log: m.StepLog,
    ) -> float:
        """Forward, loss and backward of one microbatch; its part of the minibatch's loss."""
        log_pi_T, entropy_T = self._forward(batch, temperature)
        tokens = self._tokens(log_pi_T, batch, flat_T, recorded)
        loss_T, diagnostics = self.objective(tokens)
        weight_T = token_weights(
            lengths_S, batch.sample_T.to(self.device), self.options.normalise, self.options.dr_grpo_length
        )
        loss = (loss_T * weight_T).sum()
        if not torch.isfinite(loss):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteLoss(
                f"loss is {float(loss.detach())}; the step was not taken",
                "Lower the learning rate or look at the batch",
            )
        loss.backward()  # type: ignore[no-untyped-call]
        log.microbatch(tokens, entropy_T, diagnostics, batch.input_BL.numel())
        return float(loss.detach())

    def _tokens(self, log_pi_T: torch.Tensor, batch: Microbatch, flat_T: torch.Tensor, recorded: _Flat) -> Tokens:
        def part(values_T: torch.Tensor | None) -> torch.Tensor | None:
            return None if values_T is None else values_T[flat_T].to(self.device)

        advantage_T = recorded.advantage_T[flat_T].to(self.device)
        return Tokens(
            log_pi_T,
            recorded.log_mu_T[flat_T].to(self.device),
            torch.where(advantage_T < 0, advantage_T * self.options.negative_scale, advantage_T),
            part(recorded.log_prox_T),
            batch.sample_T.to(self.device),
            part(recorded.lag_T),
            part(recorded.log_ref_T),
        )

    def _rate(self) -> float:
        o = self.options
        progress = self.optimizer_step / o.total_steps if o.total_steps > 0 else 0.0
        return rate_at(self.optimizer_step, o.learning_rate, o.warmup_steps, o.schedule, progress)

    def _pack(self, samples: list[TrainSample]) -> list[tuple[str, Microbatch]]:
        """Microbatches, each with the adapter that all its samples belong to."""
        members: dict[str, list[int]] = {}
        for index, sample in enumerate(samples):
            members.setdefault(adapter_of(sample.role, self._adapters), []).append(index)
        packed = []
        for adapter, indices in members.items():
            where = torch.tensor(indices)
            batches = pack([samples[i] for i in indices], self.options.token_budget, self.options.tree_tokens)
            packed += [(adapter, dataclasses.replace(b, sample_T=where[b.sample_T])) for b in batches]
        return packed

    def _forward(
        self, batch: Microbatch, temperature: float, model: torch.nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = causal_lm(self.model if model is None else model)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.dtype == "bf16"):
            return batch_logprobs(chosen, batch.to(self.device), temperature, self.options.chunk_elements)

    @torch.no_grad()
    def _proximal(
        self,
        samples: list[TrainSample],
        temperature: float,
        tick: Callable[[], None],
        model: torch.nn.Module | None = None,
    ) -> torch.Tensor:
        starts_S = _starts(samples)
        out_T = torch.zeros(sum(len(s.token_ids) for s in samples))
        for adapter, batch in self._pack(samples):
            with active(self.model if model is None else model, adapter):
                logp_T, _ = self._forward(batch, temperature, model)
            out_T[starts_S[batch.sample_T] + batch.offset_T] = logp_T.float().cpu()
            tick()
        return out_T

    def _reference_logprobs(
        self, samples: list[TrainSample], temperature: float, tick: Callable[[], None]
    ) -> torch.Tensor:
        """Of the policy that training started from: its own module, or the base under the LoRA adapter."""
        if self._reference is not None:
            return self._proximal(samples, temperature, tick, self._reference)
        with self.model.disable_adapter():  # type: ignore[operator]
            return self._proximal(samples, temperature, tick)

    def _spread(self, values: list[float], samples: list[TrainSample]) -> torch.Tensor:
        return torch.tensor(values).repeat_interleave(torch.tensor([len(s.token_ids) for s in samples]))

    def logprobs(self, samples: Sequence[TrainSample], temperature: float) -> list[list[float]]:
        """The learner's log-probs of each sample's response tokens: for tests, audits and references."""
        flat_T = self._proximal(list(samples), temperature, lambda: None)
        return [part.tolist() for part in torch.split(flat_T, [len(s.token_ids) for s in samples])]

    def _flatten(self, samples: list[TrainSample]) -> _Flat:
        log_mu_T = torch.tensor([x for s in samples for x in s.logprobs])
        return _Flat(_starts(samples), log_mu_T, self._spread([s.advantage for s in samples], samples))


class _Flat:
    """The recorded side of a batch, flat over all response tokens."""

    def __init__(self, start_S: torch.Tensor, log_mu_T: torch.Tensor, advantage_T: torch.Tensor) -> None:
        self.start_S = start_S
        self.log_mu_T = log_mu_T
        self.advantage_T = advantage_T
        self.log_prox_T: torch.Tensor | None = None
        self.lag_T: torch.Tensor | None = None
        self.log_ref_T: torch.Tensor | None = None


def _starts(samples: list[TrainSample]) -> torch.Tensor:
    lengths = torch.tensor([len(s.token_ids) for s in samples])
    return lengths.cumsum(0) - lengths


def _check_finite(samples: list[TrainSample]) -> None:
    for sample in samples:
        if len(sample.logprobs) != len(sample.token_ids):
            raise NonFiniteLoss(
                f"{sample.rollout_id} has {len(sample.logprobs)} log-probs for {len(sample.token_ids)} tokens",
                "The sampler must record one log-prob for each token",
            )
        if not (math.isfinite(sample.advantage) and all(map(math.isfinite, sample.logprobs))):
            raise NonFiniteLoss(
                f"{sample.rollout_id} carries an advantage or log-prob that is not finite", "Look at its sampler"
            )
