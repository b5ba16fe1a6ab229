"""One of two ranks on a CPU, a process: `python -m tests.unit.learning.rank FOLDER plain|fused|sharded`.

Rank 0 trains, checkpoints, publishes, trains on, goes back to the checkpoint and trains the same again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec
import torch
from torch.distributed.tensor import DTensor

from kbrl_async.learning import checkpoints
from kbrl_async.learning.distributed import ProcessGroup
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import causal_lm, enable_checkpointing, wrap_lora
from kbrl_async.learning.trainer import Trainer
from kbrl_async.runs.config import Config
from protocols.records import TrainGroup
from tests.models import tiny_model, update_settings

SETTINGS = update_settings(
    epochs=1,
    minibatches=2,
    loss="decoupled",
    learning_rate=1e-3,
    warmup_steps=0,
    token_budget=24,  # so little that the ranks have different numbers of microbatches
)
CANARY = [3, 1, 4, 1, 5, 9]


def make(how: str) -> torch.nn.Module:
    model = wrap_lora(tiny_model(), rank=2)
    if how == "sharded":
        enable_checkpointing(causal_lm(model))
        model.train()  # as the learner loads it
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model


def settings(how: str) -> Config:
    learner = msgspec.structs.replace(
        SETTINGS.learner, kernels="fused" if how == "fused" else "plain", shard=how == "sharded", processes=2
    )
    return msgspec.structs.replace(SETTINGS, learner=learner)


def digest(trainer: Trainer) -> list[float]:
    return [float(p.detach().double().square().sum()) for p in trainer.parameters.values()]


def train(trainer: Trainer, groups: list[TrainGroup], folder: Path) -> list[dict[str, float]]:
    """Metrics of two updates and of a third one: twice from a checkpoint, once from a published version."""
    metrics = [trainer.step(groups, 0.7, version=1) for _ in range(2)]
    checkpoints.save(folder / "checkpoints", trainer, checkpoints.Progress(version=2), keep_checkpoints=2)
    scores = trainer.sequence_logprobs
    versions.publish(folder / "policies", trainer.model, 2, None, 0, CANARY, texts=[("x", [7, 8])], logprobs_of=scores)
    metrics.append(trainer.step(groups, 0.7, version=2))
    checkpoints.resume(folder / "checkpoints", trainer)
    metrics.append(trainer.step(groups, 0.7, version=2))
    versions.load_weights(folder / "policies" / "policy-v2", trainer.model)
    metrics.append(trainer.step(groups, 0.7, version=2))
    return metrics


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    ranks = ProcessGroup(torch.device("cpu"))
    torch.manual_seed(ranks.rank)  # rank 1 begins with other adapters: rank 0's count
    model = make(how)
    trainer = Trainer(model, settings(how), process_group=ranks)
    if ranks.rank:
        ranks.follow(trainer)
    else:
        groups = msgspec.json.decode((folder / "groups.json").read_bytes(), type=list[TrainGroup])
        metrics = train(trainer, groups, folder)
        (folder / "metrics.json").write_text(json.dumps(metrics))
        held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
        (folder / "held.json").write_text(json.dumps(held))
    (folder / f"weights-{ranks.rank}.json").write_text(json.dumps(digest(trainer)))
    ranks.close()


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads may outlive the interpreter's teardown
