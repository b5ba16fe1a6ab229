"""Which process of a run shares a GPU with which, whether that fits, and what to set for a number of GPUs.

::

    config + shape ─ tenants ─▶ [learner, sampler.1, … with their footprints and GPUs] ─ misfit ─▶ what to change
    shape + GPUs   ─ recommend ─▶ settings that fit, the least computed again

Invariants
* A prediction that is too high must not refuse a run that would fit: `TOLERANCE`.
* What is recommended fits by the same count.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.errors import HostError, UserError
from kbrl_async.kernels.backends import runs_on_gpu
from kbrl_async.learning.fused.memory import Path as Computes
from kbrl_async.learning.settings import FUSED_FAMILIES
from kbrl_async.runs.config import Config, placement
from kbrl_async.runs.config.placement import Gpu
from kbrl_async.runs.sizing.footprint import (
    BF16,
    CONTEXT,
    GB,
    Footprint,
    LearnerSizing,
    Recomputed,
    SamplerSizing,
    learner,
    served_weights,
    transformers_sampler,
)
from kbrl_async.shapes import ModelShape

GPUS = {
    "b200": 191.5, "h200": 150.7, "h100": 85.0, "a100": 85.0, "a100-40": 42.4, "l40s": 47.7, "l4": 24.1, "a10": 23.7,
    "rtx5090": 33.6, "rtx4090": 25.3,
}  # fmt: skip
"""GB of a GPU as CUDA tells them, 10^9 bytes: a little less than the name on the box says in GiB."""
TOLERANCE = 1.1
"""Predictions are within a tenth of what was measured: what is above capacity by less is not refused."""
PROMPT_TOKENS = 1024
"""Of a problem's prompt, where nobody has said."""
BENCH = 6 * GB
"""The suite's largest problems: input sets, both sides' outputs and two contexts."""
VLLM_BESIDE = 4 * GB
"""CUDA graphs, activations and adapters of vLLM, beside weights and KV cache."""


class Tenant(msgspec.Struct, frozen=True):
    """One process and the GPUs that it sits on; each holds a footprint like this."""

    name: str
    gpus: range
    footprint: Footprint


class Misfit(msgspec.Struct, frozen=True):
    """Why a configuration can't run."""

    cause: str
    cure: str


# ── what a configuration takes ───────────────────────────────────────────────────────────────────────────────────────


def longest(config: Config, shape: ModelShape) -> int:
    """Tokens of the longest prompt and answer."""
    wanted = PROMPT_TOKENS + config.max_tokens
    return min(wanted, shape.positions) if shape.positions else wanted


def learning_of(config: Config, shape: ModelShape, capacity: float | None) -> LearnerSizing:
    """How the configuration has the policy trained, on GPUs of so many bytes; None: on a CPU."""
    settings, on_gpu = config.learner, capacity is not None
    bf16 = settings.dtype == "bfloat16" or (settings.dtype == "auto" and on_gpu)
    is_sharded = settings.shard and settings.processes > 1
    tokens = -(-max(settings.microbatch_tokens, longest(config, shape)) // settings.context_parallel)
    return LearnerSizing(
        tokens=tokens,
        scored=max(1, tokens * config.max_tokens // (PROMPT_TOKENS + config.max_tokens)),
        rank=config.lora_rank,
        adapters=3 if config.agents.adapters else 1,
        held=_held(config, on_gpu=on_gpu, bf16=bf16),
        bf16=bf16,
        eight_bit=settings.optimizer == "adamw_8bit",
        path=_path(config, shape, on_gpu=on_gpu, bf16=bf16),
        recomputed=Recomputed(settings.activation_checkpointing),
        inputs_on_host=settings.offload_activations,
        ranks=settings.processes,
        sharded=is_sharded,
        autocast=config.sampler.engine == "transformers",
        on_host=is_sharded and settings.offload,
        reference=settings.kl != "none" and settings.kl_weight > 0 and not config.lora_rank,
        room=settings.memory_gb * GB or 0.9 * (capacity or float("inf")),
        on_gpu=on_gpu,
    )


def _held(config: Config, *, on_gpu: bool, bf16: bool) -> str:
    """As `services.learner.policy` holds weights."""
    if config.learner.base_quantisation != "none":
        return config.learner.base_quantisation
    if not config.lora_rank:
        return "bf16" if config.learner.master_dtype == "bfloat16" else "fp32"
    return "bf16" if on_gpu and bf16 and config.sampler.engine != "transformers" else "fp32"


def _path(config: Config, shape: ModelShape, *, on_gpu: bool, bf16: bool) -> Computes:
    """As `learning.forward_backward` chooses, as far as a shape says."""
    settings = config.learner
    wants = settings.kernels == "fused" or (settings.kernels == "auto" and on_gpu)
    if not wants or shape.family not in FUSED_FAMILIES or settings.base_quantisation != "none":
        return "plain"
    by_hand = config.lora_rank and not settings.shard and not config.agents.adapters
    return "fused" if by_hand and _held(config, on_gpu=on_gpu, bf16=bf16) == ("bf16" if bf16 else "fp32") else "modules"


def tenants(config: Config, shape: ModelShape, capacity: float | None) -> list[Tenant]:
    """All that holds the policy, and the benches beside it; on a CPU all share its memory, as one GPU."""
    each = config.sampler.gpus
    found = [] if config.learner.engine != "torch" else [_learner(config, shape, capacity)]
    for number in range(config.processes.sampler):
        held = _sampler(config, shape, capacity)
        if held is not None:
            first = placement.assigned(config, "sampler", number)[0]
            found.append(Tenant(f"sampler.{number + 1}", range(first, first + each), held))
    if capacity is not None and runs_on_gpu(config.backend):
        for name in ("timing_bench", "verifier"):
            for number in range(getattr(config.processes, name)):
                at = placement.assigned(config, name, number)
                found.append(Tenant(f"{name}.{number + 1}", at, Footprint({"problems": BENCH})))
    return found


def _learner(config: Config, shape: ModelShape, capacity: float | None) -> Tenant:
    held = learner(shape, learning_of(config, shape, capacity))
    ranks = config.learner.processes
    if capacity is None:  # all ranks share the host's memory
        return Tenant("learner", range(1), Footprint({name: ranks * size for name, size in held.parts.items()}))
    return Tenant("learner", range(ranks), held)


def _sampler(config: Config, shape: ModelShape, capacity: float | None) -> Footprint | None:
    """None: it computes elsewhere, or how is not known."""
    settings, adapters = config.sampler, 3 if config.agents.adapters else 1
    if settings.engine == "transformers":
        how = SamplerSizing(
            slots=settings.slots,
            length=longest(config, shape),
            rank=config.lora_rank,
            adapters=adapters,
            on_gpu=capacity is not None,
        )
        return transformers_sampler(shape, how)
    if settings.engine != "vllm" or capacity is None:
        return None
    share = settings.memory_share * capacity
    parts, copies = settings.tensor_parallel, settings.data_parallel
    weights = served_weights(shape, parts)
    cache = shape.kv_bytes(BF16) * settings.slots * longest(config, shape) / (parts * copies)
    # New full weights are read beside the old ones; the cache takes what is left, down to one sequence.
    needed = {"weights": weights * (1 if config.lora_rank else 2), "vLLM": VLLM_BESIDE}
    least = float(shape.kv_bytes(BF16) * longest(config, shape) / parts)
    return Footprint({**needed, "KV cache": max(least, min(cache, share - sum(needed.values())))})


def by_gpu(everyone: Sequence[Tenant]) -> dict[int, list[Tenant]]:
    """Who sits on each GPU, by its position."""
    places = sorted({at for tenant in everyone for at in tenant.gpus})
    return {place: [tenant for tenant in everyone if place in tenant.gpus] for place in places}


def misfit(config: Config, shape: ModelShape, gpus: Sequence[Gpu], host: float) -> Misfit | None:
    """Why this can't fit, by the fullest GPU, or the host's memory (bytes) where all compute on the CPU."""
    on_gpu = bool(gpus) and config.device != "cpu"
    capacity = min(gpu.memory_gib for gpu in gpus) * 2**30 if on_gpu else None
    everyone = tenants(config, shape, capacity)
    limit = capacity or host
    for place, here in by_gpu(everyone).items():
        total = sum(tenant.footprint.total for tenant in here)
        if total > TOLERANCE * limit:
            return _misfit(config, here, total, limit, f"GPU {place}" if on_gpu else "this host")
    return None


def check(config: Config, shape: ModelShape, gpus: Sequence[Gpu], host: float) -> None:
    """:raises HostError: it can't fit; what is largest, and what to set."""
    if (why := misfit(config, shape, gpus, host)) is not None:
        raise HostError(why.cause, why.cure)


def _misfit(config: Config, here: Sequence[Tenant], total: float, limit: float, where: str) -> Misfit:
    worst = max(here, key=lambda tenant: tenant.footprint.total)
    part = worst.footprint.largest
    size = f"{worst.footprint.gb(part):.0f} GB of {part} in {worst.name} ({worst.footprint.total / GB:.0f})"
    others = ", ".join(f"{t.name} {t.footprint.total / GB:.0f}" for t in here if t is not worst)
    cause = (
        f"{config.model_name} does not fit: {where} has {limit / GB:.0f} GB, and {total / GB:.0f} are needed; the "
        f"largest part is {size}"
    )
    return Misfit(cause + (f", beside {others}" if others else ""), _cure(config, worst.name, part))


def _cure(config: Config, name: str, part: str) -> str:
    if name.startswith(("timing_bench", "verifier")):
        return "Give the bench a GPU of its own: placement=two_gpus or split"
    if name.startswith("sampler"):
        if part in ("weights", "versions") and config.sampler.engine == "transformers":
            return "Use sampler.engine=vllm, which holds one copy in bf16"
        if part == "weights":
            return "Use a GPU of its own (placement=two_gpus or split), or sampler.tensor_parallel"
        return "Lower sampler.slots or max_tokens"
    if part in ("gradients", "moments", "reference") or (part == "weights" and not config.lora_rank):
        return "Set lora_rank=32, or share it over GPUs: learner.shard=true learner.processes=4 placement=split"
    if part in ("activations", "loss"):
        return "Set learner.activation_checkpointing=auto, or lower learner.token_budget or max_tokens"
    return "Set learner.base_quantisation=nf4, or share it over GPUs: learner.shard=true learner.processes=4"


def host_memory() -> float:
    """Bytes that this process's machine, or its container, has."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, float(text)) if text.isdigit() else total


# ── what to set ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is for."""

    model: str
    gpus: int
    capacity: float
    """Bytes of one GPU."""
    rank: int = 32
    """Of the LoRA adapter; 0: all weights are trained."""
    length: int = 8192
    """Tokens of the longest prompt and answer."""


class LayoutRow(msgspec.Struct, frozen=True):
    """One way to hold a learner or a sampler, and whether one of its GPUs has room for it alone."""

    name: str
    gpus: int
    footprint: Footprint
    fits: bool
    sequences: int = 0
    """That a sampler has room for at once."""


class Advice(msgspec.Struct, frozen=True):
    """What a number of GPUs can do with a model."""

    shape: ModelShape
    wish: Wish
    rows: list[LayoutRow]
    settings: dict[str, Any]
    """Keys of a configuration; empty where nothing fits."""
    problem: str = ""


SLOTS = (256, 128, 64, 32, 16, 8, 4, 1)
RESERVE = 0.05
"""Of a GPU, for what allocators lose between blocks."""


def capacity_of(gpu: str, gigabytes: float | None) -> float:
    """Bytes of a GPU by its name, or as they were given.

    :raises UserError: an unknown name without a number.
    """
    if gigabytes is not None:
        if not gigabytes > 0:
            raise UserError(f"--gpu-memory {gigabytes:g} is no size", "Give GB, such as --gpu-memory 80")
        return gigabytes * GB
    named = gpu.lower().replace(" ", "")
    fitting = [name for name in GPUS if name in named]
    if not fitting:
        raise UserError(
            f"--gpu {gpu or 'nothing'}: its memory is not known", f"One of {', '.join(GPUS)}, or --gpu-memory GB"
        )
    return GPUS[max(fitting, key=len)] * GB


def recommend(shape: ModelShape, wish: Wish) -> Advice:
    """The fewest GPUs for the learner that leave room for a sampler, the least computed again."""
    learners = [row for ranks in _powers(wish.gpus) for row in _learner_rows(shape, wish, ranks)]
    samplers = [_sampler_row(shape, wish, parts) for parts in _powers(wish.gpus)]
    rows = [*learners, *samplers]
    settings = _apart(shape, wish) if wish.gpus == 2 and not wish.rank else {}
    settings = settings or (_one_gpu(shape, wish) if wish.gpus < 3 else _split(wish, learners, samplers))
    if settings:
        return Advice(shape, wish, rows, settings)
    return Advice(shape, wish, rows, {}, _too_large(shape, wish, rows))


def _powers(most: int) -> Iterator[int]:
    count = 1
    while count <= most:
        yield count
        count *= 2


def _learning(shape: ModelShape, wish: Wish, ranks: int, room: float) -> LearnerSizing:
    return LearnerSizing(
        tokens=wish.length,
        rank=wish.rank,
        held="bf16" if wish.rank else "fp32",
        path="plain" if shape.family not in FUSED_FAMILIES else "fused" if ranks == 1 and wish.rank else "modules",
        recomputed=Recomputed.AUTO,
        ranks=ranks,
        sharded=ranks > 1,
        autocast=False,
        room=room,
    )


def _learner_rows(shape: ModelShape, wish: Wish, ranks: int) -> Iterator[LayoutRow]:
    room = (1 - RESERVE) * wish.capacity
    how = f"LoRA {wish.rank}" if wish.rank else "full weights"
    held = learner(shape, _learning(shape, wish, ranks, 0.9 * room))
    yield LayoutRow(f"learner, {how}", ranks, held, held.total <= room)


def _sampler_row(shape: ModelShape, wish: Wish, parts: int) -> LayoutRow:
    room = 0.9 * wish.capacity
    weights = served_weights(shape, parts) * (1 if wish.rank else 2)
    slots = _slots(shape, wish, room - weights - VLLM_BESIDE, parts)
    cache = shape.kv_bytes(BF16) * max(1, slots) * wish.length / parts
    held = Footprint({"weights": weights, "vLLM": VLLM_BESIDE, "KV cache": cache})
    return LayoutRow(f"sampler, vLLM, {max(1, slots)} slots", parts, held, slots > 0, slots)


def _slots(shape: ModelShape, wish: Wish, room: float, parts: int = 1) -> int:
    each = shape.kv_bytes(BF16) * wish.length / parts
    return next((count for count in SLOTS if count * each <= room), 0)


SELDOM = 20
"""Updates between checkpoints of all weights and moments, which training waits for on one GPU."""


def _base_settings(wish: Wish) -> dict[str, Any]:
    seldom = {} if wish.rank else {"learner.checkpoint_every": SELDOM}
    return {
        **seldom,
        "model_name": wish.model,
        "backend": "triton",
        "lora_rank": wish.rank,
        "max_tokens": max(1, wish.length - PROMPT_TOKENS),
        "max_minutes": None,
        "device": "cuda",
        "sampler.engine": "vllm",
        "learner.token_budget": wish.length,
    }


def _one_gpu(shape: ModelShape, wish: Wish) -> dict[str, Any]:
    """Learner and sampler share a GPU, and with one GPU the bench, too."""
    room = (1 - RESERVE) * wish.capacity - (BENCH if wish.gpus == 1 else 0.0)
    weights = served_weights(shape, 1) * (1 if wish.rank else 2)
    for slots in SLOTS:
        sampler = weights + VLLM_BESIDE + shape.kv_bytes(BF16) * slots * wish.length
        held = learner(shape, _learning(shape, wish, 1, room - sampler - CONTEXT))
        if held.total + sampler <= room:
            found = {**_base_settings(wish), "placement": "one_gpu" if wish.gpus == 1 else "two_gpus"}
            found |= {"sampler.slots": slots, "sampler.memory_share": round(sampler / wish.capacity + 0.005, 2)}
            return found | {"learner.memory_gb": float(int((room - sampler) / GB))}
    return {}


def _apart(shape: ModelShape, wish: Wish) -> dict[str, Any]:
    """All weights are trained on a GPU of their own, and go to the other, which samples and times, by NCCL."""
    room = (1 - RESERVE) * wish.capacity
    sampler = 2 * served_weights(shape, 1) + VLLM_BESIDE
    slots = _slots(shape, wish, room - BENCH - sampler)
    if not slots or learner(shape, _learning(shape, wish, 1, room - CONTEXT)).total > room:
        return {}
    share = (sampler + shape.kv_bytes(BF16) * slots * wish.length) / wish.capacity
    found = {**_base_settings(wish), "placement": "learner_apart", "sampler.slots": slots}
    return found | {"sampler.memory_share": round(share + 0.005, 2)}


def _split(wish: Wish, learners: Sequence[LayoutRow], samplers: Sequence[LayoutRow]) -> dict[str, Any]:
    """The smallest learner, and samplers with the most slots beside it; an eighth of the GPUs time."""
    benches = max(1, wish.gpus // 8)
    trained = min((row for row in learners if row.fits), key=lambda row: row.gpus, default=None)
    if trained is None:
        return {}
    left = wish.gpus - benches - trained.gpus
    served = max(
        (row for row in samplers if row.fits), key=lambda row: row.sequences * (left // row.gpus), default=None
    )
    if served is None or left < served.gpus:
        return {}
    found = {
        **_base_settings(wish),
        "placement": "split",
        "sampler.memory_share": 0.9,
        "sampler.slots": served.sequences,
    }
    found |= {"learner.processes": trained.gpus, "learner.shard": trained.gpus > 1}
    found |= {"processes.sampler": left // served.gpus, "processes.timing_bench": benches}
    if served.gpus > 1:
        found["sampler.tensor_parallel"] = served.gpus
    return found


def _too_large(shape: ModelShape, wish: Wish, rows: Sequence[LayoutRow]) -> str:
    alone = {row.name.partition(",")[0]: row.gpus for row in reversed(rows) if row.fits}
    if len(alone) == 2:
        needed = alone["learner"] + alone["sampler"] + 1
        return (
            f"learner and sampler each fit, but not beside each other; {max(3, needed)} GPUs would do (placement=split)"
        )
    least = learner(shape, _learning(shape, wish, wish.gpus, 0.0))
    what = f"{least.gb(least.largest):.0f} GB of {least.largest}"
    cure = "a shorter --length" if wish.rank else "--lora-rank 32"
    return f"{wish.gpus} × {wish.capacity / GB:.0f} GB are too little for {what}; more or larger GPUs, or {cure}"


def as_tree(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as the sections of a file."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, leaf = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[leaf] = value
    return tree
