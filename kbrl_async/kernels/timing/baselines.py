"""What a candidate is compared with besides eager: `torch.compile`, measured in the same session, through eager.

::

    trusted, tool-profile child: problem ─▶ torch.export ─▶ AOTInductor ─▶ library (.so)
    bench: eager vs library (as if it were a candidate: checked, timed) ─▶ B;   eager vs candidate ─▶ C
           C over B = speedup over the baseline, with both uncertainties

A confined child can start no compiler, so the library is made ahead: the kernels that Inductor generates are the same
as those of `torch.compile`, without its guards. That makes it the stronger baseline for short calls.

Invariants
* A number in a `Timing` is of this session; what is kept on disk is a prior (for deadlines and batch sizes) only.
* Weights are inputs of a library: it works with the secret weights of any session.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.kernels.problems import model_contract as contract
from kbrl_async.kernels.timing.device import timed_device
from kbrl_async.kernels.timing.statistics import Interval

EAGER = "eager"
MODES = {"compile": False, "compile-max-autotune": True}
"""Baselines by name, and whether Inductor tunes."""
NAMES = (EAGER, *MODES)

_WRAPPER = '''

import torch as _torch


class ModelNew(Model):
    """The reference with a forward that was compiled ahead; its weights are inputs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__["_compiled"] = _torch._C._aoti.{runner}

    def forward(self, *inputs):
        weights = [*self.parameters(), *self.buffers()]
        outputs = self._compiled.run([*weights, *(x for x in inputs if isinstance(x, _torch.Tensor))])
        return outputs[0] if {single!r} else tuple(outputs)
'''


def over(candidate: Interval, baseline: Interval) -> Interval:
    """Speedup over a baseline, from both speedups over eager. Each interval misses seldom; both hold at once in all but
    the sum of those cases, so the ends are divided crosswise.
    """
    return Interval(
        candidate.median / baseline.median,
        candidate.lo / baseline.hi if baseline.hi > 0 else 0.0,
        candidate.hi / baseline.lo if baseline.lo > 0 else math.inf,
    )


def wrapper(source: str, library: str, *, single: bool = True, device: str = "cpu") -> str:
    """A problem's source with a `ModelNew` that runs the compiled library. `single`: it gives one tensor, no tuple."""
    return source + _WRAPPER.format(runner=timed_device(device).library_runner(library), single=single)


# ── the prior ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Prior(msgspec.Struct, frozen=True):
    """What an earlier session saw."""

    ms: float
    eager_ms: float


def prior_key(source: str, hardware: str, versions: dict[str, str], name: str) -> str:
    parts = [source, hardware, name, *(f"{package}={version}" for package, version in sorted(versions.items()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


class Priors:
    """A small file of priors; the oldest go first (I10). Of several writers the last wins, none breaks it."""

    def __init__(self, path: Path, limit: int = 4096) -> None:
        self._path, self._limit = path, limit

    def get(self, key: str) -> Prior | None:
        return self._read().get(key)

    def put(self, key: str, prior: Prior) -> None:
        kept = self._read()
        kept.pop(key, None)
        kept[key] = prior
        while len(kept) > self._limit:
            kept.pop(next(iter(kept)))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(msgspec.json.encode(kept))
        part.replace(self._path)

    def _read(self) -> dict[str, Prior]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, Prior])
        except (OSError, msgspec.MsgspecError):
            return {}


# ── in the tool-profile child ───────────────────────────────────────────────────────────────────────────────────────


class Order(msgspec.Struct, frozen=True):
    source: str
    name: str
    library: str
    """Where the library goes; its folder may be written, and holds the compiler's scratch files."""
    device: str
    inductor: dict[str, Any]
    """Of the device; the child that compiles could import nothing that says it."""


class CompiledBaseline(msgspec.Struct, frozen=True):
    """Empty `error`: the library is there."""

    error: str = ""
    single: bool = True


def compile_child(channel: socket.socket, payload: bytes, fds: list[int], isolation: Any) -> None:
    """Entry of the child that compiles; see `verify.baselines`."""
    order = msgspec.msgpack.decode(payload, type=Order)
    folder = str(Path(order.library).parent)
    tempfile.tempdir = folder  # it was asked for before the fork
    os.environ.update(TMPDIR=folder, TORCHINDUCTOR_CACHE_DIR=folder, TORCHINDUCTOR_COMPILE_THREADS="1", HOME=folder)
    os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
    os.environ.setdefault("PATH", "/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin")
    os.environ["USER"] = os.environ["LOGNAME"] = "bench"
    warnings.simplefilter("ignore")  # of torch about itself
    try:
        made = CompiledBaseline(single=compile_library(order))
    except Exception as error:
        made = CompiledBaseline(f"{type(error).__name__}: {error}"[:400])
    channel.send(msgspec.msgpack.encode(made))


def compile_library(order: Order) -> bool:
    """Export the problem's `Model` with its weights as inputs and compile it; whether it gives a single tensor."""
    import torch

    namespace: dict[str, Any] = {"__name__": "problem"}
    exec(compile(order.source, "problem.py", "exec"), namespace)  # noqa: S102 - this confined child exists to run it
    arguments, named = contract.arguments(namespace["get_init_inputs"]())
    model = namespace["Model"](*arguments, **named).to(order.device)
    inputs = [x.to(order.device) if isinstance(x, torch.Tensor) else x for x in namespace["get_inputs"]()]
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    weights = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]

    class Functional(torch.nn.Module):
        def forward(self, weights: list[torch.Tensor], *inputs: Any) -> Any:
            return torch.func.functional_call(model, dict(zip(names, weights, strict=True)), inputs)

    package = f"{order.library}.pt2"
    configs = {"max_autotune": MODES[order.name], **order.inductor}
    with torch.no_grad():
        single = isinstance(model(*inputs), torch.Tensor)
        exported = torch.export.export(Functional(), (weights, *inputs))
        torch._inductor.aoti_compile_and_package(exported, package_path=package, inductor_configs=configs)
    # A confined child has nowhere to unpack: it gets the library itself.
    with zipfile.ZipFile(package) as archive:
        inside = next(name for name in archive.namelist() if name.endswith(".so"))
        Path(order.library).write_bytes(archive.read(inside))
    return single
