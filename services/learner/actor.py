"""The learner's state: makes or loads the first policy, resumes, trains a batch, checkpoints and publishes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import torch

from kbrl_async.errors import InfraError, NonFiniteLoss, RunError
from kbrl_async.learning import checkpoints, efficiency, kept
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import causal_lm, load_tokenizer
from kbrl_async.learning.policies.remote import RemotePolicies, open_remote
from kbrl_async.learning.replay_log import ReplayLog
from kbrl_async.learning.sft import without_behaviour
from kbrl_async.learning.trainer import Trainer
from kbrl_async.runs import origins
from kbrl_async.runs.config import learner_threads
from kbrl_async.runs.telemetry.live import LEARNER_FACTS
from protocols.records import TrainBatch, TrainGroup, UpdateReport
from services.learner import ranks
from services.learner.policy import base_model, make_trainer
from services.runtime.service import Service

KEPT_VERSIONS = 4
"""Published versions on disk beyond the allowed lag."""


class Learning:
    """The one owner of the weights."""

    def __init__(
        self,
        service: Service,
        trainer: Trainer,
        base: Path | str,
        canary: list[int],
        texts: Sequence[tuple[str, list[int]]] = (),
    ) -> None:
        """`canary` and `texts` prove each version, see `versions.publish`."""
        self._service = service
        self._trainer = trainer
        self._base = str(base)
        self._canary = canary
        self._texts = texts
        self._progress = checkpoints.Progress()
        self._remote = open_remote(service.config.policy_url)
        self._replay_log = ReplayLog(self._checkpoints)
        self._trained_again = 0

    @classmethod
    def open(cls, service: Service, is_stopped: Callable[[], bool]) -> Learning | None:
        """Loads or makes the policy, restores the newest checkpoint, publishes what is missing.

        Takes minutes where the small policy must be made; None when the run is stopped meanwhile.
        """
        config = service.config
        base = base_model(service, is_stopped)
        if base is None:
            return None
        torch.set_num_threads(learner_threads(config, service.layout))
        process_group = ranks.join(service.device)
        if process_group is not None:
            process_group.send_text(str(base))
        trainer = make_trainer(config, base, service.device, process_group)
        learning = cls(service, trainer, base, *origins.canaries(config, load_tokenizer(str(base))))
        learning._resume()
        return learning

    def close(self) -> None:
        """Lets the other ranks go."""
        if self._trainer.process_group is not None:
            self._trainer.process_group.close()

    @property
    def version(self) -> int:
        return self._progress.version

    @property
    def _checkpoints(self) -> Path:
        return self._service.run_dir / "checkpoints"

    def _resume(self) -> None:
        if not self._rebuild(lambda: None):
            self._checkpoint()
        found = versions.newest(self._service.policies)
        if found is None or found[0].version != self.version:
            self._publish()
        elif self._trained_again:
            # What was published counts: on a GPU, batches that are trained again differ in their last bits.
            versions.load_weights(found[1], self._trainer.model)

    def _rebuild(self, tick: Callable[[], None]) -> bool:
        """The newest checkpoint that can be read, and what was trained since; False where there is none."""
        resumed = checkpoints.resume(self._checkpoints, self._trainer)
        if resumed is None:
            return False
        for note in resumed.notes:
            self._service.log.warning("checkpoint passed over", note=note)
        self._progress = resumed.progress
        for batch, groups in self._replay_log.since(self.version):
            self._step(batch, groups, tick)
        self._trained_again = self.version - resumed.progress.version
        about = {"checkpoint": resumed.folder.name, "trained_again": self._trained_again}
        words = f"resumed at policy version {self.version}"
        self._service.log.info("resumed", policy_version=self.version, **about, shown=words)
        return True

    def train(self, batch: TrainBatch, groups: list[TrainGroup], tick: Callable[[], None]) -> UpdateReport:
        """One update on `batch`; the same report again for the batch that was trained last."""
        started = time.time()
        if batch.batch_id == self._progress.last_batch_id:
            return UpdateReport(batch.batch_id, self.version, self._progress.last_metrics, started, time.time())
        if batch.index != self.version:
            raise RunError(
                f"{batch.batch_id} is for policy version {batch.index} and the learner has {self.version}",
                "The run's checkpoints and its journal belong to different states; restore both or start a new run",
            )
        try:
            metrics = self._step(batch, groups, tick)
        except NonFiniteLoss as error:
            return self._refuse(batch, error, started, tick)
        self._replay_log.add(batch, groups)
        stepped = time.time()
        if self.version % self._service.config.learner.checkpoint_every == 0:
            self._checkpoint()
            metrics = {**metrics, "time/checkpoint_s": time.time() - stepped}
        self._publish()
        self._service.tell({name: metrics[name] for name in LEARNER_FACTS if name in metrics})
        self._service.log.info(
            "updated",
            policy_version=self.version,
            loss=round(metrics.get("loss", 0.0), 4),
            entropy=round(metrics.get("entropy", 0.0), 4),
            seconds=round(time.time() - started, 2),
            shown="",  # the aggregator's line of the update has what people look for
        )
        return UpdateReport(batch.batch_id, self.version, metrics, started, time.time())

    def _step(self, batch: TrainBatch, groups: list[TrainGroup], tick: Callable[[], None]) -> dict[str, float]:
        metrics = self._trainer.step(groups, batch.temperature, tick, self.version)
        if self._service.config.method == "sft":
            metrics = without_behaviour(metrics)
        metrics |= self._use_of_hardware(metrics)
        self._progress = checkpoints.Progress(
            version=self.version + 1,
            last_batch_id=batch.batch_id,
            batches=self._progress.batches + 1,
            samples=self._progress.samples + sum(len(group.samples) for group in groups),
            tokens=self._progress.tokens + int(metrics["response_tokens"]),
            last_metrics=metrics,
        )
        return metrics

    def _use_of_hardware(self, metrics: dict[str, float]) -> dict[str, float]:
        trainer = self._trainer
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
        tera = self._service.config.learner.peak_tflops
        return tera * 1e12 if tera else efficiency.measured_peak(self._trainer.device, self._trainer.bf16)

    def _refuse(
        self, batch: TrainBatch, error: NonFiniteLoss, started: float, tick: Callable[[], None]
    ) -> UpdateReport:
        """Puts everything back to what it was before the batch: some of its optimiser steps may have been taken."""
        before = self.version
        if not self._rebuild(tick) or self.version != before:
            raise RunError(f"no checkpoint of version {self.version} to go back to after: {error}", "Continue the run")
        self._service.log.error("batch refused", batch=batch.batch_id, reason=str(error), policy_version=self.version)
        return UpdateReport(batch.batch_id, self.version, {}, started, time.time(), str(error))

    def _checkpoint(self) -> None:
        keep = self._service.config.learner.keep_checkpoints
        checkpoints.save(self._checkpoints, self._trainer, self._progress, keep)
        self._replay_log.forget(before=checkpoints.oldest(self._checkpoints))

    def _publish(self) -> None:
        parent = self.version - 1 if self.version else None
        step = self._trainer.optimizer_step
        versions.publish(
            self._service.policies,
            self._trainer.model,
            self.version,
            parent,
            step,
            self._canary,
            self._base,
            texts=self._texts,
            logprobs_of=self._trainer.sequence_logprobs,
        )
        keep, held = KEPT_VERSIONS + self._service.config.max_staleness, versions.held(self._service.policies)
        needed = {*held.values(), *kept.versions_needed(self._service.run_dir)}
        versions.collect_garbage(self._service.policies, keep, needed)
        if self._remote is not None:
            self._upload(self._remote, keep, needed)

    def _upload(self, remote: RemotePolicies, keep: int, needed: set[int]) -> None:
        """A store that is away for a while costs a version there, not the run."""
        try:
            remote.publish(versions.version_folder(self._service.policies, self.version))
            remote.collect_garbage(keep, needed)
        except InfraError as error:
            self._service.log.error("policy not uploaded", policy_version=self.version, reason=str(error))
