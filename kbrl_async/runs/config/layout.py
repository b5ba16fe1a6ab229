"""What a run's services derive from its configuration and this host: cores, slots, addresses, process counts."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kbrl_async.errors import ConfigError
from kbrl_async.kernels.backends.backend import backend
from kbrl_async.runs.config.schema import Config
from protocols.sockets import MAX_IPC_PATH_BYTES

SERVICES = ("broker", "learner", "sampler", "compile_farm", "timing_bench", "reward_aggregator", "verifier")
"""Every service, in starting order."""
EVALUATION_SERVICES = ("broker", "sampler", "compile_farm", "timing_bench", "evaluator", "verifier")
"""Those of an evaluation: what training learns with is replaced by an evaluator."""
BEHIND = "KBRL_BROKER_BEHIND"
"""Variable for a broker that `kbrl chaos` started behind a proxy: its socket files are those of `behind`."""
SCALABLE = ("sampler", "compile_farm", "timing_bench", "verifier")
GPU_BENCH_CORES = 4
"""Cores that a bench on a GPU gets where there are enough: beside itself a reference, two recorders and a player are at
work."""


class CpuLayout(msgspec.Struct, frozen=True):
    """Cores by kind of process."""

    shared: list[int]
    """Broker and reward aggregator."""
    sampler: list[int]
    learner: list[int]
    bench: list[int]
    """Of all timing benches: one each, on a GPU up to `GPU_BENCH_CORES` each."""
    compile: list[int]


class Endpoints(msgspec.Struct, frozen=True):
    """The broker's addresses: for producers, for workers, and for viewers, who can change nothing."""

    submit: str
    work: str
    status: str = ""


def available_cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def cpu_layout(config: Config, cores: Sequence[int]) -> CpuLayout:
    """Timing gets quiet cores of its own, as far as there are any, on a GPU at most half of all; what computes gets the
    others.

    :param cores: what the host lends us, see `available_cores`.
    :raises ConfigError: a core is named that there is not, or a bench would have none for itself.
    """
    benches = config.processes.timing_bench
    bench = _chosen("cpu.bench", config.cpu.bench, cores)
    if config.timing_bench.core is not None:
        bench = _chosen("timing_bench.core", [config.timing_bench.core], cores)
    if not bench:
        each = max(1, min(GPU_BENCH_CORES, len(cores) // (2 * benches))) if _times_on_gpu(config) else 1
        bench = list(cores[-benches * each :])
    if len(bench) < benches:
        cause = f"{benches} timing benches need a core each, and there are {len(bench)}"
        raise ConfigError(cause, f"Lower processes.timing_bench to {len(bench)}")
    shared = [core for core in cores if core not in bench] or list(cores)
    return CpuLayout(
        shared=shared,
        sampler=_chosen("cpu.sampler", config.cpu.sampler, cores) or shared,
        learner=_chosen("cpu.learner", config.cpu.learner, cores) or shared,
        bench=bench,
        compile=_chosen("cpu.compile", config.cpu.compile, cores) or (shared[1:] or shared),
    )


def _times_on_gpu(config: Config) -> bool:
    """By what the run says; a backend that runs on both, by the device that it asks for. One that is not here is for
    others to miss: most services never ask for it.
    """
    wanted = config.timing_bench.device
    if wanted == "cpu":
        return False
    try:
        kinds = backend(config.backend).runs_on
    except ConfigError:
        return False
    return "cuda" in kinds and (wanted == "cuda" or config.placement is not None or "cpu" not in kinds)


def _chosen(key: str, wanted: str | list[int], cores: Sequence[int]) -> list[int]:
    """The cores that were named; none for `auto`."""
    if isinstance(wanted, str):
        return []
    if missing := [core for core in wanted if core not in cores]:
        have = ",".join(map(str, cores))
        raise ConfigError(f"{key}: this host lends no core {missing[0]}", f"Choose among {have}, or {key}=auto")
    return list(wanted)


def compile_slots(config: Config, layout: CpuLayout) -> int:
    """Compilations at once in one farm process: a little more than its cores, so that none idles on the disk."""
    return config.compile_farm.slots or math.ceil(1.1 * len(layout.compile))


def sampler_threads(config: Config, layout: CpuLayout) -> int:
    """Threads of torch, or of vLLM on a CPU, in one sampler."""
    return config.sampler.threads or len(layout.sampler)


def learner_threads(config: Config, layout: CpuLayout) -> int:
    """Threads of torch in one of the learner's processes."""
    return config.learner.threads or len(layout.learner)


def endpoints(config: Config, run_dir: Path) -> Endpoints:
    """The configured addresses; by default sockets in a folder of the run, or in the temporary folder if too long.

    Pure: whoever binds makes the folder, which must be open to its owner only.
    """
    folder = run_dir.absolute() / "sockets"
    if len(os.fsencode(folder / "submit")) > MAX_IPC_PATH_BYTES:
        digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"kbrl-{os.getuid()}" / digest
    return Endpoints(
        submit=config.broker.submit or f"ipc://{folder / 'submit'}",
        work=config.broker.work or f"ipc://{folder / 'work'}",
        status=config.broker.status or f"ipc://{folder / 'status'}",
    )


def behind(address: str) -> str:
    """Where a broker behind a proxy binds what others reach at `address`; what is no socket file stays."""
    return f"{address}.behind" if address.startswith("ipc://") else address


def bound(found: Endpoints, environment: Mapping[str, str]) -> Endpoints:
    """The addresses that the broker itself binds: those of others, unless it is behind a proxy."""
    if not environment.get(BEHIND):
        return found
    return msgspec.structs.replace(found, submit=behind(found.submit), work=behind(found.work))


def process_counts(config: Config) -> dict[str, int]:
    """How many processes of each service run on this host, in starting order; none of a service that has none."""
    services = EVALUATION_SERVICES if config.evaluation.policy is not None else SERVICES
    counts = {name: getattr(config.processes, name, 1) for name in services}
    return {name: count for name, count in counts.items() if count}
