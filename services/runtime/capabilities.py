"""The backends that a worker offers in its Hello: what this host can build, and what its device can run."""

from __future__ import annotations

from kbrl_async.errors import MissingTool
from kbrl_async.kernels.backends import backend, backends
from kbrl_async.kernels.sandbox import Isolation
from kbrl_async.kernels.verify.reservations import CONTEXTS_BYTES, LEAST_SHARE, even_share
from kbrl_async.runs.config import Config, placement
from protocols.messages import BACKENDS


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


def memory_share(config: Config, service: str, memory: int | None) -> float:
    """Of its GPU's `memory` bytes, what each of several benches or verifiers there may plan with. None: of a host's,
    where nothing lies beside plans.
    """
    import torch

    counts = config.processes
    benches = counts.timing_bench if "timing_bench" in config.timing_bench.shares_with else 1
    benches = min(benches, placement.together(config)) if config.placement == "split" else benches
    is_one_gpu = config.placement == "one_gpu" or (config.placement is None and torch.cuda.device_count() < 2)
    if counts.verifier and is_one_gpu:
        several = counts.timing_bench + counts.verifier
    else:
        several = max(1, counts.verifier) if service == "verifier" else benches
    return 1 / several if memory is None else even_share(memory, several)


def share_beside_policy(config: Config, service: str, instance: int, memory: int) -> float | None:
    """Of a GPU of `memory` bytes, what a bench or verifier may plan with beside vLLM, and the learner: these have what
    they may take, and whoever verifies has contexts beside its plans. None where no policy is on its GPU, as the
    placement says, or one that takes little.
    """
    if config.placement is None or config.sampler.engine != "vllm" or config.model_name == "small":
        return None

    def sits_here(other: str, number: int = 0) -> bool:
        return bool(set(placement.assigned(config, other, number)) & here)

    here, counts = set(placement.assigned(config, service, instance)), config.processes
    taken = config.sampler.memory_share * any(sits_here("sampler", number) for number in range(counts.sampler))
    if sits_here("learner"):
        taken += config.learner_room(memory) / memory
    if not taken:
        return None
    verifying = sum(
        sits_here(name, number) for name in ("timing_bench", "verifier") for number in range(getattr(counts, name))
    )
    left = 1.0 - taken - placement.RESERVE - verifying * CONTEXTS_BYTES / memory
    return max(LEAST_SHARE, min(left, config.timing_bench.memory_share) / verifying)


def log_fields(isolation: Isolation) -> dict[str, object]:
    """What each service logs at its start: how well untrusted code is confined here, and what the host lacks for it."""
    return {"isolation": isolation.level, **({"missing": list(isolation.missing)} if isolation.missing else {})}
