"""Where a learner's memory goes: what is computed again, moments, gaps. `python -m benchmarks.memory COMMAND`"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from typing import Annotated, Any, Literal

import msgspec
import torch

from benchmarks.harness import Commands, Result, say
from benchmarks.harness.models import config_of, planned_gb, random_group, random_model
from benchmarks.learner import RANK, TEMPERATURE, free
from kbrl_async.learning.policies.models import wrap_lora
from kbrl_async.learning.settings import Learner
from kbrl_async.learning.trainer import Trainer
from kbrl_async.runs.config import Config
from protocols.records import TrainGroup, TrainSample

commands = Commands("memory", __doc__)
MORE: dict[str, dict[str, Any]] = {
    "host": {"offload_activations": True},
    "8bit": {"optimizer": "adamw_8bit"},
    "shared": {"share_prompts": True},
}
"""Behind a way, after a plus each."""
AGREED = 0.02
"""Most by which a gradient's norm may differ from the first way's."""


class MemoryOptions(msgspec.Struct, frozen=True):
    """What all ways of a comparison have in common."""

    shape: str
    rank: int
    device: str
    learner: Learner

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def trainer(self, **changed: Any) -> Trainer:
        """The same weights each time."""
        config, learner = config_of(self.shape), msgspec.structs.replace(self.learner, **changed)
        held = torch.bfloat16 if self.on_gpu and self.rank else torch.float32
        model = random_model(config, self.device, held)
        settings = Config(loss="grpo", learning_rate=1e-6, lora_rank=self.rank, learner=learner)
        return Trainer(wrap_lora(model, self.rank) if self.rank else model, settings, self.device)


def options(shape: str, weights: str, device: str, token_budget: int, **more: Any) -> MemoryOptions:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        torch.set_num_threads(1)
    learner = Learner(
        epochs=1, minibatches=1, negative_scale=1.0, kernels="fused", warmup_steps=0, token_budget=token_budget, **more
    )
    return MemoryOptions(shape, RANK if weights == "lora" else 0, device, learner)


@commands
def again(
    shape: Annotated[str, "a model's name (qwen2.5-7b, …), or a folder with its config.json"] = "tiny",
    weights: Annotated[Literal["lora", "full"], "what is trained"] = "lora",
    ways: Annotated[
        tuple[str, ...],
        "activation_checkpointing; +host: its inputs wait there; +8bit: moments; +shared: the prompt once",
    ] = ("none", "selective", "full", "full+host"),
    device: Annotated[str, "by default the GPU where there is one"] = "",
    length: Annotated[int, "tokens of a sequence; 0: 8192, on a CPU 256"] = 0,
    group: int = 4,
    count: Annotated[int, "measured steps of each, after a first one"] = 3,
) -> Result:
    """Tokens/s and peak of an update in each way, beside what `kbrl plan` predicts; losses and gradients are compared.

    Weights and tokens are random, and the same for each. A peak is the allocator's, predictions are without CUDA's own.
    """
    asked = options(shape, weights, device, 0, share_prompts=False)
    length = length or (8192 if asked.on_gpu else 256)
    groups = random_group(config_of(shape).vocab_size, length // 4, length, group)
    found: dict[str, Result] = {}
    for way in ways:
        mode, *more = way.split("+")
        changed = {name: value for one in more for name, value in MORE[one].items()}
        trainer = asked.trainer(token_budget=length, activation_checkpointing=mode, **changed)
        settings = trainer.settings
        assert isinstance(settings, Config)
        found[way] = measured(trainer, groups, count) | planned_gb(settings, config_of(shape), length, asked.device)
        del trainer
        free()
        _compare(found[way], found[ways[0]])
        say(way, found[way])
    agrees = all(row["grad_norm_off"] <= AGREED for row in found.values())
    return {"shape": shape, "weights": weights, "sequence": length, "group": group, "ok": agrees, "ways": found}


def measured(trainer: Trainer, groups: list[TrainGroup], count: int) -> Result:
    on_gpu, took, told = trainer.device.type == "cuda", list[float](), list[dict[str, float]]()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    for number in range(1 + count):
        if on_gpu and number == 1:  # the first one measures attention kernels and compiles
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        told.append(trainer.step(groups, TEMPERATURE))  # ends on the host
        took.append(time.perf_counter() - begun)
    return {
        "by": trainer.passes.name,
        "tokens_per_s": _tokens(groups) / statistics.median(took[1:] or took),
        "steps_s": took,
        "held_gb": held / 1e9,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0,
        "losses": [one["loss"] for one in told],
        "grad_norms": [one["grad_norm"] for one in told],
    }


def _tokens(groups: list[TrainGroup]) -> int:
    return sum(len(s.prompt_ids) + len(s.token_ids) for one in groups for s in one.samples)


def _compare(row: Result, first: Result) -> None:
    row["loss_off"] = max(abs(a - b) for a, b in zip(row["losses"], first["losses"], strict=True))
    pairs = zip(row["grad_norms"], first["grad_norms"], strict=True)
    row["grad_norm_off"] = max(abs(a - b) / max(b, 1e-12) for a, b in pairs)
    row["over_first"] = row["tokens_per_s"] / first["tokens_per_s"]


@commands
def gaps(
    shape: Annotated[str, "a model's name (qwen2.5-7b, …), or a folder with its config.json"] = "tiny",
    weights: Annotated[Literal["lora", "full"], "what is trained"] = "lora",
    device: Annotated[str, "by default the GPU where there is one"] = "",
    median: Annotated[int, "tokens of an answer"] = 1200,
    spread: Annotated[float, "five in six answers are shorter than median × spread"] = 1.4,
    prompt_tokens: Annotated[int, "prompts are a third shorter to a third longer"] = 1600,
    batch: Annotated[int, "groups of an update"] = 4,
    group: int = 4,
    count: Annotated[int, "updates"] = 10,
    token_budget: int = 8192,
    memory_gb: Annotated[float, "most to hold; 0: nine tenths of the GPU"] = 0.0,
) -> Result:
    """What the allocator keeps beside what is asked of it, over updates of sequences of many lengths.

    Its settings are those of the environment: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, for one.
    """
    asked = options(shape, weights, device, token_budget, memory_gb=memory_gb)
    before = _device_gb(asked.on_gpu)
    trainer, rng, rows = asked.trainer(), random.Random(0), list[Result]()
    for number in range(count):
        groups = [_lengths(asked.shape, prompt_tokens, median, spread, group, rng, str(i)) for i in range(batch)]
        begun = time.perf_counter()
        trainer.step(groups, TEMPERATURE)
        took = time.perf_counter() - begun
        rows.append(
            {"tokens_per_s": _tokens(groups) / took, **_kept(asked.on_gpu), "device_gb": _device_gb(asked.on_gpu)}
        )
        say(number, rows[-1])
    settings = {name: os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")}
    rates = [row["tokens_per_s"] for row in rows[2:] or rows]
    found = {"shape": shape, "weights": weights, "device_before_gb": before, **settings, **rows[-1]}
    return found | {"tokens_per_s": statistics.median(rates), "updates": rows}


def _lengths(
    shape: str, prompt_tokens: int, median: int, spread: float, count: int, rng: random.Random, name: str
) -> TrainGroup:
    """A group whose answers are as long as a rehearsal's."""
    vocabulary = config_of(shape).vocab_size

    def tokens(number: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(number)]

    prompt, samples = tokens(rng.randint(2 * prompt_tokens // 3, 4 * prompt_tokens // 3)), list[TrainSample]()
    for number in range(count):
        answer = tokens(max(1, round(median * rng.lognormvariate(0.0, math.log(spread)))))
        guess = [-math.log(vocabulary)] * len(answer)
        samples.append(TrainSample(f"{name}.{number}", prompt, answer, guess, 1.0 if number % 2 else -1.0, 0.0, 0))
    return TrainGroup(name, name, 1, samples)


def _kept(on_gpu: bool) -> Result:
    """The allocator's, at most since the start."""
    if not on_gpu:
        return {}
    told: dict[str, Any] = torch.cuda.memory_stats()
    return {
        "allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        "retries": told["num_alloc_retries"],
    }


def _device_gb(on_gpu: bool) -> float:
    """In use by all processes."""
    if not on_gpu:
        return 0.0
    free_bytes, total = torch.cuda.mem_get_info()
    return (total - free_bytes) / 1e9


if __name__ == "__main__":
    commands.main()
