"""One of the ranks that share each row's tokens, a process of its own for `test_context`; without ranks, the whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kbrl_async.learning.distributed import ProcessGroup
from kbrl_async.learning.forward_backward import Scored, forward_backward
from kbrl_async.learning.policies.models import wrap_lora
from kbrl_async.learning.settings import Learner
from kbrl_async.learning.trainer import Trainer
from protocols.records import TrainGroup, TrainSample
from tests.models import update_settings
from tests.unit.learning.test_families import disturbed, model_of

CPU = torch.device("cpu")
Found = tuple[torch.Tensor, dict[str, torch.Tensor]]


def lora() -> torch.nn.Module:
    return disturbed(wrap_lora(model_of("qwen3"), rank=3))


def computed(model: torch.nn.Module, samples: list[TrainSample], ranks: int) -> Found:
    """Log-probs of all response tokens, padded [samples, longest], and gradients: summed over the ranks."""
    passes = forward_backward(model, Learner(kernels="fused", context_parallel=ranks, token_budget=60), CPU)
    found = torch.zeros(len(samples), 16)

    def visit(scored: Scored) -> torch.Tensor:
        found[scored.sample_T, scored.offset_T] = scored.log_pi_T.detach()
        return (scored.log_pi_T * (1 + scored.sample_T)).sum()

    passes.run(samples, 0.7, visit, lambda: None)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if ranks > 1:
        for tensor in (found, *gradients.values()):
            dist.all_reduce(tensor)
    return found, gradients


def updated(samples: list[TrainSample], group: ProcessGroup | None) -> dict[str, float]:
    """Metrics of a whole update with a penalty, whose reference is the base under the adapter."""
    size = 1 if group is None else group.size
    options: dict[str, Any] = {"context_parallel": size, "processes": size, "kernels": "fused"}
    settings = update_settings(loss="decoupled", kl="k2", kl_weight=0.5, epochs=1, minibatches=2, **options)
    trainer = Trainer(lora(), settings, process_group=group)
    return trainer.step([TrainGroup("g", "p", 1, samples)], 0.7) if group is None or not group.rank else follow(trainer)


def follow(trainer: Trainer) -> dict[str, float]:
    trainer.follow()
    return {}


def main(rank: int, port: int, samples: list[TrainSample], folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    group = ProcessGroup(CPU)
    results: list[Any] = [computed(lora(), samples, 2), computed(model_of("qwen2"), samples, 2)]
    results.append(updated(samples, group))
    if rank == 0:
        torch.save(results, folder / "found.pt")
    group.close()
    os._exit(0)  # gloo's threads may outlive the interpreter's teardown
