"""The learner's updates, made again from the policy that the run began with, and compared with what it reported.

Invariants
* Nothing of the run is written to; the policy is made again in memory.
* On a CPU with the same versions and threads every number is the same to the last bit; elsewhere `TOLERANCE` holds.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from kbrl_async.errors import CheckpointError, NonFiniteLoss
from kbrl_async.learning import checkpoints
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import DTYPES
from kbrl_async.learning.trainer import Trainer
from kbrl_async.runs.archive.rows import UpdateRow
from kbrl_async.runs.config import Config
from kbrl_async.runs.config.layout import available_cores, cpu_layout
from kbrl_async.weights import LOCAL
from protocols.records import PolicyVersion, TrainGroup
from services.learner.policy import make_trainer
from services.replay.decisions import Diverged

TOLERANCE = {"cpu": 1e-3, "cuda": 5e-2}
"""Largest relative difference of a metric that still counts as the same update."""
SMALL = 1e-6
"""Absolute difference below which nothing counts: some metrics are differences that are nothing."""
OF_THE_MACHINE = ("_s", "_per_s", "_mb", "mfu")
"""Endings of metrics that say how fast it went, not what came out."""


class Curve(msgspec.Struct):
    """How the loss curve compares."""

    updates: int = 0
    exact: int = 0
    """Updates with every metric the same to the last bit."""
    worst: float = 0.0
    """Largest relative difference."""
    worst_metric: str = ""


def device_of(config: Config) -> str:
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def first_trainer(run_dir: Path, config: Config) -> Trainer:
    """The learner as it was before the first batch; its policy is proven by the first version's canary (I8).

    :raises CheckpointError: the base model is gone, or another one.
    """
    manifest = first_manifest(run_dir)
    trainer = _trainer(config, manifest)
    prove(trainer, manifest, TOLERANCE[trainer.device.type])
    return trainer


def _trainer(config: Config, manifest: PolicyVersion) -> Trainer:
    if manifest.kind not in LOCAL:
        cause = f"the updates of this run were not made here (learner.engine={config.learner.engine})"
        raise CheckpointError(cause, "Add --no-train: its decisions are made again")
    if config.is_rehearsal and not any(Path(manifest.base_model).glob("*.safetensors")):
        cause = f"the random weights of this rehearsal are no longer in {manifest.base_model}"
        raise CheckpointError(cause, "Add --no-train, or rehearse with --keep, which leaves them there")
    # As many threads as the learner has: sums are split among them, and their last bits depend on how.
    torch.set_num_threads(config.learner.threads or len(cpu_layout(config, available_cores()).learner))
    return make_trainer(config, manifest.base_model, device_of(config))


def first_manifest(run_dir: Path) -> PolicyVersion:
    """Of version 0, which is remembered when its weights are collected."""
    path = run_dir / "policies" / versions.FIRST
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", "The run is older than replay, or has published nothing yet")
    return msgspec.json.decode(path.read_bytes(), type=PolicyVersion)


def prove(trainer: Trainer, manifest: PolicyVersion, tolerance: float) -> None:
    """CheckpointError unless the trainer's policy is the manifest's."""
    ours = trainer.sequence_logprobs(manifest.canary_ids, DTYPES[manifest.dtype])
    worst = max(abs(a - b) for a, b in zip(ours, manifest.canary_logprobs, strict=True))
    if worst > tolerance:
        raise CheckpointError(
            f"{manifest.base_model} is not what the run began with: canary log-probs differ by {worst:.3g}",
            "Restore the model folder, or the code and library versions of the run",
        )


class ReplayedUpdates:
    """`updates.train(groups, version)`, then `updates.compare(batch_id, metrics, reported)`."""

    def __init__(self, trainer: Trainer, config: Config) -> None:
        self.trainer, self._config = trainer, config
        self.curve = Curve()
        self._tolerance = TOLERANCE[trainer.device.type]

    def train(self, groups: list[TrainGroup], version: int) -> dict[str, float]:
        return self.trainer.step(groups, self._config.temperature, version=version)

    def compare(self, batch_id: str, ours: Mapping[str, float], recorded: UpdateRow) -> None:
        """Raises `Diverged` where a metric is another one."""
        self.curve.updates += 1
        names = [name for name in ours if name in recorded.metrics and not name.endswith(OF_THE_MACHINE)]
        self.curve.exact += all(ours[name] == recorded.metrics[name] for name in names)
        for name in names:
            difference = relative(ours[name], recorded.metrics[name])
            if difference > self._tolerance:
                raise Diverged(f"{name} of {batch_id}", recorded.metrics[name], ours[name])
            if difference > self.curve.worst:
                self.curve.worst, self.curve.worst_metric = difference, f"{name} of {batch_id}"

    def compare_weights(self, run_dir: Path, version: int) -> str:
        """How the policy after the last update compares with the published one of that version, in words."""
        folder = versions.version_folder(run_dir / "policies", version)
        if not folder.is_dir():
            return f"policy version {version} is not on disk any more"
        manifest = versions.load_manifest(folder)
        with tempfile.TemporaryDirectory() as scratch:
            model, step, ids = self.trainer.model, self.trainer.optimizer_step, manifest.canary_ids
            ours = versions.publish(Path(scratch), model, version, None, step, ids, rounded_to=manifest.dtype)
        if ours.weights_sha256 == manifest.weights_sha256:
            return f"policy version {version}: all weights equal bit by bit"
        prove(self.trainer, manifest, self._tolerance)
        return f"policy version {version}: weights differ in their last bits, canary log-probs agree"


def relative(ours: float, recorded: float) -> float:
    if ours == recorded or abs(ours - recorded) <= SMALL or (math.isnan(ours) and math.isnan(recorded)):
        return 0.0
    return abs(ours - recorded) / max(abs(ours), abs(recorded))


def trainer_at(run_dir: Path, config: Config, version: int) -> tuple[Trainer, str]:
    """The learner before the batch of `version`, and what it was made of: its checkpoint, else the published policy.

    :raises CheckpointError: neither is on disk any more.
    """
    trainer = _trainer(config, first_manifest(run_dir))
    folder = run_dir / "checkpoints" / f"{checkpoints.PREFIX}{version:06d}"
    if folder.is_dir():
        checkpoints.restore(folder, trainer)
        return trainer, f"checkpoint {folder.name}, with its optimizer"
    if version > 0:
        folder = versions.version_folder(run_dir / "policies", version)
        trainer.optimizer_step = versions.load_weights(folder, trainer.model).step
        return trainer, f"{folder.name}, with a fresh optimizer and data order: only first minibatches compare"
    return trainer, "the base model"


def again(trainer: Trainer, groups: list[TrainGroup], temperature: float, version: int) -> dict[str, float] | str:
    """The metrics of one update, or why there are none."""
    try:
        return trainer.step(groups, temperature, version=version)
    except NonFiniteLoss as error:
        return str(error)
