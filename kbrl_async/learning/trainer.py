"""The RL trainer: groups of samples in, one policy update and its metrics out.

::

    groups ─ flatten, shuffle ─▶ minibatches ─ engine ─▶ microbatches ─ forward, loss, backward ─▶ AdamW
                 └─ × epochs                                  └─ π_p first, where the loss needs it

Invariants
* Nothing that isn't finite reaches the weights: inputs are checked before the first step, loss and gradient norm before
  each step.
* The same state, groups and options give the same weights: order comes from the trainer's own generator.
* The temperature is that of the samples, so an unchanged policy has importance ratio 1.
* The host waits for a GPU once an optimiser step, to see that it is finite, and never between microbatches.
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from kbrl_async.errors import ConfigError, NonFiniteLoss
from kbrl_async.learning import metrics as m
from kbrl_async.learning.corrections import CorrectionOptions
from kbrl_async.learning.distributed.process_group import ProcessGroup
from kbrl_async.learning.distributed.sharding import ShardedModel
from kbrl_async.learning.engines import Engine, EngineOptions, Plain, Scored, open_engine
from kbrl_async.learning.fused.flat import to_device
from kbrl_async.learning.logprobs import sequence_logprobs
from kbrl_async.learning.losses import NEEDS_PROXIMAL, LossOptions, Tokens, token_weights
from kbrl_async.learning.objective import Objective
from kbrl_async.learning.optimizer import guarded_step, make_adamw, rate_at
from kbrl_async.learning.policies.models import causal_lm
from kbrl_async.learning.token_classes import flat_advantages
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
    chunk_elements: int = 0
    """Most logits that exist at once; 0: 2^24, and 2^27 on a GPU, whose matrix products want long chunks."""
    dtype: str = "fp32"
    """`"bf16"` runs forward and backward in autocast."""
    seed: int = 0
    kernels: str = "auto"
    """`plain`, `fused`, or `auto`: fused on a GPU where the model allows it."""
    share_prompts: bool = True
    """Fused: compute the prompt of a group once, not once a sample."""
    memory_gb: float = 0.0
    """Fused: most memory (10^9 bytes) to hold on the GPU, weights included; 0: nine tenths of it."""


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
        team: ProcessGroup | None = None,
        shard: bool = False,
    ) -> None:
        """`shard`: the team's ranks hold a share of the weights each, instead of all of them."""
        if options.dtype not in ("fp32", "bf16"):
            raise ConfigError(f"unknown training dtype {options.dtype!r}", "Use fp32 or bf16")
        self.model = model
        self.options = options
        self.device = torch.device(device)
        self._spread = ShardedModel(model, team) if shard and team is not None else None
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        """All that is trained, by name: switching between adapters hides the others' from `requires_grad`."""
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
        self.team = team
        self.engine = open_engine(
            options.kernels, model, _engine_options(options, self.device), self.device, self._spread
        )

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
        if self.team is not None:
            self.team.lead(self, groups, temperature, version)
        return self.update(groups, temperature, tick, version)

    def update(
        self,
        groups: Sequence[TrainGroup],
        temperature: float,
        tick: Callable[[], None] = lambda: None,
        version: int | None = None,
    ) -> dict[str, float]:
        """`step`, on this rank of a team."""
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
            recorded.lag_T = self._of_samples([float(max(0, version - s.policy_version)) for s in samples], samples)
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
        started = self._clock()
        losses: list[torch.Tensor] = []
        self._gradients(samples, chosen, recorded, temperature, log, losses, tick)
        summed = torch.stack(losses).double().sum() if losses else torch.zeros((), dtype=torch.float64)
        if self.team is not None:
            summed = self.team.total(summed.to(self.device))
            self.team.sum_gradients(self.parameters.values())
            log.merge(self.team)
        total = float(summed)
        log.gradient_s += self._clock() - started
        rate = self._rate()
        norm = guarded_step(self.optimizer, total, self.options.grad_clip, rate)
        self.optimizer_step += 1
        log.optimizer(total, norm, rate)

    def _gradients(
        self,
        samples: list[TrainSample],
        chosen: list[int],
        recorded: _Flat,
        temperature: float,
        log: m.StepLog,
        losses: list[torch.Tensor],
        tick: Callable[[], None],
    ) -> None:
        """All microbatches of a minibatch: nothing here waits for the device."""
        o = self.options
        lengths_S = torch.tensor([len(samples[i].token_ids) for i in chosen])
        weight_S = token_weights(lengths_S, torch.arange(len(chosen)), o.normalise, o.dr_grpo_length)
        mine = self._share(samples, chosen)
        chosen, weight_S = [chosen[i] for i in mine], weight_S[mine]
        weight_S = to_device(weight_S, self.device)
        where_S = to_device(torch.tensor(chosen, dtype=torch.long), self.device)

        def visit(scored: Scored) -> torch.Tensor:
            flat_T = recorded.start_S[where_S[scored.sample_T]] + scored.offset_T
            tokens = self._tokens(scored, flat_T, recorded)
            loss_T, diagnostics = self.objective(tokens)
            loss = (loss_T * weight_S[scored.sample_T]).sum()
            log.microbatch(tokens, scored.entropy_T, diagnostics, scored.inputs)
            losses.append(loss.detach())
            return loss

        self.engine.run([samples[i] for i in chosen], temperature, visit, tick)

    def _tokens(self, scored: Scored, flat_T: torch.Tensor, recorded: _Flat) -> Tokens:
        def part(values_T: torch.Tensor | None) -> torch.Tensor | None:
            return None if values_T is None else values_T[flat_T]

        advantage_T = recorded.advantage_T[flat_T]
        return Tokens(
            scored.log_pi_T,
            recorded.log_mu_T[flat_T],
            torch.where(advantage_T < 0, advantage_T * self.options.negative_scale, advantage_T),
            part(recorded.log_prox_T),
            scored.sample_T,
            part(recorded.lag_T),
            part(recorded.log_ref_T),
        )

    def _rate(self) -> float:
        o = self.options
        progress = self.optimizer_step / o.total_steps if o.total_steps > 0 else 0.0
        return rate_at(self.optimizer_step, o.learning_rate, o.warmup_steps, o.schedule, progress)

    @torch.no_grad()
    def _proximal(
        self, samples: list[TrainSample], temperature: float, tick: Callable[[], None], engine: Engine | None = None
    ) -> torch.Tensor:
        starts_S = to_device(_starts(samples), self.device)
        out_T = torch.zeros(sum(len(s.token_ids) for s in samples), device=self.device)

        def visit(scored: Scored) -> None:
            out_T[starts_S[where_S[scored.sample_T]] + scored.offset_T] = scored.log_pi_T.float()

        mine = self._share(samples, range(len(samples)))
        where_S = to_device(torch.tensor(mine, dtype=torch.long), self.device)
        (engine or self.engine).run([samples[i] for i in mine], temperature, visit, tick)
        return out_T if self.team is None else self.team.total(out_T)

    def _share(self, samples: list[TrainSample], chosen: Sequence[int]) -> list[int]:
        """Places in `chosen` that this rank computes: all, where it is alone."""
        if self.team is None:
            return list(range(len(chosen)))
        return self.team.part([len(samples[i].prompt_ids) + len(samples[i].token_ids) for i in chosen])

    def _reference_logprobs(
        self, samples: list[TrainSample], temperature: float, tick: Callable[[], None]
    ) -> torch.Tensor:
        """Of the policy that training started from: its own module, or the base under the LoRA adapter."""
        if self._reference is not None:
            options = _engine_options(self.options, self.device)
            return self._proximal(samples, temperature, tick, Plain(self._reference, options, self.device))
        with self.model.disable_adapter():  # type: ignore[operator]
            return self._proximal(samples, temperature, tick)

    def _of_samples(self, values: list[float], samples: list[TrainSample]) -> torch.Tensor:
        flat_T = torch.tensor(values).repeat_interleave(torch.tensor([len(s.token_ids) for s in samples]))
        return to_device(flat_T, self.device)

    def sequence_logprobs(self, ids: list[int]) -> list[float]:
        """`logprobs.sequence_logprobs` of the policy. The other ranks of a team need no telling."""
        if self._spread is None or self.team is None:
            return sequence_logprobs(causal_lm(self.model), ids)
        if self.team.rank == 0:
            self.team.probe(ids)
        return self._spread(lambda lm: sequence_logprobs(lm, ids))

    def logprobs(self, samples: Sequence[TrainSample], temperature: float) -> list[list[float]]:
        """The learner's log-probs of each sample's response tokens: for tests, audits and references."""
        flat_T = self._proximal(list(samples), temperature, lambda: None)
        return [part.tolist() for part in torch.split(flat_T, [len(s.token_ids) for s in samples])]

    def _flatten(self, samples: list[TrainSample]) -> _Flat:
        recorded = _starts(samples), torch.tensor([x for s in samples for x in s.logprobs]), flat_advantages(samples)
        return _Flat(*(to_device(part, self.device) for part in recorded))


class _Flat:
    """The recorded side of a batch, flat over all response tokens, on the trainer's device."""

    def __init__(self, start_S: torch.Tensor, log_mu_T: torch.Tensor, advantage_T: torch.Tensor) -> None:
        self.start_S = start_S
        self.log_mu_T = log_mu_T
        self.advantage_T = advantage_T
        self.log_prox_T: torch.Tensor | None = None
        self.lag_T: torch.Tensor | None = None
        self.log_ref_T: torch.Tensor | None = None


def _engine_options(options: TrainerOptions, device: torch.device) -> EngineOptions:
    chunk = options.chunk_elements or (1 << 27 if device.type == "cuda" else 1 << 24)
    return EngineOptions(
        options.token_budget,
        options.tree_tokens,
        options.share_prompts,
        chunk,
        options.dtype == "bf16",
        options.memory_gb * 1e9,
    )


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
