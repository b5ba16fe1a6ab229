"""Starts vLLM in this process (its engine core is a child of it), as an `Engine`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kbrl_async.errors import ConfigError, HostError, KbrlError
from kbrl_async.sampling.engine import Computing, EngineSetup, Tokenizer
from kbrl_async.sampling.vllm.engine import VLLMEngine
from kbrl_async.sampling.vllm.options import VLLMOptions, arguments, import_parts, set_environment
from kbrl_async.sampling.vllm.scheduler import Meter
from kbrl_async.shapes import shape_of
from protocols.records import PolicyVersion

PATIENCE_S = 60.0
LOOK_S = 0.5
CONTEXT_BYTES = 1 << 30
"""Of CUDA and its libraries, beside the share."""
BESIDE_BYTES = 4 << 30
"""CUDA's context and graphs, activations, adapters: of models that are fitted at all, generously."""
BLOCK_TOKENS = 128
"""More than vLLM rounds a sequence up to."""
STATEFUL = ("layers_block_type", "linear_num_key_heads", "mamba_d_state", "ssm_state_size", "state_size", "text_config")
"""Models whose sequences hold more than keys and values, or that are more than a language model."""


async def start(setup: EngineSetup) -> VLLMEngine:
    """The engine of `sampler.engine=vllm`, without a policy yet; takes half a minute to two.

    Where the base is known it starts while the learner makes the first policy. Else vLLM is imported meanwhile: half of
    what a start takes, and it needs no model.

    :raises MissingTool: vLLM is not installed, or does not load.
    :raises ConfigError: `sampler.update` does not fit what is published.
    :raises HostError: it can't start.
    """
    if setup.base is not None:
        options = options_over(setup, setup.base)
    else:
        first, _ = await asyncio.gather(setup.first_policy(), asyncio.to_thread(preload, setup.device, setup.threads))
        options = options_of(setup, *first)
    tokenizer = setup.load_tokenizer(options.model)
    return await launch(
        options, tokenizer, end_ids(options.model), tick=setup.progress, computing=setup.computing, told=setup.told
    )


def options_of(setup: EngineSetup, manifest: PolicyVersion, folder: Path) -> VLLMOptions:
    """For a run whose first policy is in `folder`."""
    update, published = setup.settings.update, "adapter" if manifest.kind == "lora" else "full"
    if update not in ("auto", published):
        cause = f"sampler.update={update}, and the learner publishes {manifest.kind} versions"
        raise ConfigError(cause, "Use sampler.update=auto")
    found = [json.loads(path.read_text()) for path in folder.rglob("adapter_config.json")]
    ranks = [rank for one in found for rank in (one["r"], *one.get("rank_pattern", {}).values())]
    rank, roles = max(ranks, default=0), 1 + len(manifest.adapters)
    return options_over(setup, manifest.base_model, rank=rank, roles=roles)


def options_over(setup: EngineSetup, base: str, *, rank: int = 0, roles: int = 1) -> VLLMOptions:
    """For a run that trains this base; without a `rank` all of its weights."""
    check_split(base, setup.settings.tensor_parallel)
    return VLLMOptions(
        settings=setup.settings,
        model=base,
        temperature=setup.temperature,
        max_staleness=setup.max_staleness,
        device=setup.device,
        threads=setup.threads,
        seed=setup.seed,
        lora_rank=rank,
        roles=roles,
    )


def check_split(model: str, parts: int) -> None:
    """ConfigError where vLLM can't split the model so; what is no local folder it has to find out itself."""
    path = Path(model) / "config.json"
    heads = json.loads(path.read_text()).get("num_attention_heads", parts) if path.is_file() else parts
    if heads % parts:
        cause = f"sampler.tensor_parallel={parts} does not divide the {heads} attention heads of {model}"
        raise ConfigError(cause, "Use a divisor of them, and sampler.data_parallel for the other GPUs")


def end_ids(model: str) -> list[int]:
    """End-of-text tokens that the model's `generation_config.json` names; none where it has none."""
    from transformers import GenerationConfig

    try:
        value = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        return []
    return [] if value is None else value if isinstance(value, list) else [value]


def preload(device: str, threads: int) -> None:
    """Imports vLLM. Raises MissingTool where there is none."""
    set_environment(device, threads)
    import_parts()
    _classes()


async def launch(
    options: VLLMOptions,
    tokenizer: Tokenizer,
    eos_ids: Iterable[int] = (),
    *,
    tick: Callable[[], None] = lambda: None,
    computing: Computing = contextlib.nullcontext,
    told: Callable[[str], None] = lambda _: None,
) -> VLLMEngine:
    """Starts vLLM. `eos_ids`: further end-of-text tokens beside the tokenizer's. `tick` is called after every step,
    `told` with what keeps it waiting.
    """
    set_environment(options.device, options.threads)
    parts = await asyncio.to_thread(import_parts)
    if options.device != "cpu" and not options.kv_bytes:
        memory = memory_now()
        options = options if memory is None else fitted(options, memory.total)
        await wait_for_memory(options.settings.memory_share, told)
    meter = Meter(tick)
    llm, guarded = await asyncio.to_thread(_make, options, meter)
    if guarded:
        await llm.collective_rpc("die_with", args=(os.getpid(),))
    known = getattr(llm, "model_config", None)
    limit = getattr(known, "max_model_len", options.max_model_len)
    layers = getattr(getattr(known, "hf_text_config", None), "num_hidden_layers", 0)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    options = msgspec.structs.replace(options, max_model_len=limit, depth=layers)
    return VLLMEngine(llm, parts, tokenizer, frozenset([*eos_ids, *own]), options, meter, computing=computing)


def _classes() -> tuple[Any, Any]:
    """`AsyncEngineArgs` and `AsyncLLM`."""
    arguments_of = importlib.import_module("vllm.engine.arg_utils")
    return arguments_of.AsyncEngineArgs, importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM


def _make(options: VLLMOptions, meter: Meter) -> tuple[Any, bool]:
    """The AsyncLLM, and whether its workers can be told to die with this process."""
    args_class, async_llm = _classes()
    known = frozenset(inspect.signature(args_class).parameters)
    given = arguments(options, known)
    try:
        return async_llm.from_engine_args(args_class(**given), stat_loggers=[meter]), "worker_extension_cls" in given
    except KbrlError:
        raise
    except Exception as error:  # supervisor: whatever keeps vLLM from starting is said in one line
        first = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        cure = "See its lines above; too little memory: change sampler.memory_share or max_tokens"
        raise HostError(f"vLLM can't start with {options.model}: {first}", cure) from error


# ── memory of the GPU ────────────────────────────────────────────────────────────────────────────────────────────


class Memory(NamedTuple):
    """Bytes of one GPU."""

    free: int
    total: int


def memory_now(environment: Mapping[str, str] = os.environ) -> Memory | None:
    """Of the first GPU that this process sees; None where the driver does not say."""
    import pynvml

    name = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    try:
        pynvml.nvmlInit()
        by_name = pynvml.nvmlDeviceGetHandleByIndex if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
        found = pynvml.nvmlDeviceGetMemoryInfo(by_name(int(name) if name.isdigit() else name))
    except pynvml.NVMLError:
        return None
    return Memory(int(found.free), int(found.total))


async def wait_for_memory(
    share: float,
    told: Callable[[str], None],
    look: Callable[[], Memory | None] = memory_now,
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Until `share` of the GPU is free: vLLM takes it at its start or not at all, and who holds some may give it back.
    `told` hears once that it waits; HostError after `PATIENCE_S`."""
    until, has_told = clock() + PATIENCE_S, False
    while (memory := look()) is not None and memory.free < share * memory.total + CONTEXT_BYTES:
        lacking = f"{share:.0%} of its {memory.total / 2**30:.1f} GiB, and {memory.free / 2**30:.1f} GiB are free"
        if clock() >= until:
            cure = "Lower sampler.memory_share or processes.timing_bench; nvidia-smi lists who holds it"
            raise HostError(f"vLLM needs a GPU with {lacking}, after {PATIENCE_S:.0f} s", cure)
        if not has_told:
            told(f"waiting for room on the GPU: {lacking}")
            has_told = True
        await pause(LOOK_S)


def fitted(options: VLLMOptions, total: int) -> VLLMOptions:
    """With a KV cache for every slot at its longest, and no more memory than that takes, in a GPU of `total` bytes;
    where that is more than `memory_share`, with what is left of it.

    So vLLM measures nothing at its start. What it measures is the GPU's memory before and after a trial, and a bench or
    a learner on the same GPU that gives some back in between ends the start ("Error in memory profiling"); one that
    takes some leaves it with a smaller KV cache.

    Unchanged where the model is no local folder or not of a plain kind, or where not even one sequence at its longest
    goes into `memory_share`: then vLLM measures, or says what is missing.
    """
    folder = Path(options.model)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    try:
        content = json.loads((folder / "config.json").read_text())
        shape = shape_of(content)
    except (OSError, ValueError, ConfigError):
        return options
    longest = options.max_model_len or shape.positions
    if not weights or not longest or any(name in content for name in STATEFUL):
        return options
    token = shape.kv_bytes(4 if options.dtype == "float32" else 2)
    # Each GPU has its part of the weights, and of keys and values as far as there are heads to part.
    parts = options.settings.tensor_parallel
    slots = -(-options.settings.slots // options.settings.data_parallel)
    one = token // min(parts, shape.kv_heads) * (longest + BLOCK_TOKENS)
    held = weights if options.lora_rank else 2 * weights  # new full weights are read beside the old ones
    beside = held // parts + BESIDE_BYTES
    cache = min(one * (slots + 1), int(options.settings.memory_share * total) - beside)
    if cache < one:
        return options
    settings = msgspec.structs.replace(options.settings, memory_share=(cache + beside) / total)
    return msgspec.structs.replace(options, kv_bytes=cache, settings=settings)
