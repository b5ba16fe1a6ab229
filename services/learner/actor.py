"""The learner's state: makes or loads the first policy, resumes, trains a batch, checkpoints and publishes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kbrl_async.config import Config
from kbrl_async.errors import RunError
from kbrl_async.learning import checkpoints, versions
from kbrl_async.learning.losses import LossOptions
from kbrl_async.learning.models import ModelOptions, load_model, load_tokenizer
from kbrl_async.learning.trainer import Trainer, TrainerOptions
from kbrl_async.policy.making import SmallPolicyOptions, ensure_small_policy
from kbrl_async.problems import load_problems
from kbrl_async.prompts import render_prompt
from kbrl_async.prompts.roles import CORRECTOR, VERIFIER
from protocols.records import TrainBatch, TrainGroup, UpdateReport
from services.runtime.service import Service

SMALL = "small"
KEPT_VERSIONS = 4
"""Published versions on disk beyond the allowed lag."""
CANARY_TOKENS = 32


class Learning:
    """The one owner of the weights."""

    def __init__(self, service: Service, trainer: Trainer, base: Path | str, canary: list[int]) -> None:
        self._service = service
        self._trainer = trainer
        self._base = str(base)
        self._canary = canary
        self._progress = checkpoints.Progress()

    @classmethod
    def open(cls, service: Service, is_stopped: Callable[[], bool]) -> Learning | None:
        """Loads or makes the policy, restores the newest checkpoint, publishes what is missing.

        Takes minutes where the small policy must be made; None when the run is stopped meanwhile.
        """
        config = service.config
        base = base_model(service, is_stopped)
        if base is None:
            return None
        torch.set_num_threads(config.learner.threads or len(service.layout.learner))
        torch.manual_seed(config.seed)
        device = service.device
        model = load_model(
            ModelOptions(str(base), device=device, lora_rank=config.lora_rank, adapters=role_adapters(config))
        )
        trainer = Trainer(
            model, trainer_options(config, device), device, reference=reference_model(config, base, device)
        )
        learning = cls(service, trainer, base, canary_ids(config, load_tokenizer(str(base))))
        learning._resume()
        return learning

    @property
    def version(self) -> int:
        return self._progress.version

    @property
    def _checkpoints(self) -> Path:
        return self._service.run_dir / "checkpoints"

    def _resume(self) -> None:
        resumed = checkpoints.resume(self._checkpoints, self._trainer)
        for note in resumed.notes if resumed else []:
            self._service.log.warning("checkpoint passed over", note=note)
        if resumed is None:
            self._checkpoint()
        else:
            self._progress = resumed.progress
            self._service.log.info("resumed", policy_version=self.version, checkpoint=resumed.folder.name)
        found = versions.newest(self._service.policies)
        if found is None or found[0].version != self.version:
            self._publish()

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
        metrics = self._trainer.step(groups, batch.temperature, tick, self.version)
        self._progress = checkpoints.Progress(
            version=self.version + 1,
            last_batch_id=batch.batch_id,
            batches=self._progress.batches + 1,
            samples=self._progress.samples + sum(len(group.samples) for group in groups),
            tokens=self._progress.tokens + int(metrics.get("tokens", 0)),
            last_metrics=metrics,
        )
        self._checkpoint()
        self._publish()
        self._service.log.info(
            "updated",
            policy_version=self.version,
            loss=round(metrics.get("loss", 0.0), 4),
            entropy=round(metrics.get("entropy", 0.0), 4),
            seconds=round(time.time() - started, 2),
        )
        return UpdateReport(batch.batch_id, self.version, metrics, started, time.time())

    def _checkpoint(self) -> None:
        checkpoints.save(
            self._checkpoints, self._trainer, self._progress, self._service.config.learner.keep_checkpoints
        )

    def _publish(self) -> None:
        parent = self.version - 1 if self.version else None
        step = self._trainer.optimizer_step
        versions.publish(
            self._service.policies, self._trainer.model, self.version, parent, step, self._canary, self._base
        )
        versions.collect_garbage(self._service.policies, KEPT_VERSIONS + self._service.config.max_staleness)


def role_adapters(config: Config) -> tuple[str, ...]:
    """Roles with an adapter of their own; the solver's is the main one."""
    return (VERIFIER, CORRECTOR) if config.agents.adapters else ()


def reference_model(config: Config, base: Path | str, device: str) -> torch.nn.Module | None:
    """The frozen policy that a KL penalty is taken against; None where there is none, or the LoRA base serves."""
    if config.learner.kl == "none" or config.learner.kl_weight == 0 or config.lora_rank:
        return None
    return load_model(ModelOptions(str(base), device=device)).requires_grad_(False).eval()


def base_model(service: Service, is_stopped: Callable[[], bool]) -> Path | str | None:
    """The model that training starts from: the project's own small one (made now, if need be) or the configured one."""
    config = service.config
    if config.model_name != SMALL:
        return config.model_name
    sft = config.sft
    options = SmallPolicyOptions(
        examples=sft.examples,
        prompt_option=config.prompt_option,
        hidden_size=sft.hidden_size,
        layers=sft.layers,
        heads=sft.heads,
        vocab_size=sft.vocab_size,
        max_seconds=sft.max_seconds,
        steps=sft.steps,
        batch_tokens=sft.batch_tokens,
        learning_rate=sft.lr,
        turn_share={"single_turn": 0.0, "multi_turn": sft.turn_share, "agents": sft.turn_share / 2}[config.mode],
        verdict_share=sft.turn_share / 2 if config.mode == "agents" else 0.0,
        shot_share=sft.shot_share if config.dataset_builder.prompt_option == "raicl" else 0.0,
    )
    shown = -1.0

    def progress(line: str, share: float) -> None:
        nonlocal shown
        if is_stopped():
            raise InterruptedError
        if share >= shown + 0.1 or shown < 0:
            shown = share
            service.log.info("making the small policy", done=f"{share:.0%}", now=line)

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        return ensure_small_policy(cache_folder(config), options, progress)
    except InterruptedError:
        return None


def cache_folder(config: Config) -> Path:
    """`cache_path`, else our folder in the user's cache."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(config.cache_path) if config.cache_path else users / "kbrl-async"


def canary_ids(config: Config, tokenizer: Any) -> list[int]:
    """The fixed prompt whose log-probs prove the policy: the start of the first problem's prompt."""
    problem = load_problems(config.problems or "")[0]
    prompt = render_prompt(config.prompt_option, problem, config.backend)
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
    return ids[:CANARY_TOKENS]


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
    )
