"""What a run's configuration means for vLLM."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from kbrl_async.errors import ConfigError
from kbrl_async.runs.config import sampler_threads
from kbrl_async.sampling.vllm.options import VLLMOptions
from protocols.records import PolicyVersion
from services.runtime.service import Service


def options_of(service: Service, manifest: PolicyVersion, rank: int) -> VLLMOptions:
    """`rank` is that of the published adapter. ConfigError where `sampler.update` does not fit what is published."""
    config, settings = service.config, service.config.sampler
    published = "adapter" if manifest.kind == "lora" else "full"
    if settings.update not in ("auto", published):
        raise ConfigError(
            f"sampler.update={settings.update}, and the learner publishes {manifest.kind} versions",
            "Use sampler.update=auto",
        )
    return VLLMOptions(
        model=manifest.base_model,
        device=service.device,
        dtype=settings.dtype,
        slots=settings.slots,
        memory_share=settings.memory_share,
        update="adapter" if manifest.kind == "lora" else "full",
        lora_rank=rank,
        roles=1 + len(manifest.adapters),
        # Rollouts that train are at most S versions old; one more is being written by late ones, one is new.
        live_versions=config.max_staleness + 2,
        keep_kv=settings.keep_kv,
        stop=tuple(settings.stop),
        deadline_s=settings.deadline_s,
        temperature=config.temperature,
        eager=settings.eager,
        threads=sampler_threads(config, service.layout),
        seed=config.seed + 1000 * service.instance,
    )


async def imported(service: Service) -> None:
    """vLLM, while the learner makes the first version."""
    from kbrl_async.sampling.vllm.start import preload

    threads = sampler_threads(service.config, service.layout)
    await asyncio.to_thread(preload, VLLMOptions("", device=service.device, threads=threads))


def rank_of(folder: Path) -> int:
    """The largest rank of a version's adapters; 0 where it has full weights."""
    found = [json.loads(path.read_text()) for path in folder.rglob("adapter_config.json")]
    return max((rank for one in found for rank in (one["r"], *one.get("rank_pattern", {}).values())), default=0)


def end_ids(model: str) -> list[int]:
    """End-of-text tokens that the model's `generation_config.json` names; none for a hub name without a folder."""
    path = Path(model) / "generation_config.json"
    if not path.is_file():
        return _of_hub(model)
    return _listed(json.loads(path.read_text()).get("eos_token_id"))


def _of_hub(model: str) -> list[int]:
    if Path(model).is_dir():
        return []
    from transformers import GenerationConfig

    try:
        return _listed(GenerationConfig.from_pretrained(model).eos_token_id)
    except OSError:  # it has none
        return []


def _listed(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]
