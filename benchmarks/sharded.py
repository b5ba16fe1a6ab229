"""Updates of a policy that several GPUs share out, at the shape of a real model. `torchrun … -m benchmarks.sharded`"""

from __future__ import annotations

import collections
import multiprocessing as mp
import os
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
import torch.distributed as dist

from benchmarks import weights
from benchmarks.harness import Commands, Result, say, timed
from benchmarks.harness.models import H100_DENSE, config_of, planned_gb, random_group
from kbrl_async.learning import checkpoints, efficiency
from kbrl_async.learning.distributed import ProcessGroup
from kbrl_async.learning.engine import LocalEngine
from kbrl_async.learning.policies.models import DTYPES, wrap_lora
from kbrl_async.learning.policies.streaming import RandomWeights, skeleton
from kbrl_async.learning.settings import Learner
from kbrl_async.learning.sharded import ShardedModel
from kbrl_async.learning.trainer import Trainer
from kbrl_async.runs.config import Config
from kbrl_async.weights import Canaries
from kbrl_async.weights.direct import Sender
from protocols.records import TrainGroup
from services.learner.publishing import Publisher

commands = Commands("sharded", __doc__)
DIGESTED = 1 << 24
"""Numbers at once."""


@commands
def updates(
    shape: Annotated[str, "tiny, or a public model such as qwen2.5-7b"] = "tiny",
    lora_rank: Annotated[int, "0: all weights are trained"] = 0,
    lengths: Annotated[str, "tokens of a sequence, by comma"] = "256",
    sequences: Annotated[int, "of an update, for each rank"] = 2,
    count: Annotated[int, "updates of each length; the first is not counted"] = 3,
    masters: Literal["float32", "bfloat16"] = "float32",
    optimizer: Annotated[Literal["adamw", "adamw_8bit"], "adamw_8bit: moments in a byte each, by torchao"] = "adamw",
    offload: bool = False,
    kernels: Literal["auto", "plain", "fused"] = "auto",
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
        epochs=1, minibatches=1, negative_scale=1.0, kernels=kernels, token_budget=min(each), shard=True,
        processes=max(2, ranks.size), activation_checkpointing=again, offload_activations=offload_activations,
        context_parallel=context_parallel, master_dtype=masters, offload=offload, optimizer=optimizer,
    )  # fmt: skip
    trainer = _trainer(config_of(shape), lora_rank, learner, ranks)
    found: Result = {"shape": shape, "lora_rank": lora_rank, "ranks": ranks.size, "masters": masters}
    found |= {
        "optimizer": optimizer,
        "kernels": kernels,
        "offload": offload,
        "offload_activations": offload_activations,
        "context_parallel": context_parallel,
    }
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
        one = _measure(trainer, shape, length, sequences * ranks.size, count, peak) | _predicted(trainer, length)
        found[f"length_{length}"] = one
        say(length, one)
    if publish:
        found["gather_s"] = timed(lambda: collections.deque(trainer.gathered_weights() or (), maxlen=0))
    if checkpoint:
        groups = _group(shape, each[-1], sequences * ranks.size)
        found |= _checkpointed(trainer, Path(checkpoint), keep, lambda: trainer.step(groups, 1.0))
    trainer.close()
    return found


@commands
def flight(
    shape: Annotated[str, "tiny, 300m, or a public model such as qwen3-4b"] = "tiny",
    samplers: Annotated[int, "processes on the GPUs after the ranks': NCCL takes one GPU each"] = 1,
    count: Annotated[int, "versions; the first is a warm-up"] = 4,
    length: Annotated[int, "tokens of an update's sequences"] = 256,
    write: Annotated[bool, "files are written beside, as in a run"] = True,
) -> Result:
    """From the last optimiser step to all samplers' first answers by the new version, which each rank sends its rows
    of, and whose canaries are proven."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    ranks = ProcessGroup(device)
    learner = Learner(
        epochs=1, minibatches=1, negative_scale=1.0, token_budget=length, shard=True, processes=max(2, ranks.size)
    )
    trainer = _trainer(weights.tied_config_of(shape), 0, learner, ranks)
    if ranks.rank:
        trainer.follow()
        trainer.close()
        sys.exit(0)
    root = Path(tempfile.mkdtemp())
    engine = LocalEngine(
        trainer, "", Canaries(weights.CANARY, []), root, root, "bf16" if device.type == "cuda" else "fp32"
    )
    sender = Sender("127.0.0.1", device, 60.0, say, ranks.size)
    assert engine.send_parts(sender.meeting, 60.0)
    publisher, pipes = Publisher(root, sender, skips=True), []
    for number in range(samplers):
        ours, theirs = mp.get_context("spawn").Pipe()
        place = f"cuda:{ranks.size + number}" if device.type == "cuda" else "cpu"
        args = (root, ["direct"] * count, f"sampler.{number + 1}", shape, place, theirs)
        mp.get_context("spawn").Process(target=weights.sample, args=args, daemon=True).start()
        pipes.append(ours)
    assert all(pipe.recv()[0] == "ready" for pipe in pipes)
    rows, groups = [], _group(shape, length, ranks.size)
    for version in range(count):
        trainer.step(groups, 1.0)
        rows.append(_published(engine, publisher, version, pipes, write))
        say(f"v{version}", rows[-1])
    publisher.finish()
    engine.close()
    publisher.close()
    size = sum(p.numel() for p in trainer.parameters.values()) * (2 if device.type == "cuda" else 4)
    found: Result = {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}
    found |= {"shape": shape, "ranks": ranks.size, "samplers": samplers, "gigabytes": size / 1e9}
    shutil.rmtree(root, ignore_errors=True)
    return found | {"ok": max(row["canary_error"] for row in rows) < 0.1}


def _published(
    engine: LocalEngine, publisher: Publisher, version: int, pipes: list[Any], write: bool
) -> dict[str, float]:
    stepped = time.time()
    engine.keep(publisher.free())
    freed = time.time()
    pending = engine.publish(version, None)
    if not write and version:
        pending = msgspec.structs.replace(pending, fill=lambda _: {"": ""})
    publisher.begin(pending, lambda: None)
    critical = time.time() - stepped
    answers = [pipe.recv() for pipe in pipes]
    assert {answer[0] for answer in answers} == {version}
    return {
        "critical_s": critical,
        "freed_s": freed - stepped,
        "first_answer_s": max(at for _, at, _, _ in answers) - stepped,
        "received_s": max(seconds for _, _, seconds, _ in answers),
        "canary_error": max(error for _, _, _, error in answers),
    }


def _trainer(config: Any, lora_rank: int, learner: Learner, ranks: ProcessGroup) -> Trainer:
    on_gpu = ranks.device.type == "cuda"
    arithmetic = torch.bfloat16 if on_gpu else torch.float32
    held = arithmetic if lora_rank else DTYPES["bf16" if learner.master_dtype == "bfloat16" else "fp32"]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model = skeleton(folder, held)
    if lora_rank:
        model = wrap_lora(model, lora_rank)
    sharded = ShardedModel(model, ranks, arithmetic=arithmetic, offload=learner.offload, source=RandomWeights())
    settings = Config(loss="grpo", learning_rate=1e-6, lora_rank=lora_rank, learner=learner)
    return Trainer(model, settings, ranks.device, process_group=ranks, sharded=sharded)


def _measure(trainer: Trainer, shape: str, length: int, sequences: int, count: int, peak: float) -> Result:
    groups = _group(shape, length, sequences)
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


def _predicted(trainer: Trainer, length: int) -> Result:
    """What `kbrl plan` counts for a rank."""
    settings = trainer.settings
    assert isinstance(settings, Config)
    assert trainer.process_group is not None
    learner = msgspec.structs.replace(settings.learner, processes=trainer.process_group.size)
    counted = msgspec.structs.replace(settings, learner=learner)
    return planned_gb(counted, trainer.model.config, length, trainer.device)


def _group(shape: str, length: int, sequences: int) -> list[TrainGroup]:
    return random_group(config_of(shape).vocab_size, length // 4, length, sequences)


def _digest(trainer: Trainer) -> str:
    """Of all trained weights, bit by bit, added up on the device: the same for any number of ranks."""
    total = 0
    for name, weight in trainer.gathered_weights() or ():
        bits = weight.detach().contiguous().view(-1).view(torch.int16 if weight.itemsize == 2 else torch.int32)
        for at in range(0, len(bits), DIGESTED):
            part = bits[at : at + DIGESTED].long()
            total += int((part * torch.arange(1, len(part) + 1, device=part.device)).sum())
        total = (total * 1_000_003 + zlib.crc32(name.encode())) % (1 << 64)
    return f"{total:016x}"


def _checkpointed(trainer: Trainer, folder: Path, keep: bool, update: Callable[[], object]) -> Result:
    """Seconds that training stands still for a checkpoint, that it takes in all with an update beside it, and to read
    it; whether the weights are then those that were saved. What the disk can do stands beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "step-000000").mkdir(parents=True)  # so that this one is not the first, which is waited for
    (folder / "step-000000" / "COMPLETE").touch()
    disk, alone = _disk_gb_per_s(folder, trainer.device), timed(update)
    before = _digest(trainer)
    began = time.perf_counter()
    still = timed(lambda: checkpoints.save(folder, trainer, checkpoints.LearnerProgress(version=1), 1))
    beside = timed(update)
    changed = _digest(trainer)
    trainer.settle()
    written = time.perf_counter() - began
    size = sum(path.stat().st_size for path in (folder / "step-000001").iterdir()) / 1e9
    read = timed(lambda: checkpoints.restore(folder / "step-000001", trainer))
    found: Result = {"checkpoint_gb": size, "still_s": still, "written_s": written, "read_s": read}
    found |= {"update_s": alone, "update_beside_s": beside, "disk_gb_per_s": disk}
    found |= {"digest": (after := _digest(trainer)), "ok": after == before != changed}
    if not keep:
        shutil.rmtree(folder)
    say("checkpoint", found)
    return found


def _disk_gb_per_s(folder: Path, device: torch.device) -> float:
    """Of one writer, synced."""
    content = os.urandom(1 << 24)
    pieces = 32 if device.type == "cuda" else 1
    began, path = time.perf_counter(), folder / "disk"
    with path.open("wb", buffering=0) as file:
        for _ in range(pieces):
            file.write(content)
        os.fsync(file.fileno())
    took = time.perf_counter() - began
    path.unlink()
    return pieces * len(content) / 1e9 / took


def _allocated(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0


if __name__ == "__main__":
    try:
        commands.main()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
