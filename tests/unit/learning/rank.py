"""Ranks on a CPU, forked: `python -m tests.unit.learning.rank FOLDER replicated|full|lora SIZE …`, group by group.

Rank 0 trains, checkpoints, publishes, trains on, goes back to the checkpoint and trains the same again. Where there is
a checkpoint already, of whatever number of ranks, it goes on from there instead.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from kbrl_async.errors import NonFiniteLoss
from kbrl_async.learning import checkpoints, training_state
from kbrl_async.learning.distributed import ProcessGroup
from kbrl_async.learning.policies import versions
from kbrl_async.learning.trainer import Trainer
from kbrl_async.runs.config import Config
from protocols.records import TrainGroup
from services.learner.policy import make_trainer
from tests.models import update_settings
from tests.ports import free_port
from tests.unit.learning import fake_torchao

CANARY = [3, 1, 4, 1, 5, 9]
LORA_RANK = 2


def settings(how: str) -> Config:
    """`full` holds against a reference policy, too; `packed` has 8-bit moments."""
    penalty: dict[str, Any] = {"kl": "k3", "kl_weight": 0.1} if how == "full" else {}
    return update_settings(
        epochs=1,
        minibatches=2,
        loss="decoupled",
        learning_rate=1e-3,
        warmup_steps=0,
        token_budget=24,  # so little that the ranks have different numbers of microbatches
        lora_rank=0 if how in ("full", "packed") else LORA_RANK,
        kernels="fused" if how == "lora" else "plain",
        activation_checkpointing="full" if how == "full" else "selective",
        optimizer="adamw_8bit" if how == "packed" else "adamw",
        shard=how != "replicated",
        processes=2,
        **penalty,
    )


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of all that are trained, whole."""
    weights = trainer.gathered_weights() or trainer.parameters.items()
    return {name: p.detach().clone() for name, p in weights}


def digest(trainer: Trainer) -> list[float]:
    return [float(p.double().square().sum()) for p in weights_of(trainer).values()]


def train(trainer: Trainer, groups: list[TrainGroup], folder: Path) -> list[dict[str, float]]:
    """Metrics of two updates, of a third one, and of that again from the checkpoint before it."""
    metrics = [trainer.step(groups, 0.7, version=1) for _ in range(2)]
    checkpoints.save(folder / "checkpoints", trainer, checkpoints.LearnerProgress(version=2), keep_checkpoints=2)
    publish(trainer, folder, 2)
    metrics.append(trainer.step(groups, 0.7, version=2))
    once = weights_of(trainer)
    spoil(trainer, groups)
    assert checkpoints.resume(folder / "checkpoints", trainer) is not None
    metrics.append(trainer.step(groups, 0.7, version=2))
    again = weights_of(trainer)
    assert all(torch.equal(once[name], again[name]) for name in again), "not the same, bit by bit"
    checkpoints.save(folder / "checkpoints", trainer, checkpoints.LearnerProgress(version=3), keep_checkpoints=2)
    return metrics


def spoil(trainer: Trainer, groups: list[TrainGroup]) -> None:
    """What is no number on one rank is found by all, and none of them takes a step."""
    first = next(iter(trainer.parameters.values())).detach()
    (first.to_local() if isinstance(first, DTensor) else first).fill_(float("nan"))
    try:
        trainer.step(groups, 0.7, version=3)
    except NonFiniteLoss:
        return
    raise AssertionError("trained on what is no number")


def go_on(trainer: Trainer, groups: list[TrainGroup], folder: Path) -> list[dict[str, float]]:
    """A fourth one, from the checkpoint."""
    resumed = checkpoints.resume(folder / "checkpoints", trainer)
    assert resumed is not None
    assert resumed.progress.version == 3, resumed.notes
    return [trainer.step(groups, 0.7, version=3)]


def publish(trainer: Trainer, folder: Path, version: int) -> None:
    versions.publish(
        folder / "policies",
        trainer.model,
        version,
        None,
        0,
        CANARY,
        str(folder / "base"),
        texts=[("x", [7, 8])],
        logprobs_of=trainer.sequence_logprobs,
        gathered=trainer.gathered_weights(),
    )


def rank(folder: Path, how: str) -> None:
    torch.set_num_threads(1)
    if how == "packed":
        fake_torchao.install()
    ranks = ProcessGroup(torch.device("cpu"))
    trainer = make_trainer(settings(how), folder / "base", "cpu", ranks)
    if ranks.rank:
        trainer.follow()
        trainer.close()
        return
    groups = msgspec.json.decode((folder / "groups.json").read_bytes(), type=list[TrainGroup])
    goes_on = (folder / "checkpoints").is_dir()
    metrics = (go_on if goes_on else train)(trainer, groups, folder)
    moments = (training_state.moments(trainer.optimizer, p) for p in trainer.parameters.values())
    tensors = [*trainer.model.parameters(), *(x for held in moments for x in held.values())]
    held = sum(x.to_local().numel() for x in tensors if isinstance(x, DTensor))
    whole = sum(x.numel() for x in tensors if not isinstance(x, DTensor) and x.ndim)
    said = {"metrics": metrics, "held": held, "whole": whole, "weights": digest(trainer)}
    (folder / f"said-{ranks.size}.json").write_text(json.dumps(said))
    save_file(weights_of(trainer), folder / f"weights-{ranks.size}.safetensors")
    trainer.close()


def fork(folder: Path, how: str, size: int) -> list[int]:
    """Exit codes of `size` ranks, which need not load torch again."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    pids = []
    for number in range(size):
        if pid := os.fork():
            pids.append(pid)
            continue
        os.environ["RANK"] = str(number)
        try:
            rank(folder, how)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)  # gloo's threads may outlive the interpreter's teardown
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


if __name__ == "__main__":
    for size in map(int, sys.argv[3:]):
        if any(fork(Path(sys.argv[1]), sys.argv[2], size)):
            sys.exit(1)
