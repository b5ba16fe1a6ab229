"""The backends that a worker offers in its Hello: what this host can build, and what its device can run."""

from __future__ import annotations

from kbrl_async.errors import MissingTool
from kbrl_async.kernels.backends.building import backend, backends
from kbrl_async.kernels.backends.launch.devices import CPU_ONLY, ON_CPU, ON_GPU
from kbrl_async.kernels.sandbox import Isolation
from protocols.messages import BACKENDS


def farm_caps() -> tuple[dict[str, str], dict[str, str]]:
    """Caps of a compile farm on this host, and by backend why it can't build the others."""
    missing = {name: backend(name).missing() for name in backends()}
    able = [name for name, reason in missing.items() if not reason]
    return {BACKENDS: ",".join(able)}, {name: reason for name, reason in missing.items() if reason}


def bench_caps(device: str) -> dict[str, str]:
    """Caps of a bench that runs kernels on `device`."""
    runs_here = ON_GPU if device.startswith("cuda") else ON_CPU
    able = [name for name in backends() if name in runs_here]
    return {BACKENDS: ",".join(able)}


def bench_device(wanted: str, backend: str, instance: int) -> str:
    """`"cpu"` or `"cuda:N"` for a bench. `wanted`: `"auto"`, `"cpu"` or `"cuda"`.

    :raises MissingTool: a GPU is needed and there is none.
    """
    import torch

    count = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and (backend in CPU_ONLY or (backend in ON_CPU and not count))):
        return "cpu"
    if not count:
        raise MissingTool("this host has no GPU for the timing bench", f"Choose another backend than {backend}")
    return f"cuda:{instance % count}"


def said(isolation: Isolation) -> dict[str, object]:
    """What each service logs at its start: how well untrusted code is confined here, and what the host lacks for it."""
    return {"isolation": isolation.level, **({"missing": list(isolation.missing)} if isolation.missing else {})}
