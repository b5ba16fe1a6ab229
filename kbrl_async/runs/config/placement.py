"""Which GPU each process of a run gets: presets, what they tell a process, and whether they fit a machine.

| `placement` | GPUs | learner | samplers | benches | verifiers |
|---|---|---|---|---|---|
| `one_gpu` | 1 | 0 | 0 | 0, in quiet windows; several take turns | 0 |
| `two_gpus` | 2 | 0 | 0 | 1, alone or in turns | 0 |
| `learner_apart` | 2 | 0 | 1 | 1, in quiet windows; several take turns | 1 |
| `split` | all of these | one each of its ranks | tensor_parallel × data_parallel each | one each; per_gpu | the last |

In a split, benches that share with the sampler (`timing_bench.shares_with`) are on its first GPU instead.

A preset sets keys that lie below those of files and command line, and `CUDA_VISIBLE_DEVICES` of each process, in its
nanny: so it holds for `kbrl train`, for `honcho start` and for a unit alike. To add one: an entry in
`presets.PLACEMENTS` and in `assigned`, its name in the schema.

Invariant: a bench that shares its GPU has its sharers stand still while it times; one that does not, has nobody beside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from kbrl_async.errors import HostError
from kbrl_async.runs.config.schema import Config

RESERVE = 0.05
"""Of a GPU, for what allocators lose between blocks."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
PLACED = ("sampler", "timing_bench", "verifier")
"""Services with as many processes as `processes` says, each on GPUs of its own or another's."""
LEAST_GIB = {"one_gpu": 24.0, "two_gpus": 16.0, "learner_apart": 24.0, "split": 16.0}
"""Memory of each GPU below which the suite's GPU shapes, their references and a small policy do not go together."""


class Gpu(msgspec.Struct, frozen=True):
    """One GPU of this machine, by the name that `CUDA_VISIBLE_DEVICES` takes."""

    id: str
    name: str
    memory_gib: float
    uuid: str = ""


def wanted(config: Config) -> int:
    """How many GPUs the placement takes."""
    counts = config.processes
    benches = 0 if _sits_by_samplers(config) else math.ceil(counts.timing_bench / config.timing_bench.per_gpu)
    apart = config.learner.processes + counts.sampler * config.sampler.gpus + benches + bool(counts.verifier)
    return {"one_gpu": 1, "two_gpus": 2, "learner_apart": 2}.get(config.placement or "", apart)


def misfit(config: Config, gpus: Sequence[Gpu]) -> str:
    """Why the placement does not fit a machine with these GPUs; empty where it does."""
    name = config.placement
    if name is None:
        return ""
    needed = wanted(config)
    if len(gpus) < needed:
        why = f" ({_terms(config)})" if name == "split" else ""
        return f"it takes {needed} GPU{'s' if needed > 1 else ''}{why}, and this machine has {len(gpus)}"
    if name != "split" and config.processes.sampler > 1:
        return "it is for one sampler; several need placement=split"
    if together(config) > 1 and "timing_bench" not in config.timing_bench.shares_with:
        return "its benches would time at once; they take turns where timing_bench.shares_with names timing_bench"
    used = gpus[:needed]
    small = next((gpu for gpu in used if gpu.memory_gib < LEAST_GIB[name]), None)
    if small is not None:
        return f"GPU {small.id} has {small.memory_gib:.0f} GiB, and it takes {LEAST_GIB[name]:.0f} GiB"
    timed = {gpus[assigned(config, "timing_bench", i)[0]].name for i in range(config.processes.timing_bench)}
    if len(timed) > 1:
        return f"its benches would time on different GPUs ({', '.join(sorted(timed))}): speedups would not compare"
    return ""


def _sits_by_samplers(config: Config) -> bool:
    """Benches of a split that have no GPU of their own: each is on the first one of a sampler, which stands still while
    they time."""
    return "sampler" in config.timing_bench.shares_with


def together(config: Config) -> int:
    """The most benches that one GPU gets."""
    counts = config.processes
    if config.placement != "split":
        return counts.timing_bench
    return math.ceil(counts.timing_bench / counts.sampler) if _sits_by_samplers(config) else config.timing_bench.per_gpu


def check_fit(config: Config, gpus: Sequence[Gpu]) -> None:
    """Raises `HostError` where the placement does not fit."""
    if reason := misfit(config, gpus):
        cure = "Take another placement, or none and set CUDA_VISIBLE_DEVICES for each process yourself"
        raise HostError(f"placement={config.placement} does not fit: {reason}", cure)


def visible_to(config: Config, process: str, gpus: Sequence[Gpu]) -> dict[str, str]:
    """The variables that a process (`sampler.2`, as runners name it) is started with; none where nothing is placed.

    The others keep what they see: they compute nothing there, but ask what GPU it is.
    """
    if config.placement is None:
        return {}
    service, _, number = process.partition(".")
    if service not in ("learner", *PLACED):
        return {}
    at = assigned(config, service, max(0, int(number) - 1) if number.isdigit() else 0)
    return {VISIBLE: ",".join(gpus[i].id for i in at)} if at[-1] < len(gpus) else {}


def assigned(config: Config, service: str, instance: int = 0) -> range:
    """Positions of its GPUs among those of the machine: one, or in a split as many as the learner's processes, or the
    copies and parts of a sampler's model, are."""
    if config.placement != "split":
        second = {"two_gpus": ("timing_bench",), "learner_apart": ("sampler", "timing_bench", "verifier")}
        only = int(service in second.get(config.placement or "", ()))
        return range(only, only + 1)
    ranks = config.learner.processes
    if service == "learner":
        return range(ranks)
    if service == "verifier":
        return range(wanted(config) - 1, wanted(config))
    each = config.sampler.gpus
    if service == "sampler":
        return range(ranks + instance * each, ranks + (instance + 1) * each)
    samplers = config.processes.sampler
    if _sits_by_samplers(config):
        at = ranks + instance % samplers * each
    else:
        at = ranks + samplers * each + instance // config.timing_bench.per_gpu
    return range(at, at + 1)


def ranges(config: Config) -> dict[str, str]:
    """The GPUs of each process as a range, such as `2-5`, by its name; none where nothing is placed."""
    if config.placement is None:
        return {}
    counts = {"learner": 1, **{name: getattr(config.processes, name) for name in PLACED}}
    found = {f"{name}.{i + 1}": assigned(config, name, i) for name, count in counts.items() for i in range(count)}
    return {name: f"{at[0]}-{at[-1]}" if len(at) > 1 else str(at[0]) for name, at in found.items()}


def _terms(config: Config) -> str:
    """What the GPUs of a split are for."""
    counts = config.processes
    learner = f"learner.processes={config.learner.processes}"
    each = f" × {config.sampler.gpus} GPUs" if config.sampler.gpus > 1 else ""
    per_gpu = config.timing_bench.per_gpu
    terms = [learner, f"processes.sampler={counts.sampler}{each}"]
    if not _sits_by_samplers(config):
        terms.append(f"processes.timing_bench={counts.timing_bench}" + (f" by {per_gpu}" if per_gpu > 1 else ""))
    return " + ".join([*terms, *(["1 for verifiers"] if counts.verifier else [])])


def inventory(environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that this process may use, in the order of `CUDA_VISIBLE_DEVICES`; empty where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        found = [
            Gpu(
                str(i),
                str(pynvml.nvmlDeviceGetName(h)),
                pynvml.nvmlDeviceGetMemoryInfo(h).total / 2**30,
                str(pynvml.nvmlDeviceGetUUID(h)),
            )
            for i, h in enumerate(handles)
        ]
    finally:
        pynvml.nvmlShutdown()
    return allowed(found, environment)


def allowed(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """Of all GPUs those that `CUDA_VISIBLE_DEVICES` lists, in its order."""
    if VISIBLE not in environment:
        return list(gpus)
    names = [name.strip() for name in environment[VISIBLE].split(",") if name.strip()]
    by_name = {name: gpu for gpu in gpus for name in (gpu.id, gpu.uuid) if name}
    return [msgspec.structs.replace(by_name[name], id=name) for name in names if name in by_name]
