"""The policy that a run trains, by its configuration: its base model, made or named, and the trainer around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from kbrl_async.errors import InfraError
from kbrl_async.learning.distributed import ProcessGroup
from kbrl_async.learning.engine import LearnerSetup
from kbrl_async.learning.forward_backward import computes_bf16
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import load_model, load_tokenizer
from kbrl_async.learning.trainer import Trainer
from kbrl_async.runs import origins
from kbrl_async.runs.config import Config, learner_threads
from kbrl_async.runs.telemetry.progress import MAKING, Reporter
from kbrl_async.weights.direct import Sender
from protocols.records import CORRECTOR, VERIFIER
from services.learner import ranks
from services.runtime.service import Service


class Stopped(Exception):  # noqa: N818 - what has happened, not what is wrong
    """The run has stopped before there was a policy."""


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
    )


def published_dtype(config: Config, device: str) -> str:
    """Of full weights: rounded as each forward pass rounds them, so that the policy is the same, in half the bytes.

    The transformers engine computes in fp32, and proves versions to 1e-3 by log-probs: for it nothing is rounded.
    """
    if config.weights.dtype != "auto":
        return "bf16" if config.weights.dtype == "bfloat16" else "fp32"
    rounds = computes_bf16(config.learner, torch.device(device)) and config.sampler.engine != "transformers"
    return "bf16" if rounds else "fp32"


def sender_of(service: Service) -> Sender | None:
    """What sends weights straight to samplers, where the run does."""
    config = service.config
    if not config.sends_weights:
        return None
    device = torch.device(service.device, 0) if service.device == "cuda" else torch.device(service.device)

    def told(line: str) -> None:
        service.log.warning("weights not sent", reason=line)

    try:
        return Sender(config.weights.address, device, config.weights.stalled_s, told)
    except InfraError as error:
        cure = "set weights.address to an address of this host"
        service.log.warning("weights go by files", reason=str(error), cure=cure)
        return None


def make_trainer(config: Config, base: Path | str, device: str, process_group: ProcessGroup | None = None) -> Trainer:
    """The trainer before its first batch: a function of the base model, the configuration and its seed."""
    torch.manual_seed(config.seed)
    place = device if process_group is None else str(process_group.device)
    is_sharded = config.learner.shard and process_group is not None
    model = load_model(
        str(base),
        "cpu" if is_sharded else place,  # what is sharded need not fit on one device
        dtype=held_precision(config, place),
        lora_rank=config.lora_rank,
        adapters=role_adapters(config),
        gradient_checkpointing=is_sharded,
        base_quantisation=config.learner.base_quantisation,
    )
    reference = reference_model(config, base, place)
    return Trainer(model, config, place, reference=reference, process_group=process_group)


def held_precision(config: Config, place: str) -> str:
    """Of the base's weights: frozen ones are held as they are computed with, and adapters always in fp32.

    The transformers engine holds fp32, and proves each version to 1e-3 by log-probs: with it, so does the learner.
    """
    is_frozen = bool(config.lora_rank) and place.startswith("cuda") and config.sampler.engine != "transformers"
    return "bf16" if is_frozen and computes_bf16(config.learner, torch.device(place)) else "fp32"


def role_adapters(config: Config) -> tuple[str, ...]:
    """Roles with an adapter of their own; the solver's is the main one."""
    return (VERIFIER, CORRECTOR) if config.agents.adapters else ()


def reference_model(config: Config, base: Path | str, device: str) -> torch.nn.Module | None:
    """The frozen policy that a KL penalty is taken against; None where there is none, or the LoRA base serves."""
    if config.learner.kl == "none" or config.learner.kl_weight == 0 or config.lora_rank:
        return None
    return load_model(str(base), device=device).requires_grad_(False).eval()


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
    return folder if folder is not None and (folder / origins.MADE).is_file() else None


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
