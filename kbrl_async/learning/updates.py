"""How a batch becomes optimiser steps, whoever computes gradients and takes steps: the flow that all trainers share.

::

    groups ─ flatten, shuffle ─▶ minibatches ─ passes.run ─▶ visit(scored): loss ─▶ step
                 └─ × epochs                     └─ π_p first, where the loss needs it

Invariants
* Nothing that isn't finite reaches the weights: inputs are checked before the first step, loss and gradient norm before
  each step.
* The same state, groups and settings give the same weights: order comes from the trainer's own generator.
* The temperature is that of the samples, so an unchanged policy has importance ratio 1.
"""

# ruff: noqa: N803, N806, N815 - capital suffixes of names give tensor shapes
from __future__ import annotations

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kbrl_async.errors import ConfigError, NonFiniteLoss
from kbrl_async.learning import metrics as m
from kbrl_async.learning.corrections import Ratios
from kbrl_async.learning.forward_backward import ForwardBackward, Scored, Tick
from kbrl_async.learning.fused.flat import to_device
from kbrl_async.learning.losses import Tokens, token_weights
from kbrl_async.learning.objective import Objective
from kbrl_async.learning.optimizer import rate_at
from kbrl_async.learning.settings import UpdateSettings
from protocols.records import TrainGroup, TrainSample


class Updates(ABC):
    """Step counter, data order and objective of one policy; who derives has its weights."""

    def __init__(
        self,
        passes: ForwardBackward,
        settings: UpdateSettings,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.passes, self.settings, self.device = passes, settings, device
        self.optimizer_step = 0
        self.order = torch.Generator().manual_seed(settings.seed)
        self.objective = Objective(settings.loss, settings.learner, settings.corrections)
        self._clock = clock

    @abstractmethod
    def take_step(self, loss: float, rate: float) -> float | None:
        """One step of the optimiser with the gradients so far; their norm, where it is known.

        :raises NonFiniteLoss: loss or gradient is not finite; the step was not taken.
        """

    def reference_logprobs(self, samples: list[TrainSample], temperature: float, tick: Tick) -> torch.Tensor:
        """Of the policy that training started from [T]."""
        raise NotImplementedError

    def together(self, loss: torch.Tensor, log: m.StepLog) -> torch.Tensor:
        """The loss of a minibatch over all ranks; gradients and `log` are summed too."""
        return loss

    def share(self, samples: list[TrainSample], chosen: Sequence[int]) -> list[int]:
        """Places in `chosen` that this rank computes."""
        return list(range(len(chosen)))

    def gathered(self, value_T: torch.Tensor) -> torch.Tensor:
        """Values of which each rank has computed its share, and left the others 0."""
        return value_T

    def update(
        self,
        groups: Sequence[TrainGroup],
        temperature: float,
        tick: Tick = lambda: None,
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
        batch = EncodedGroups(samples, temperature, self._recorded(samples, temperature, tick, version), tick)
        log = m.StepLog(proximal_s=self._clock() - started)
        for epoch in range(self.settings.learner.epochs):
            for chosen in self._minibatches(len(samples)):
                self._minibatch(batch, chosen, log)
            if epoch == 0:
                log.end_of_first_epoch()
        log.total_s = self._clock() - started
        ages = {} if version is None else m.staleness(samples, version)
        return {**log.summary(samples, self.optimizer_step), **ages}

    def _minibatches(self, n: int) -> list[list[int]]:
        """A partition of the samples into at most `minibatches` parts, in random order."""
        order: list[int] = torch.randperm(n, generator=self.order).tolist()
        parts = min(self.settings.learner.minibatches, n)
        # Sorted inside a part: neighbours share their prompt, and packing keys on that.
        return [sorted(order[i::parts]) for i in range(parts)]

    def _minibatch(self, batch: EncodedGroups, chosen: list[int], log: m.StepLog) -> None:
        started = self._clock()
        losses = self.gradients(batch, chosen, log)
        summed = torch.stack(losses).double().sum() if losses else torch.zeros((), dtype=torch.float64)
        total = float(self.together(summed, log))
        log.gradient_s += self._clock() - started
        rate = self._rate()
        norm = self.take_step(total, rate)
        self.optimizer_step += 1
        log.optimizer(total, norm, rate)

    def gradients(self, batch: EncodedGroups, chosen: list[int], log: m.StepLog) -> list[torch.Tensor]:
        """All microbatches of a minibatch, and their losses: nothing here waits for the device."""
        samples, recorded, losses = batch.samples, batch.recorded, list[torch.Tensor]()
        lengths_S = torch.tensor([len(samples[i].token_ids) for i in chosen])
        how, constant = self.settings.learner.normalise, self.settings.max_tokens
        weight_S = token_weights(lengths_S, torch.arange(len(chosen)), how, constant)
        mine = self.share(samples, chosen)
        chosen, weight_S = [chosen[i] for i in mine], weight_S[mine]
        weight_S = to_device(weight_S, self.device)
        where_S = to_device(torch.tensor(chosen, dtype=torch.long), self.device)

        def visit(scored: Scored) -> torch.Tensor:
            tokens = recorded.tokens(scored, where_S)
            loss_T, diagnostics = self.objective(tokens)
            loss = (loss_T * weight_S[scored.sample_T]).sum()
            log.microbatch(tokens, scored.entropy_T, diagnostics, scored.inputs)
            losses.append(loss.detach())
            return loss

        self.passes.run([samples[i] for i in chosen], batch.temperature, visit, batch.tick)
        return losses

    def _rate(self) -> float:
        learner = self.settings.learner
        total = self.settings.max_steps * learner.epochs * learner.minibatches
        rate, warmup = self.settings.learning_rate, learner.warmup_steps
        return rate_at(self.optimizer_step, rate, warmup, learner.schedule, self.optimizer_step / total)

    def _recorded(
        self, samples: list[TrainSample], temperature: float, tick: Tick, version: int | None
    ) -> RecordedTokens:
        needs, log_mu_T = self.objective, torch.tensor([x for s in samples for x in s.logprobs])
        log_mu_T, advantage_T = (to_device(part_T, self.device) for part_T in (log_mu_T, flat_advantages(samples)))
        scale, lag_T = self.settings.learner.negative_scale, None
        if version is not None:
            ages = torch.tensor([float(max(0, version - s.policy_version)) for s in samples])
            lag_T = to_device(ages.repeat_interleave(torch.tensor([len(s.token_ids) for s in samples])), self.device)
        advantage_T = torch.where(advantage_T < 0, advantage_T * scale, advantage_T)
        log_prox_T = self.batch_logprobs(self.passes, samples, temperature, tick) if needs.needs_proximal else None
        weight_T = None
        if log_prox_T is not None:
            lengths = torch.tensor([len(s.token_ids) for s in samples])
            sample_T = to_device(torch.arange(len(samples)).repeat_interleave(lengths), self.device)
            weight_T = needs.batch_weights(Ratios(log_prox_T - log_mu_T, advantage_T, sample_T, log_mu_T))
        return RecordedTokens(
            to_device(_starts(samples), self.device),
            log_mu_T,
            advantage_T,
            log_prox_T,
            lag_T,
            self.reference_logprobs(samples, temperature, tick) if needs.needs_reference else None,
            weight_T,
        )

    @torch.no_grad()
    def batch_logprobs(
        self, passes: ForwardBackward, samples: list[TrainSample], temperature: float, tick: Tick
    ) -> torch.Tensor:
        """Of all response tokens [T], as `passes` computes them."""
        starts_S = to_device(_starts(samples), self.device)
        out_T = torch.zeros(sum(len(s.token_ids) for s in samples), device=self.device)

        def visit(scored: Scored) -> None:
            out_T[starts_S[where_S[scored.sample_T]] + scored.offset_T] = scored.log_pi_T.float()

        mine = self.share(samples, range(len(samples)))
        where_S = to_device(torch.tensor(mine, dtype=torch.long), self.device)
        passes.run([samples[i] for i in mine], temperature, visit, tick)
        return self.gathered(out_T)

    def logprobs(self, samples: Sequence[TrainSample], temperature: float) -> list[list[float]]:
        """The learner's log-probs of each sample's response tokens: for tests, audits and references."""
        flat_T = self.batch_logprobs(self.passes, list(samples), temperature, lambda: None)
        return [part.tolist() for part in torch.split(flat_T, [len(s.token_ids) for s in samples])]


@dataclasses.dataclass(frozen=True)
class RecordedTokens:
    """The recorded side of a batch, flat over all response tokens [T], on the trainer's device."""

    start_S: torch.Tensor
    log_mu_T: torch.Tensor
    advantage_T: torch.Tensor
    log_prox_T: torch.Tensor | None
    lag_T: torch.Tensor | None
    log_ref_T: torch.Tensor | None
    weight_T: torch.Tensor | None

    def tokens(self, scored: Scored, where_S: torch.Tensor) -> Tokens:
        """Those of a microbatch, beside what the policy gives them now. `where_S`: its samples' places in the batch."""
        flat_T = self.start_S[where_S[scored.sample_T]] + scored.offset_T
        parts = (self.log_prox_T, self.lag_T, self.log_ref_T, self.weight_T)
        prox_T, lag_T, ref_T, weight_T = (None if x is None else x[flat_T] for x in parts)
        mu_T, advantage_T = self.log_mu_T[flat_T], self.advantage_T[flat_T]
        return Tokens(scored.log_pi_T, mu_T, advantage_T, prox_T, scored.sample_T, lag_T, ref_T, weight_T)


class EncodedGroups(NamedTuple):
    samples: list[TrainSample]
    temperature: float
    recorded: RecordedTokens
    tick: Tick


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
        if not all(map(math.isfinite, (sample.advantage, sample.plan_advantage, *sample.logprobs))):
            raise NonFiniteLoss(
                f"{sample.rollout_id} carries an advantage or log-prob that is not finite", "Look at its sampler"
            )


def token_advantages(sample: TrainSample) -> list[float]:
    """`advantage` for the kernel's tokens and `plan_advantage` for all others; `advantage` for all where there is one
    class only."""
    n = len(sample.token_ids)
    if not sample.has_plan:
        return [sample.advantage] * n
    start, end = min(sample.code_start, n), min(sample.code_end, n)
    plan = sample.plan_advantage
    return [plan] * start + [sample.advantage] * (end - start) + [plan] * (n - end)


def flat_advantages(samples: Sequence[TrainSample]) -> torch.Tensor:
    """Of all response tokens of `samples`, in order [T]."""
    if not any(sample.has_plan for sample in samples):  # no list of millions of equal numbers
        lengths = torch.tensor([len(sample.token_ids) for sample in samples])
        return torch.tensor([sample.advantage for sample in samples]).repeat_interleave(lengths)
    return torch.tensor([a for sample in samples for a in token_advantages(sample)])
