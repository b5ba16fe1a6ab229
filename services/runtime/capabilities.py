"""The backends that a worker offers in its Hello: what this host can build, and what its device can run."""

from __future__ import annotations

from kbrl_async.errors import MissingTool
from kbrl_async.kernels.backends import backend, backends
from kbrl_async.kernels.sandbox import Isolation
from kbrl_async.runs.config import Config, placement
from protocols.messages import BACKENDS

_LEAST_SHARE = 0.05
"""Of a GPU, for all benches: what a policy larger than this leaves fails by name, not by a plan of nothing."""


def farm_caps(chosen: str) -> tuple[dict[str, str], dict[str, str]]:
    """Caps of a compile farm on this host, and by backend why it can't build the others. `chosen` is the run's."""
    missing = {name: backend(name).missing() for name in dict.fromkeys((*backends(), chosen))}
    able = [name for name, reason in missing.items() if not reason]
    return {BACKENDS: ",".join(able)}, {name: reason for name, reason in missing.items() if reason}


def bench_caps(device: str, chosen: str) -> dict[str, str]:
    """Caps of a bench that runs kernels on `device`. `chosen` is the run's backend."""
    kind = device.partition(":")[0]
    able = [name for name in dict.fromkeys((*backends(), chosen)) if kind in backend(name).runs_on]
    return {BACKENDS: ",".join(able)}


def bench_device(wanted: str, name: str, instance: int, *, from_last: bool = False) -> str:
    """`"cpu"` or `"cuda:N"` for a bench of backend `name`. `wanted`: `"auto"`, `"cpu"` or `"cuda"`. `from_last`: GPUs
    are counted from the last one, because verifiers count from the first.

    :raises MissingTool: a GPU is needed and there is none.
    """
    import torch

    count = torch.cuda.device_count()
    kinds = backend(name).runs_on
    if wanted == "cpu" or (wanted == "auto" and "cpu" in kinds and ("cuda" not in kinds or not count)):
        return "cpu"
    if not count:
        raise MissingTool("this host has no GPU for the timing bench", f"Choose another backend than {name}")
    return f"cuda:{count - 1 - instance % count if from_last else instance % count}"


def memory_share(config: Config, service: str) -> float:
    """Of its GPU's memory, what each of several benches or verifiers there may plan with."""
    import torch

    counts = config.processes
    benches = counts.timing_bench if "timing_bench" in config.timing_bench.shares_with else 1
    benches = min(benches, placement.together(config)) if config.placement == "split" else benches
    is_one_gpu = config.placement == "one_gpu" or (config.placement is None and torch.cuda.device_count() < 2)
    left = _left_by_the_policy(config) if config.placement == "one_gpu" else 1.0
    if counts.verifier and is_one_gpu:
        return left / (counts.timing_bench + counts.verifier)
    return left / (max(1, counts.verifier) if service == "verifier" else benches)


def _left_by_the_policy(config: Config) -> float:
    """Of the one GPU, beside vLLM and the learner, which take what they may; a small policy's take next to nothing."""
    import torch

    if config.sampler.engine != "vllm" or config.model_name == "small":
        return 1.0
    memory, learner = torch.cuda.get_device_properties(0).total_memory, config.learner.memory_gb * 1e9
    taken = config.sampler.memory_share + (learner / memory if learner else config.learner_share)
    return max(_LEAST_SHARE, 1.0 - taken)


def log_fields(isolation: Isolation) -> dict[str, object]:
    """What each service logs at its start: how well untrusted code is confined here, and what the host lacks for it."""
    return {"isolation": isolation.level, **({"missing": list(isolation.missing)} if isolation.missing else {})}
