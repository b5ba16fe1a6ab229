"""The seam between the learner process and who computes its updates; and the one that computes them in this process.

::

    step ─▶ save (the truth) ─▶ publish: weights that samplers can load, with the canaries' log-probs ─▶ collect

To add one: `def start(setup: LearnerSetup) -> LearnerEngine`, named by `learner.engine=package.module:start` or an
entry point of the group `kbrl_async.learner_engines`. Ours are named in `settings.LEARNER_ENGINES`.

Invariants
* What `save` has returned from survives any crash: `resume` begins there.
* A version is published with log-probs of the canaries that the trained weights gave themselves (I8).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import torch

from kbrl_async.learning import checkpoints, efficiency
from kbrl_async.learning.forward_backward import Tick
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import DTYPES, causal_lm, is_lora
from kbrl_async.learning.policies.snapshot import Snapshots
from kbrl_async.learning.policies.versions import Pending
from kbrl_async.learning.settings import UpdateSettings
from kbrl_async.learning.trainer import Trainer
from kbrl_async.weights import Canaries
from kbrl_async.weights.groups import Meeting
from kbrl_async.weights.parts import Collector
from protocols.records import TrainGroup


class LearnerSetup(msgspec.Struct, frozen=True):
    """What a run gives a learner's engine at its start."""

    settings: UpdateSettings
    model_name: str
    lora_rank: int
    base_url: str | None
    api_key_env: str | None
    checkpoints: Path
    policies: Path
    base: Callable[[], str]
    """Makes the small policy, or names the model; raises where the run is stopped meanwhile. Takes minutes."""
    canaries: Callable[[str], Canaries]
    """By the tokenizer of that base."""
    make_trainer: Callable[[str], Trainer]
    """Of this process and its ranks, before its first batch."""
    published_dtype: str = "fp32"
    """Of full weights, a key of `models.DTYPES`."""
    sends_weights: bool = False
    """Full weights go straight to samplers: one version may be sent while the one before is written."""


class LearnerEngine(Protocol):
    """What the learner needs. All methods belong to one thread."""

    @property
    def is_remote(self) -> bool:
        """It computes elsewhere: nothing here needs to stand still for a bench."""

    @property
    def is_saving(self) -> bool:
        """A checkpoint is still being written; the next one would wait for it."""

    def step(self, groups: Sequence[TrainGroup], temperature: float, tick: Tick, version: int) -> dict[str, float]:
        """One update of policy `version`; its metrics. `tick` is called now and then.

        :raises NonFiniteLoss: the weights may be spoilt; `resume` brings them back.
        :raises InfraError: nobody knows what has become of the weights; `resume` brings them back.
        """

    def usage(self, metrics: dict[str, float]) -> dict[str, float]:
        """How an update used the hardware, where it is known."""

    def save(self, progress: checkpoints.LearnerProgress, keep: int) -> None:
        """Writes a checkpoint and deletes all but the newest `keep`."""

    def resume(self) -> checkpoints.Resumed | None:
        """Goes back to the newest checkpoint that can be read; None where there is none at all."""

    def publish(self, version: int, parent: int | None) -> Pending | None:
        """`policies/policy-v{version}`, to be written; a version that is there is replaced. None where it was written
        at once. The one before must be written, and nobody read it any more: its memory is used again."""

    def adopt(self, folder: Path) -> bool:
        """Goes on from the published weights in `folder`; False where that can't be, and they are to be replaced."""

    def collect(self, keep: int, needed: Iterable[int]) -> None:
        """Deletes all but the newest `keep` versions and those that are `needed`."""

    def close(self) -> None: ...


@runtime_checkable
class SendsParts(Protocol):
    """An engine whose ranks may each send their own rows of full weights to samplers."""

    def send_parts(self, meeting: Meeting, patience_s: float) -> bool:
        """Has them do so for all versions to come; False where they can't, or hold them whole."""


@runtime_checkable
class KeepsSnapshots(Protocol):
    """An engine that can publish a version while one before it is still being written."""

    def keep(self, versions: Collection[int]) -> None:
        """Of what it has published, the weights of these stay as they are until it is told again."""


def start(setup: LearnerSetup) -> LocalEngine:
    """The engine of `learner.engine=torch`."""
    base = setup.base()
    trainer = setup.make_trainer(base)
    canaries, rounded_to = setup.canaries(base), setup.published_dtype
    return LocalEngine(
        trainer, base, canaries, setup.checkpoints, setup.policies, rounded_to, two_copies=setup.sends_weights
    )


class LocalEngine:
    """A `Trainer` in this process, which may lead others."""

    is_remote = False

    def __init__(
        self,
        trainer: Trainer,
        base: str,
        canaries: Canaries,
        checkpoint_folder: Path,
        policies: Path,
        rounded_to: str = "fp32",
        *,
        two_copies: bool = False,
    ) -> None:
        """`rounded_to`: number format of published full weights; adapters are published as they are trained.
        `two_copies` of what is published will be held."""
        self.trainer = trainer
        self._base, self._canaries = base, canaries
        self._checkpoints, self._policies = checkpoint_folder, policies
        self._rounded_to, self._two_copies = rounded_to, two_copies
        self._collector: Collector | None = None
        self._snapshots = Snapshots(None if is_lora(trainer.model) else DTYPES[rounded_to], ahead=two_copies)
        self._kept: frozenset[int] = frozenset()

    def step(self, groups: Sequence[TrainGroup], temperature: float, tick: Tick, version: int) -> dict[str, float]:
        return self.trainer.step(groups, temperature, tick, version)

    def usage(self, metrics: dict[str, float]) -> dict[str, float]:
        trainer = self.trainer
        model = causal_lm(trainer.model)
        ranks_at_work = 1 if trainer.process_group is None else trainer.process_group.size
        passes = trainer.settings.learner.epochs  # `input_tokens` counts every pass already
        length = metrics["input_tokens"] / passes / max(1.0, metrics["samples"])
        flops = efficiency.flops_per_token(model, length) * metrics["input_tokens"]
        return {
            "mfu": efficiency.utilisation(flops, metrics["gradient_s"], self._peak * ranks_at_work),
            "memory_peak_mb": efficiency.peak_memory_mb(trainer.device),
        }

    @cached_property
    def _peak(self) -> float:
        """FLOP/s that `mfu` is a share of."""
        tera = self.trainer.settings.learner.peak_tflops
        return tera * 1e12 if tera else efficiency.measured_peak(self.trainer.device, self.trainer.bf16)

    @property
    def is_saving(self) -> bool:
        return self.trainer.is_saving

    def save(self, progress: checkpoints.LearnerProgress, keep: int) -> None:
        checkpoints.save(self._checkpoints, self.trainer, progress, keep)

    def resume(self) -> checkpoints.Resumed | None:
        return checkpoints.resume(self._checkpoints, self.trainer)

    def keep(self, versions: Collection[int]) -> None:
        self._kept = frozenset(versions)

    def send_parts(self, meeting: Meeting, patience_s: float) -> bool:
        if not self.trainer.is_sharded or is_lora(self.trainer.model):
            return False
        if not self.trainer.meet(meeting, self._rounded_to, patience_s, two_copies=self._two_copies):
            return False
        self._collector = Collector(meeting, patience_s)
        return True

    def publish(self, version: int, parent: int | None) -> Pending:
        trainer = self.trainer
        if self._collector is not None:
            return self._publish_parts(self._collector, version, parent)
        return versions.prepare(
            self._policies,
            trainer.model,
            version,
            parent,
            trainer.optimizer_step,
            self._canaries,
            self._base,
            logprobs_of=self._published_logprobs,
            copied=lambda named: self._snapshots.of(version, named, self._kept),
            gathered=trainer.gathered_weights(),
        )

    def _published_logprobs(self, ids: list[int]) -> list[float]:
        """Of the weights as a sampler gets them: a small update that rounding takes away must not show."""
        rounded_to = torch.float32 if is_lora(self.trainer.model) else DTYPES[self._rounded_to]
        return self.trainer.sequence_logprobs(ids, rounded_to)

    def _publish_parts(self, collector: Collector, version: int, parent: int | None) -> Pending:
        trainer = self.trainer
        rows = self._snapshots.of(version, trainer.held(version, self._kept), self._kept)
        return versions.prepare_parts(
            self._policies,
            trainer.model.config,
            rows,
            trainer.whole_shapes,
            lambda index: collector.tensors(version, index, rows),
            trainer.sequence_logprobs,
            version,
            parent,
            trainer.optimizer_step,
            self._canaries,
            self._base,
        )

    def adopt(self, folder: Path) -> bool:
        """What was published counts: on a GPU, batches that are trained again differ in their last bits."""
        if self.trainer.is_sharded:
            return False
        versions.load_weights(folder, self.trainer.model)
        return True

    def collect(self, keep: int, needed: Iterable[int]) -> None:
        versions.collect_garbage(self._policies, keep, needed)

    def close(self) -> None:
        """Ends what is being written, and lets the other ranks go."""
        if self._collector is not None:
            self._collector.close()
            self.trainer.leave()
        self.trainer.close()
