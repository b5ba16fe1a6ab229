"""Updates of a policy that several GPUs share out, at the shape of a real model. `torchrun … -m benchmarks.sharded`"""

from __future__ import annotations

import collections
import hashlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist

from benchmarks.harness import Commands, Result, say, timed
from benchmarks.harness.models import H100_DENSE, config_of, random_group
from kbrl_async.learning import checkpoints, efficiency
from kbrl_async.learning.distributed import ProcessGroup
from kbrl_async.learning.policies.models import wrap_lora
from kbrl_async.learning.policies.streaming import RandomWeights, skeleton
from kbrl_async.learning.settings import Learner
from kbrl_async.learning.sharded import ShardedModel
from kbrl_async.learning.trainer import Trainer
from kbrl_async.runs.config import Config

commands = Commands("sharded", __doc__)


@commands
def updates(
    shape: Annotated[str, "tiny, or a public model such as qwen2.5-7b"] = "tiny",
    lora_rank: Annotated[int, "0: all weights are trained"] = 0,
    lengths: Annotated[str, "tokens of a sequence, by comma"] = "256",
    sequences: Annotated[int, "of an update, for each rank"] = 2,
    count: Annotated[int, "updates of each length; the first is not counted"] = 3,
    masters: Literal["float32", "bfloat16"] = "float32",
    offload: bool = False,
    again: Annotated[Literal["auto", "none", "selective", "full"], "activation checkpointing"] = "auto",
    offload_activations: bool = False,
    context_parallel: Annotated[int, "ranks that share each sequence out"] = 1,
    resume: Annotated[str, "the folder of a checkpoint, of as many or other ranks, to begin with"] = "",
    checkpoint: Annotated[str, "a folder to write a checkpoint into, and to read it again"] = "",
    keep: Annotated[bool, "leave the checkpoint for another call's `resume`"] = False,
    publish: Annotated[bool, "gather all trained weights at rank 0, too"] = False,
) -> Result:
    """Tokens/s, model-FLOP utilisation and peak memory of whole updates by FSDP2, every rank with random weights.

    All that an update does is counted: what travels to the ranks, forward, loss, backward with each layer computed
    again, clipping, AdamW. FLOPs are those of the model: nothing computed twice, causal attention, the head at scored
    tokens.
    """
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    ranks = ProcessGroup(device)
    each = [int(length) for length in lengths.split(",")]
    built = time.perf_counter()
    learner = Learner(
        epochs=1, minibatches=1, negative_scale=1.0, kernels="auto", token_budget=min(each), shard=True,
        processes=max(2, ranks.size), activation_checkpointing=again, offload_activations=offload_activations,
        context_parallel=context_parallel,
    )  # fmt: skip
    trainer = _trainer(shape, lora_rank, learner, masters, offload, ranks)
    found: Result = {"shape": shape, "lora_rank": lora_rank, "ranks": ranks.size, "masters": masters}
    found |= {"offload": offload, "offload_activations": offload_activations, "context_parallel": context_parallel}
    found |= {"again": again, "build_s": time.perf_counter() - built}
    if ranks.rank:
        trainer.follow()
        trainer.close()
        sys.exit(0)
    peak = efficiency.measured_peak(device, device.type == "cuda")
    say("built", found | {"held_gb": _allocated(device), "peak_tflops": peak / 1e12})
    if resume:
        found["resume_s"] = timed(lambda: checkpoints.restore(Path(resume) / "step-000001", trainer))
        found["resumed"] = _digest(trainer)
        say("resumed", found["resume_s"], found["resumed"])
    for length in each:
        found[f"length_{length}"] = one = _measure(trainer, shape, length, sequences * ranks.size, count, peak)
        say(length, one)
    if publish:
        found["gather_s"] = timed(lambda: collections.deque(trainer.gathered_weights() or (), maxlen=0))
    if checkpoint:
        found |= _checkpointed(trainer, Path(checkpoint), keep)
    trainer.close()
    return found


def _trainer(shape: str, lora_rank: int, learner: Learner, masters: str, offload: bool, ranks: ProcessGroup) -> Trainer:
    on_gpu = ranks.device.type == "cuda"
    arithmetic = torch.bfloat16 if on_gpu else torch.float32
    held = arithmetic if lora_rank or masters == "bfloat16" else torch.float32
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config_of(shape).save_pretrained(folder)
        model = skeleton(folder, held)
    if lora_rank:
        model = wrap_lora(model, lora_rank)
    sharded = ShardedModel(model, ranks, arithmetic=arithmetic, offload=offload, source=RandomWeights())
    settings = Config(loss="grpo", learning_rate=1e-6, lora_rank=lora_rank, learner=learner)
    return Trainer(model, settings, ranks.device, process_group=ranks, sharded=sharded)


def _measure(trainer: Trainer, shape: str, length: int, sequences: int, count: int, peak: float) -> Result:
    groups = random_group(config_of(shape).vocab_size, length // 4, length, sequences)
    if trainer.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    last = dict[str, float]()
    took = [timed(lambda: last.update(trainer.step(groups, 1.0))) for _ in range(count)]  # ends on the host
    best = min(took[1:] or took)
    tokens = length * sequences
    assert trainer.process_group is not None
    flops = _flops_per_token(trainer, length) * tokens / best / trainer.process_group.size
    return {
        "tokens_per_s": tokens / best,
        "mfu": flops / peak,
        "mfu_of_989": flops / H100_DENSE,
        "peak_gb": efficiency.peak_memory_mb(trainer.device) / 1e3 * 1.048576,
        "steps_s": took,
        "loss": last["loss"],
        "grad_norm": last["grad_norm"],
    }


def _flops_per_token(trainer: Trainer, length: int) -> float:
    """Those of the model, its head at the scored three quarters."""
    config: Any = trainer.model.config
    is_frozen = any(not p.requires_grad for p in trainer.model.parameters())
    unscored = (4 if is_frozen else 6) * 0.25 * config.vocab_size * config.hidden_size
    return efficiency.flops_per_token(trainer.model, length) - float(unscored)


def _digest(trainer: Trainer) -> str:
    """Of all trained weights, bit by bit."""
    seen = hashlib.sha256()
    for name, weight in trainer.gathered_weights() or ():
        seen.update(name.encode())
        seen.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()[:16]


def _checkpointed(trainer: Trainer, folder: Path, keep: bool) -> Result:
    """Seconds that training stands still for a checkpoint, that it takes in all, and to read it."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "step-000000").mkdir(parents=True)  # so that this one is not the first, which is waited for
    (folder / "step-000000" / "COMPLETE").touch()
    progress = checkpoints.LearnerProgress(version=1)
    began = time.perf_counter()
    still = timed(lambda: checkpoints.save(folder, trainer, progress, keep_checkpoints=1))
    trainer.settle()
    written = time.perf_counter() - began
    size = sum(path.stat().st_size for path in (folder / "step-000001").iterdir()) / 1e9
    read = timed(lambda: checkpoints.restore(folder / "step-000001", trainer))
    if not keep:
        shutil.rmtree(folder)
    found: Result = {"checkpoint_gb": size, "still_s": still, "written_s": written, "read_s": read}
    found["sha256"] = _digest(trainer)
    say("checkpoint", found)
    return found


def _allocated(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0


if __name__ == "__main__":
    try:
        commands.main()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
