"""Starts vLLM in this process (its engine core is a child of it), as an `Engine`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kbrl_async.errors import HostError, KbrlError
from kbrl_async.sampling.guards import Tokenizer
from kbrl_async.sampling.vllm.engine import VLLMEngine
from kbrl_async.sampling.vllm.meter import Meter
from kbrl_async.sampling.vllm.options import VLLMOptions, arguments, import_parts, set_environment
from kbrl_async.sampling.vllm.room import memory_now, wait_for_room
from kbrl_async.sampling.vllm.size import fitted


def preload(options: VLLMOptions) -> None:
    """Imports vLLM: half of what a start takes, and it needs no model yet. `options`: device and threads count here.

    Raises MissingTool where there is none.
    """
    set_environment(options)
    import_parts()
    _classes()


async def start(
    options: VLLMOptions,
    tokenizer: Tokenizer,
    eos_ids: Iterable[int] = (),
    tick: Callable[[], None] = lambda: None,
    told: Callable[[str], None] = lambda _: None,
) -> VLLMEngine:
    """Takes half a minute to two. MissingTool without vLLM, HostError where it can't start.

    `eos_ids`: further end-of-text tokens beside the tokenizer's. `tick` is called after every step, `told` with what
    keeps it waiting.
    """
    set_environment(options)
    parts = await asyncio.to_thread(import_parts)
    if options.device != "cpu" and not options.kv_bytes:
        memory = memory_now()
        options = options if memory is None else fitted(options, memory.total)
        await wait_for_room(options.memory_share, told)
    meter = Meter(tick)
    llm, guarded = await asyncio.to_thread(_make, options, meter)
    if guarded:
        await llm.collective_rpc("die_with", args=(os.getpid(),))
    limit = getattr(getattr(llm, "model_config", None), "max_model_len", options.max_model_len)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return VLLMEngine(
        llm, parts, tokenizer, frozenset([*eos_ids, *own]), msgspec.structs.replace(options, max_model_len=limit), meter
    )


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
