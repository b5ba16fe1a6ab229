"""The RL trainer of a model in this process: weights, optimizer and ranks under the flow of `updates`.

Invariant: the host waits for a GPU once an optimiser step, to see that it is finite, and never between microbatches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from kbrl_async.errors import ConfigError
from kbrl_async.learning import metrics as m
from kbrl_async.learning.distributed import ProcessGroup, ShardedModel
from kbrl_async.learning.forward_backward import Tick, computes_bf16, forward_backward
from kbrl_async.learning.logprobs import sequence_logprobs
from kbrl_async.learning.optimizer import guarded_step, make_adamw
from kbrl_async.learning.policies.models import causal_lm
from kbrl_async.learning.settings import UpdateSettings
from kbrl_async.learning.updates import Updates
from protocols.records import TrainGroup, TrainSample


class Trainer(Updates):
    """Owns optimizer, step counter and data order of one policy.

    trainer = Trainer(model, config, "cpu")
    metrics = trainer.step(groups, temperature=1.0)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        settings: UpdateSettings,
        device: str | torch.device = "cpu",
        *,
        reference: torch.nn.Module | None = None,
        process_group: ProcessGroup | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`reference`: of a KL penalty, where no LoRA base serves."""
        learner, place = settings.learner, torch.device(device)
        self.model, self.process_group = model, process_group
        is_sharded = learner.shard and process_group is not None
        self._sharded = ShardedModel(model, process_group) if is_sharded and process_group is not None else None
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        """All that is trained, by name: switching between adapters hides the others' from `requires_grad`."""
        self.optimizer = make_adamw(self.parameters.values(), settings.learning_rate)
        super().__init__(forward_backward(model, learner, place, self._sharded), settings, place, clock)
        if self.objective.needs_reference and reference is None and not hasattr(model, "disable_adapter"):
            raise ConfigError("a KL penalty needs a reference policy", "Give one, or train a LoRA adapter")
        self._reference = None if reference is None else forward_backward(reference, learner, place)

    @property
    def bf16(self) -> bool:
        """Forward and backward pass compute in bf16."""
        return computes_bf16(self.settings.learner, self.device)

    def step(
        self,
        groups: Sequence[TrainGroup],
        temperature: float,
        tick: Tick = lambda: None,
        version: int | None = None,
    ) -> dict[str, float]:
        """`update` on all ranks of the process group."""
        if self.process_group is not None:
            self.process_group.lead(self, groups, temperature, version)
        return self.update(groups, temperature, tick, version)

    def take_step(self, loss: float, rate: float) -> float:
        return guarded_step(self.optimizer, loss, self.settings.learner.grad_clip, rate)

    def together(self, loss: torch.Tensor, log: m.StepLog) -> torch.Tensor:
        if self.process_group is None:
            return loss
        total = self.process_group.total(loss.to(self.device))
        self.process_group.sum_gradients(self.parameters.values())
        log.merge(self.process_group)
        return total

    def share(self, samples: list[TrainSample], chosen: Sequence[int]) -> list[int]:
        if self.process_group is None:
            return super().share(samples, chosen)
        lengths = [len(samples[i].prompt_ids) + len(samples[i].token_ids) for i in chosen]
        return self.process_group.part(lengths, self.settings.learner.context_parallel)

    def gathered(self, value_T: torch.Tensor) -> torch.Tensor:  # noqa: N803 - its shape
        return value_T if self.process_group is None else self.process_group.total(value_T)

    def reference_logprobs(self, samples: list[TrainSample], temperature: float, tick: Tick) -> torch.Tensor:
        """Of its own module, or the base under the LoRA adapter."""
        if self._reference is not None:
            return self.batch_logprobs(self._reference, samples, temperature, tick)
        with self.model.disable_adapter():  # type: ignore[operator]
            return self.batch_logprobs(self.passes, samples, temperature, tick)

    def sequence_logprobs(self, ids: list[int]) -> list[float]:
        """`logprobs.sequence_logprobs` of the policy. The other ranks need no telling."""
        if self._sharded is None or self.process_group is None:
            return sequence_logprobs(causal_lm(self.model), ids)
        if self.process_group.rank == 0:
            self.process_group.probe(ids)
        return self._sharded(lambda lm: sequence_logprobs(lm, ids))
