"""What to set for a number of GPUs.

::

    shape + GPUs ─ recommend ─▶ settings that fit, the least computed again

Invariant: what is recommended fits by the count of `layout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.learning.settings import FUSED_FAMILIES
from kbrl_async.runs.config.placement import RESERVE
from kbrl_async.runs.sizing.footprint import (
    BF16,
    CONTEXT,
    GB,
    Footprint,
    LearnerSizing,
    Recomputed,
    learner,
    served_weights,
)
from kbrl_async.runs.sizing.layout import (
    BENCH,
    PROMPT_TOKENS,
    VLLM_BESIDE,
)
from kbrl_async.shapes import ModelShape

GPUS = {
    "b200": 191.5, "h200": 150.7, "h100": 85.0, "a100": 85.0, "a100-40": 42.4, "l40s": 47.7, "l4": 24.1, "a10": 23.7,
    "rtx5090": 33.6, "rtx4090": 25.3,
}  # fmt: skip
"""GB of a GPU as CUDA tells them, 10^9 bytes: a little less than the name on the box says in GiB."""


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
USEFUL_SLOTS = 16
"""Fewer are not given up for a bench's sake."""
BENCH_ROOM = 18 * GB
"""12 for its plans, in which the suite's GPU shapes are replayed, and its contexts; alone it took 25 on an H200."""


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
    weights = served_weights(shape, 1) * (1 if wish.rank else 2)
    for bench, least in _benches(is_there=wish.gpus == 1):
        room = (1 - RESERVE) * wish.capacity - bench
        for slots in (one for one in SLOTS if one >= least):
            sampler = weights + VLLM_BESIDE + shape.kv_bytes(BF16) * slots * wish.length
            held = learner(shape, _learning(shape, wish, 1, room - sampler - CONTEXT))
            if held.total + sampler <= room:
                found = {**_base_settings(wish), "placement": "one_gpu" if wish.gpus == 1 else "two_gpus"}
                found |= {"sampler.slots": slots, "sampler.memory_share": round(sampler / wish.capacity + 0.005, 2)}
                return found | {"learner.memory_gb": float(int((room - sampler) / GB))}
    return {}


def _benches(is_there: bool) -> list[tuple[float, int]]:
    """What a bench on the GPU is left, and the fewest slots that are worth that."""
    return [(BENCH_ROOM, USEFUL_SLOTS), (BENCH, 1)] if is_there else [(0.0, 1)]


def _apart(shape: ModelShape, wish: Wish) -> dict[str, Any]:
    """All weights are trained on a GPU of their own, and go to the other, which samples and times, by NCCL."""
    room = (1 - RESERVE) * wish.capacity
    sampler = 2 * served_weights(shape, 1) + VLLM_BESIDE
    fitting = ((least, _slots(shape, wish, room - bench - sampler)) for bench, least in _benches(is_there=True))
    slots = next((slots for least, slots in fitting if slots >= least), 0)
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
