"""The policy that a run trains, by its configuration: its base model, made or named, and the trainer around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from kbrl_async.errors import InfraError
from kbrl_async.learning.distributed import ProcessGroup
from kbrl_async.learning.engine import LearnerSetup, SendsParts
from kbrl_async.learning.forward_backward import computes_bf16
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import DTYPES, load_model, load_tokenizer, wrap_lora
from kbrl_async.learning.policies.streaming import Folder, Source, skeleton
from kbrl_async.learning.sharded import ShardedModel
from kbrl_async.learning.trainer import Trainer
from kbrl_async.runs import origins
from kbrl_async.runs.config import Config, learner_threads
from kbrl_async.runs.telemetry.progress import MAKING, Reporter
from kbrl_async.weights import MADE
from kbrl_async.weights.direct import Sender
from protocols.records import CORRECTOR, VERIFIER
from services.learner import ranks
from services.runtime.service import Service, Stopped


def setup_of(service: Service, is_stopped: Callable[[], bool]) -> LearnerSetup:
    """What the run gives the engine that `learner.engine` names."""
    config = service.config

    def base() -> str:
        found = base_model(service, is_stopped)
        if found is None:
            raise Stopped
        return str(found)

    def trainer(base: str) -> Trainer:
        torch.set_num_threads(learner_threads(config, service.layout))
        process_group = ranks.join(service.device)
        if process_group is not None:
            process_group.send_text(base)
        return make_trainer(config, base, service.device, process_group)

    return LearnerSetup(
        settings=config,
        model_name=config.model_name,
        lora_rank=config.lora_rank,
        base_url=config.sampler.base_url,
        api_key_env=config.sampler.api_key_env,
        checkpoints=service.run_dir / "checkpoints",
        policies=service.policies,
        base=base,
        canaries=lambda base: origins.canaries(config, load_tokenizer(base)),
        make_trainer=trainer,
        published_dtype=published_dtype(config, service.device),
        sends_weights=config.sends_weights and may_skip_files(config),
    )


def published_dtype(config: Config, device: str) -> str:
    """Of full weights: rounded as each forward pass rounds them, so that the policy is the same, in half the bytes.

    The transformers engine computes in fp32, and proves versions to 1e-3 by log-probs: for it nothing is rounded.
    """
    if config.weights.dtype != "auto":
        return "bf16" if config.weights.dtype == "bfloat16" else "fp32"
    rounds = computes_bf16(config.learner, torch.device(device)) and config.sampler.engine != "transformers"
    return "bf16" if rounds else "fp32"


def sender_of(service: Service, engine: object) -> Sender | None:
    """What sends weights straight to samplers, where the run does: each rank its own rows, where they hold rows."""
    learner, patience_s = service.config.learner, service.config.weights.stalled_s
    parts = learner.processes if learner.shard else 1
    sender = _sender(service, parts)
    if sender is None or parts == 1:
        return sender
    if isinstance(engine, SendsParts) and engine.send_parts(sender.meeting, patience_s):
        return sender
    cure = "set weights.address to an address that all ranks reach"
    service.log.warning("weights are gathered at rank 0", so="other ranks send none themselves", cure=cure)
    sender.close()
    return _sender(service, 1)


def may_skip_files(config: Config) -> bool:
    """Not every version that is sent need be on disk: none is evaluated in between, or uploaded."""
    return not config.eval_every and config.policy_url is None


def _sender(service: Service, parts: int) -> Sender | None:
    config = service.config
    if not config.sends_weights:
        return None
    device = torch.device(service.device, 0) if service.device == "cuda" else torch.device(service.device)

    def log_unsent(line: str) -> None:
        service.log.warning("weights not sent", reason=line)

    try:
        return Sender(config.weights.address, device, config.weights.stalled_s, log_unsent, parts)
    except InfraError as error:
        cure = "set weights.address to an address of this host"
        service.log.warning("weights go by files", reason=str(error), cure=cure)
        return None


def make_trainer(config: Config, base: Path | str, device: str, process_group: ProcessGroup | None = None) -> Trainer:
    """The trainer before its first batch: a function of the base model, the configuration and its seed."""
    torch.manual_seed(config.seed)
    if config.learner.shard and process_group is not None:
        return _sharded_trainer(config, str(base), process_group)
    place = device if process_group is None else str(process_group.device)
    model = load_model(
        str(base),
        place,
        dtype=held_precision(config, place),
        lora_rank=config.lora_rank,
        adapters=role_adapters(config),
        base_quantisation=config.learner.base_quantisation,
    )
    reference = reference_model(config, base, place)
    return Trainer(model, in_its_room(config, place), place, reference=reference, process_group=process_group)


def in_its_room(config: Config, place: str) -> Config:
    """With `learner.memory_gb` said where it is not and vLLM has a part of the same GPU."""
    if config.learner.memory_gb or torch.device(place).type != "cuda":
        return config
    total = torch.cuda.get_device_properties(torch.device(place)).total_memory
    learner = msgspec.structs.replace(config.learner, memory_gb=config.learner_room(total) / 1e9)
    return msgspec.structs.replace(config, learner=learner)


def _sharded_trainer(config: Config, base: str, ranks: ProcessGroup) -> Trainer:
    """The same where each rank gets its share only, layer by layer."""
    arithmetic = torch.bfloat16 if _gathers_bf16(config, ranks.device) else None
    held = held_precision(config, str(ranks.device))

    def shard(dtype: str, lora_rank: int) -> tuple[torch.nn.Module, ShardedModel]:
        model, source = unfilled(base, dtype, lora_rank)
        offload = config.learner.offload
        return model, ShardedModel(model, ranks, arithmetic=arithmetic, offload=offload, source=source)

    model, sharded = shard(held, config.lora_rank)
    reference, sharded_reference = None, None
    if _wants_reference(config):
        reference, sharded_reference = shard("bf16" if arithmetic else "fp32", 0)
    return Trainer(
        model,
        config,
        ranks.device,
        reference=reference,
        process_group=ranks,
        sharded=sharded,
        sharded_reference=sharded_reference,
    )


def unfilled(base: str, dtype: str, lora_rank: int) -> tuple[torch.nn.Module, Source | None]:
    """A model without weights, and where they come from; a whole one on the host, where they can't come in parts."""
    try:
        model = skeleton(base, DTYPES[dtype])
        source = Folder.of(base, model)
    except (OSError, ValueError):  # `load_model` says what is wrong with it
        source = None
    if source is None:
        return load_model(base, dtype=dtype, lora_rank=lora_rank), None
    with torch.random.fork_rng(devices=[]):  # the adapter is drawn when it is given memory
        return (wrap_lora(model, lora_rank) if lora_rank else model), source


def _gathers_bf16(config: Config, device: torch.device) -> bool:
    """See `held_precision` about the transformers engine: with it, autocast rounds each product instead."""
    return computes_bf16(config.learner, device) and config.sampler.engine != "transformers"


def held_precision(config: Config, place: str) -> str:
    """Of the base's weights: frozen ones are held as they are computed with, and adapters always in fp32; trained ones
    as `learner.master_dtype` says.

    The transformers engine holds fp32, and proves each version to 1e-3 by log-probs: with it, so does the learner.
    """
    if not config.lora_rank:
        return "bf16" if config.learner.master_dtype == "bfloat16" else "fp32"
    on_gpu = place.startswith("cuda") and config.sampler.engine != "transformers"
    return "bf16" if on_gpu and computes_bf16(config.learner, torch.device(place)) else "fp32"


def _wants_reference(config: Config) -> bool:
    """A KL penalty is taken against a model of its own; the base under a LoRA adapter serves without one."""
    return config.learner.kl != "none" and config.learner.kl_weight != 0 and not config.lora_rank


def role_adapters(config: Config) -> tuple[str, ...]:
    """Roles with an adapter of their own; the solver's is the main one."""
    return (VERIFIER, CORRECTOR) if config.agents.adapters else ()


def reference_model(config: Config, base: Path | str, device: str) -> torch.nn.Module | None:
    """The frozen policy that a KL penalty is taken against, where it wants one."""
    return load_model(str(base), device=device).requires_grad_(False).eval() if _wants_reference(config) else None


def base_model(service: Service, is_stopped: Callable[[], bool]) -> Path | str | None:
    """The model that training starts from; None when the run is stopped while it is made."""
    base = _begun_with(service) or _made(service, is_stopped)
    if base is not None and (reached := origins.cut(base)):
        cure = "worse answers than a whole one's; the next run makes it anew, a larger sft.max_seconds makes it whole"
        service.log.warning("the small policy was cut by sft.max_seconds", at=reached, so=cure)
    return base


def _begun_with(service: Service) -> Path | None:
    """The small policy that this run goes on with: one that was cut is not what the cache has for the next run."""
    found = versions.newest(service.policies) if service.config.model_name == origins.SMALL else None
    folder = Path(found[0].base_model) if found else None
    return folder if folder is not None and (folder / MADE).is_file() else None


def _made(service: Service, is_stopped: Callable[[], bool]) -> Path | str | None:
    reporter = Reporter(service.run_dir, service.log)

    def progress(line: str, share: float) -> None:
        if is_stopped():
            raise InterruptedError
        reporter.tell(MAKING, line, share)

    try:
        return origins.base_model(service.config, progress)
    except InterruptedError:
        return None
