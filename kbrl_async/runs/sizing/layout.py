"""Which process of a run shares a GPU with which, and whether that fits.

::

    config + shape ─ tenants ─▶ [learner, sampler.1, … with their footprints and GPUs] ─ misfit ─▶ what to change

Invariant: a prediction that is too high must not refuse a run that would fit (`TOLERANCE`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kbrl_async.errors import HostError
from kbrl_async.kernels.backends import runs_on_gpu
from kbrl_async.learning.fused.memory import Path as Computes
from kbrl_async.learning.settings import FUSED_FAMILIES
from kbrl_async.runs.config import Config, placement
from kbrl_async.runs.config.placement import Gpu
from kbrl_async.runs.sizing.footprint import (
    BF16,
    GB,
    Footprint,
    LearnerSizing,
    Recomputed,
    SamplerSizing,
    checkpoint_bytes,
    learner,
    served_weights,
    transformers_sampler,
)
from kbrl_async.shapes import ModelShape

TOLERANCE = 1.1
"""Predictions are within a tenth of what was measured: what is above capacity by less is not refused."""
PROMPT_TOKENS = 1024
"""Of a problem's prompt, where nobody has said."""
BENCH = 6 * GB
"""At least: small problems' input sets, both sides' outputs and contexts."""
BENCHES = ("timing_bench", "verifier")
"""Processes that take what others leave them, up to `timing_bench.memory_share`: their prediction is the least."""
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
        room=config.learner_room(capacity or float("inf")),
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
        for name in BENCHES:
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
    # As `sampling.vllm.start` fits it: room for every slot at the model's longest, where there is so much.
    token = shape.kv_bytes(BF16) / min(parts, shape.kv_heads)
    cache = token * (-(-settings.slots // copies) + 1) * (shape.positions or longest(config, shape))
    # New full weights from a file are read beside the old ones; the cache takes what is left, down to one sequence.
    left = share - weights * (1 if config.lora_rank else 2) - VLLM_BESIDE
    held = weights * (1 if config.lora_rank or config.sends_weights else 2)
    least = token * longest(config, shape)
    return Footprint({"weights": held, "vLLM": VLLM_BESIDE, "KV cache": max(least, min(cache, left))})


def checkpoints_on_disk(config: Config, shape: ModelShape) -> float:
    """Bytes of all checkpoints that are on disk at once: those that are kept and the one that is being written, of a
    short run its first, those that come due, and its last, which a rehearsal does without.
    """
    settings = config.learner
    due = config.max_steps / settings.checkpoint_every
    count = min(settings.keep_checkpoints + 1, 1 + (math.floor(due) if config.is_rehearsal else math.ceil(due)))
    return count * checkpoint_bytes(shape, learning_of(config, shape, None if config.device == "cpu" else math.inf))


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
    if name.startswith(BENCHES):
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
