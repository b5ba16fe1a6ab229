"""Compiling a Triton candidate before it meets a GPU. Runs the candidate, so only ever in a confined child.

::

    problem's inputs and ModelNew on `meta` tensors that pass for CUDA ─▶ forward
         └─ every kernel[grid](…) ─▶ compiled for its real launch arguments, not launched ─▶ bundle

Each configuration of an autotuned kernel is compiled, up to `MAX_CONFIGS` and within a budget; heuristics run as they
would. Only Triton's own errors are compile errors. Whatever else stops `forward` here (a value read from a tensor, say)
is a note: what is
missing from the bundle is compiled on the bench.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import types
from typing import Any

import msgspec
import torch

from kbrl_async.kernels.backends.building import answers
from kbrl_async.kernels.backends.launch.pretend import inputs_of, pretend
from kbrl_async.kernels.backends.launch.uncompiled import leave_uncompiled
from kbrl_async.kernels.backends.open import asked
from kbrl_async.kernels.backends.open.recording import asked_by
from kbrl_async.kernels.backends.triton import cache as triton_cache
from kbrl_async.kernels.backends.triton.build import Ahead, TritonOrder
from kbrl_async.kernels.backends.triton.driver import PretendDriver, shared_limit
from kbrl_async.kernels.backends.triton.tuning import TuningBudget
from kbrl_async.kernels.problems import cases
from kbrl_async.kernels.problems import model_contract as contract
from kbrl_async.kernels.sandbox import Isolation

MAX_CONFIGS = 64
_ALIGNED = 1 << 30


def preload() -> None:
    """What every child would otherwise import for itself, two seconds of it; before any fork."""
    with contextlib.suppress(ImportError):
        triton_cache.preload()
    one = torch.randn(2, 2, device="meta")
    torch.nn.Linear(2, 2, device="meta")(one).relu().sum()


def compile_triton(channel: socket.socket, payload: bytes, fds: list[int], isolation: Isolation) -> None:
    """Entry of the confined child."""
    order = msgspec.msgpack.decode(payload, type=TritonOrder)
    answers.begin(channel, isolation, order.folder)
    answers.hand_in(channel, *compile_ahead(order))


class _Mock:
    """A tensor as a launch sees it: type and address, the address as aligned as a real one."""

    ptr_range = staticmethod(lambda: 0)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = _ALIGNED + int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


def compile_ahead(order: TritonOrder) -> tuple[Ahead, dict[str, bytes]]:
    """The files of the bundle, as far as it came."""
    files: dict[str, bytes] = {}
    budget = _watch(order.arch, files, order.tuning_s)
    pretend("meta", everything=True)
    torch.set_grad_enabled(False)
    try:
        _run(order)
    except Exception as error:  # whatever candidate or problem raise: the bench will see it too
        text = _compile_error(error, order.source)
        return (Ahead(error=text) if text else Ahead(note=f"{type(error).__name__}: {error}"[:400])), files
    note = "" if files else "forward launched no Triton kernel"
    return Ahead(note=note, tuning=budget.note), {**files, **budget.file()}


def record(channel: socket.socket, payload: bytes, fds: list[int], isolation: Isolation) -> None:
    """Entry of the confined child for candidates under the rules `open` that may use Triton beside all else."""
    order = msgspec.msgpack.decode(payload, type=asked.RecordOrder)
    answers.begin(channel, isolation, order.folder)
    files: dict[str, bytes] = {}
    budget = _watch(order.arch, files, order.tuning_s)

    def explain(error: BaseException) -> asked.RecorderReport | None:
        text = _compile_error(error, order.source)
        return asked.RecorderReport(compile_error=text) if text else None

    recorded, made = asked_by(order, files, explain)
    answers.hand_in(channel, msgspec.structs.replace(recorded, tuning=budget.note), {**made, **budget.file()})


def _watch(arch: int, files: dict[str, bytes], tuning_s: float) -> TuningBudget:
    """Launches are compiled into `files` from now on."""
    from triton.runtime import driver

    triton_cache.use_bundle_cache(files)
    leave_uncompiled(also_traced=True)
    driver.set_active(PretendDriver(arch))
    budget = TuningBudget(tuning_s)
    budget.watch()
    _compile_instead_of_launch(budget)
    return budget


def _compile_error(error: BaseException, source: str) -> str:
    """Triton's own errors in words; empty for all others."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    if isinstance(error, CompilationError):
        return _explain(error, source)
    if isinstance(error, (OutOfResources, PTXASError)):
        return _first_lines(str(error))
    if "PassManager::run failed" in str(error):
        return f"Triton's compiler failed on this kernel: {error}"
    return ""


def _run(order: TritonOrder) -> None:
    # A kernel's cache key holds its module's name: the bench loads it under the same.
    candidate = contract.load("candidate", order.source, folder=order.folder)
    if not order.problem:
        return

    def run(problem: types.ModuleType) -> None:
        args, named = contract.arguments(problem.get_init_inputs())
        model = candidate.ModelNew(*args, **named)
        if isinstance(model, torch.nn.Module):
            model = model.to("cuda")
        inputs = [item.cuda() if isinstance(item, torch.Tensor) else item for item in inputs_of(problem)]
        model(*inputs)

    # Sizes that are one, odd or multiples of 16 are kernels of their own.
    cases.each(order.problem, candidate, run)


def _compile_instead_of_launch(budget: TuningBudget) -> None:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any = None, warmup: bool = True, **named: Any) -> Any:
        mocked = {name: _mock(value) for name, value in named.items()}
        kernel = run(self, *map(_mock, args), grid=grid, warmup=True, **mocked)
        limit = shared_limit(kernel.metadata.target.arch)
        if kernel.metadata.shared > limit:
            raise OutOfResources(kernel.metadata.shared, limit, "shared memory")
        return kernel

    JITFunction.run = only_compile
    Autotuner.run = functools.partialmethod(_every_config, budget)


def _mock(value: Any) -> Any:
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(_mock, value))
    return _Mock(value) if isinstance(value, torch.Tensor) else value


def _every_config(self: Any, budget: TuningBudget, *args: Any, **named: Any) -> Any:
    """In place of `Autotuner.run`: it fails only where no configuration compiles."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.errors import OutOfResources, PTXASError

    self.nargs = dict(zip(self.arg_names, args, strict=False))
    kernel, failure = None, None
    for config in self.prune_configs(named)[:MAX_CONFIGS]:
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **named, **config.all_kwargs()})
        try:
            given = {**named, "warmup": True, **config.all_kwargs()}
            kernel = budget.compile(self, config, functools.partial(self.fn.run, *args, **given)) or kernel
        except (OutOfResources, PTXASError, CompileTimeAssertionFailure) as error:
            failure = error
    if kernel is None and failure is not None:
        raise failure
    self.best_config = self.configs[0]
    return kernel


def _explain(error: Any, source: str) -> str:
    """The innermost error that stands in the candidate's own source, as `line N: text`, and the reason."""
    from triton.compiler.errors import CompilationError

    chain: list[Any] = [error]
    while isinstance(chain[-1].__cause__, CompilationError):
        chain.append(chain[-1].__cause__)
    own = [item for item in chain if _place(item, source)] or chain[:1]
    last = chain[-1]
    reason = last.error_message or str(last.__cause__ or "") or type(last).__name__
    return f"{_place(own[-1], source)}{_first_lines(reason)}"


def _place(error: Any, source: str) -> str:
    start = source.find(error.src) if error.src else -1
    if start < 0 or not hasattr(error.node, "lineno"):
        return ""
    number = source.count("\n", 0, start) + error.node.lineno
    return f"line {number}: {source.splitlines()[number - 1].strip()}: "


def _first_lines(text: str) -> str:
    kept: list[str] = []
    for line in text.strip().splitlines():
        if line.startswith("Repro command"):
            break
        kept.append(line.strip())
    return "\n".join(kept)


preload()
