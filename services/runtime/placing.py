"""Gives a process its GPU before it starts: in the nanny, whose children inherit the environment.

The first nanny of a process tells its child by `CUDA_VISIBLE_DEVICES`; what a user set there is the choice of GPUs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from kbrl_async.runs.config import Config
from kbrl_async.runs.config.placement import Gpu, check_fit, inventory, visible_to

Inventory = Callable[[Mapping[str, str]], Sequence[Gpu]]


def process_name(environment: Mapping[str, str]) -> str:
    """As the runner calls it, else by the module that was started."""
    named = environment.get("HONCHO_PROCESS_NAME", "")
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return named or (spec.name.removesuffix(".__main__").rpartition(".")[2] if spec is not None else "")


def held_gpus(
    config: Config, service: str, environment: Mapping[str, str] = os.environ, gpus: Inventory = inventory
) -> list[str]:
    """NVML's names of the GPUs that processes of this one's compute on: vLLM's, and all ranks'. None where the process
    itself computes, on one GPU, which torch knows.
    """
    ranks, parts = config.learner.processes, config.sampler.gpus
    counts = {"learner": ranks if ranks > 1 else 0, "sampler": parts if config.sampler.engine == "vllm" else 0}
    count = 0 if config.device == "cpu" else counts.get(service, 0)
    return [gpu.uuid for gpu in list(gpus(environment))[:count] if gpu.uuid] if count else []


def place(config: Config, environment: MutableMapping[str, str] = os.environ, gpus: Inventory = inventory) -> None:
    """Sets the variables of this process. Raises `HostError` where the placement does not fit this machine."""
    if config.placement is None:
        return
    found = gpus(environment)
    check_fit(config, found)
    environment.update(visible_to(config, process_name(environment), found))
