"""The learner's state: makes or loads the first policy, resumes, trains a batch, checkpoints and publishes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import torch

from kbrl_async.errors import InfraError, NonFiniteLoss, RunError
from kbrl_async.learning import checkpoints, efficiency, kept
from kbrl_async.learning.distributed.process_group import ProcessGroup
from kbrl_async.learning.losses import LossOptions
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import ModelOptions, causal_lm, load_model, load_tokenizer
from kbrl_async.learning.policies.remote import RemotePolicies, open_remote
from kbrl_async.learning.replay_log import ReplayLog
from kbrl_async.learning.sft import without_behaviour
from kbrl_async.learning.trainer import Trainer, TrainerOptions
from kbrl_async.runs import origins
from kbrl_async.runs.config import Config, learner_threads
from kbrl_async.runs.telemetry.live import LEARNER_FACTS
from protocols.records import CORRECTOR, VERIFIER, TrainBatch, TrainGroup, UpdateReport
from services.learner import ranks
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
        self._tail = ReplayLog(self._checkpoints)
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
        team = ranks.join(service.device)
        if team is not None:
            team.tell(str(base))
        trainer = make_trainer(config, base, service.device, team)
        learning = cls(service, trainer, base, *origins.canaries(config, load_tokenizer(str(base))))
        learning._resume()
        return learning

    def close(self) -> None:
        """Lets the other ranks go."""
        if self._trainer.team is not None:
            self._trainer.team.close()

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
        for batch, groups in self._tail.since(self.version):
            self._step(batch, groups, tick)
        self._trained_again = self.version - resumed.progress.version
        about = {"checkpoint": resumed.folder.name, "trained_again": self._trained_again}
        self._service.log.info("resumed", policy_version=self.version, **about)
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
        self._tail.add(batch, groups)
        if self.version % self._service.config.learner.checkpoint_every == 0:
            self._checkpoint()
        self._publish()
        self._service.tell({name: metrics[name] for name in LEARNER_FACTS if name in metrics})
        self._service.log.info(
            "updated",
            policy_version=self.version,
            loss=round(metrics.get("loss", 0.0), 4),
            entropy=round(metrics.get("entropy", 0.0), 4),
            seconds=round(time.time() - started, 2),
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
        ranks_at_work = 1 if trainer.team is None else trainer.team.size
        passes = trainer.options.epochs  # `input_tokens` counts every pass already
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
        return tera * 1e12 if tera else efficiency.measured_peak(self._trainer.device, self._trainer.options.dtype)

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
        self._tail.forget(before=checkpoints.oldest(self._checkpoints))

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


def make_trainer(config: Config, base: Path | str, device: str, team: ProcessGroup | None = None) -> Trainer:
    """The trainer before its first batch: a function of the base model, the configuration and its seed."""
    torch.manual_seed(config.seed)
    computed = trainer_options(config, device)
    place = device if team is None else str(team.device)
    shard = config.learner.shard and team is not None
    options = ModelOptions(
        str(base),
        held_precision(config, computed, place),
        "cpu" if shard else place,  # what is spread need not fit on one device
        lora_rank=config.lora_rank,
        gradient_checkpointing=shard,
        adapters=role_adapters(config),
        quantisation=config.learner.base_quantisation,
    )
    reference = reference_model(config, base, place)
    return Trainer(load_model(options), computed, place, reference=reference, team=team, shard=shard)


def held_precision(config: Config, computed: TrainerOptions, place: str) -> str:
    """Of the base's weights: frozen ones are held as they are computed with, and adapters always in fp32.

    The transformers engine holds fp32, and proves each version to 1e-3 by log-probs: with it, so does the learner.
    """
    is_frozen = bool(config.lora_rank) and place.startswith("cuda")
    return computed.dtype if is_frozen and config.sampler.engine != "transformers" else "fp32"


def role_adapters(config: Config) -> tuple[str, ...]:
    """Roles with an adapter of their own; the solver's is the main one."""
    return (VERIFIER, CORRECTOR) if config.agents.adapters else ()


def reference_model(config: Config, base: Path | str, device: str) -> torch.nn.Module | None:
    """The frozen policy that a KL penalty is taken against; None where there is none, or the LoRA base serves."""
    if config.learner.kl == "none" or config.learner.kl_weight == 0 or config.lora_rank:
        return None
    return load_model(ModelOptions(str(base), device=device)).requires_grad_(False).eval()


def base_model(service: Service, is_stopped: Callable[[], bool]) -> Path | str | None:
    """The model that training starts from; None when the run is stopped while it is made."""
    shown = -1.0

    def progress(line: str, share: float) -> None:
        nonlocal shown
        if is_stopped():
            raise InterruptedError
        if share >= shown + 0.1 or shown < 0:
            shown = share
            service.log.info("making the small policy", done=f"{share:.0%}", now=line)

    try:
        return origins.base_model(service.config, progress)
    except InterruptedError:
        return None


def arithmetic(setting: str, device: str) -> str:
    """`auto` is bf16 on a GPU and fp32 on a CPU, where sampler and learner then agree to 1e-3 in every ratio."""
    names = {"float32": "fp32", "bfloat16": "bf16", "auto": "fp32" if device == "cpu" else "bf16"}
    return names[setting]


def trainer_options(config: Config, device: str) -> TrainerOptions:
    learner = config.learner
    return TrainerOptions(
        loss=config.loss,
        loss_options=LossOptions(
            clip_low=learner.clip_low,
            clip_high=learner.clip_high,
            dual_clip=learner.dual_clip,
            tv_delta=learner.dppo_delta,
        ),
        corrections=tuple(config.corrections),
        kl=learner.kl,
        kl_weight=learner.kl_weight,
        normalise=learner.normalise,
        dr_grpo_length=config.max_tokens,
        schedule=learner.schedule,
        total_steps=config.max_steps * learner.epochs * learner.minibatches,
        negative_scale=learner.negative_scale,
        learning_rate=config.learning_rate,
        warmup_steps=learner.warmup_steps,
        grad_clip=learner.grad_clip,
        epochs=learner.epochs,
        minibatches=learner.minibatches,
        dtype=arithmetic(learner.dtype, device),
        seed=config.seed,
        kernels=learner.kernels,
        share_prompts=learner.share_prompts,
        memory_gb=learner.memory_gb,
        token_budget=learner.token_budget or TrainerOptions().token_budget,
    )
