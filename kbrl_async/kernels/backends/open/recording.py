"""What a candidate would build, by running it: only ever in a confined child.

`ModelNew` is made and called once, with no kernel behind its launchers: a loader that is reached at the import, in the
constructor or lazily in forward is heard all the same. For a GPU tensors have no memory and pass for CUDA tensors, so
that a constructor that moves weights to a GPU needs none; for a CPU they are real, so that values can be read.
"""

from __future__ import annotations

import contextlib
import socket
import types
from collections.abc import Callable
from typing import Any

import msgspec
import torch.utils.cpp_extension  # 0.15 s that no child has to pay
from torch.utils._python_dispatch import TorchDispatchMode

from kbrl_async.kernels.backends.building import answers
from kbrl_async.kernels.backends.c import launch as c
from kbrl_async.kernels.backends.inline import launch as inline
from kbrl_async.kernels.backends.launch.pretend import inputs_of, pretend
from kbrl_async.kernels.backends.launch.uncompiled import leave_uncompiled
from kbrl_async.kernels.backends.nvrtc import launch as nvrtc
from kbrl_async.kernels.backends.open.asked import ASKED, CudaSource, RecorderReport, RecordOrder, Requested
from kbrl_async.kernels.problems import cases
from kbrl_async.kernels.problems import model_contract as contract
from kbrl_async.kernels.sandbox import Isolation

_MAX_ERROR = 600
_ATEN = torch.ops.aten
_EMPTY = {
    _ATEN.empty, _ATEN.empty_like, _ATEN.empty_permuted, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided,
}  # fmt: skip
Explain = Callable[[BaseException], RecorderReport | None]


def record(channel: socket.socket, payload: bytes, fds: list[int], isolation: Isolation) -> None:
    """Entry of the confined child for candidates without Triton."""
    order = msgspec.msgpack.decode(payload, type=RecordOrder)
    answers.begin(channel, isolation, order.folder)
    answers.hand_in(channel, *asked_by(order, {}, lambda _error: None))


def asked_by(order: RecordOrder, files: dict[str, bytes], explain: Explain) -> tuple[RecorderReport, dict[str, bytes]]:
    """What to hand in. `files` are Triton's; `explain` knows errors of another compiler, which come before all else."""
    asked = Requested([], [], [])
    _replace_launchers(asked)
    torch.set_grad_enabled(False)
    found = RecorderReport()
    try:
        _run(order)
    except BaseException as error:  # the candidate's own, SystemExit among them: what was recorded counts
        text = f"{_where(error)}{type(error).__name__}: {error}"[:_MAX_ERROR]
        found = explain(error) or RecorderReport(error=text)
    return found, {ASKED: msgspec.msgpack.encode(asked), **files}


def _run(order: RecordOrder) -> None:
    if order.is_on_gpu:
        pretend("meta", everything=True)
    candidate = contract.load("candidate", order.source, folder=order.folder)
    if not hasattr(candidate, "ModelNew"):
        raise NameError("the file defines no ModelNew")
    if not order.problem:
        candidate.ModelNew()
        return

    def run(problem: types.ModuleType) -> None:
        zeroed = _Zeroed() if not order.is_on_gpu else contextlib.nullcontext()  # type: ignore[no-untyped-call]
        with zeroed:
            args, named = contract.arguments(problem.get_init_inputs())
            model = candidate.ModelNew(*args, **named)
            given = inputs_of(problem)
            if order.is_on_gpu:
                model = model.to("cuda") if isinstance(model, torch.nn.Module) else model
                given = [item.cuda() if isinstance(item, torch.Tensor) else item for item in given]
            model(*given)

    cases.each(order.problem, candidate, run)


class _Zeroed(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """New memory is zero: what a kernel would have written there may be an index, and any index can end the process."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if getattr(func, "overloadpacket", None) in _EMPTY:
            with contextlib.suppress(NotImplementedError):  # of a type without arithmetic
                made.zero_()
        return made


def _where(error: BaseException) -> str:
    """The line of the candidate that it was raised below."""
    line, step = 0, error.__traceback__
    while step is not None:
        line = step.tb_lineno if step.tb_frame.f_code.co_filename == "candidate.py" else line
        step = step.tb_next
    return f"line {line}: " if line else ""


class _Stub(types.ModuleType):
    """Stands in for a built extension: any function is there, and gives back what it was given."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: args[0] if args else None


def _replace_launchers(asked: Requested) -> None:
    """For the rest of this process they are heard, and launch nothing."""

    def extension(made: inline.Extension, is_python_module: bool) -> _Stub:
        answers.refuse_unreadable(made)
        if made not in asked.extensions:
            asked.extensions.append(made)
        return _Stub(made.name)

    def c_kernel(self: Any, source: str, name: str) -> None:
        if str(source) not in asked.c:
            asked.c.append(str(source))

    def cuda_kernel(self: Any, source: str, name: str, options: tuple[str, ...] = ()) -> None:
        if nvrtc.parameters(source, name) is None:
            raise ValueError(f"the CUDA source defines no `__global__ void {name}(…)`")
        made = CudaSource(str(source), str(name), tuple(map(str, options)))
        if made not in asked.cuda:
            asked.cuda.append(made)

    inline.replace_loaders(extension)
    c.CKernel.__init__ = c_kernel  # type: ignore[method-assign]
    c.CKernel.__call__ = _nothing  # type: ignore[method-assign]
    nvrtc.CudaKernel.__init__ = cuda_kernel  # type: ignore[method-assign]
    nvrtc.CudaKernel.__getitem__ = lambda self, config: _nothing  # type: ignore[method-assign, assignment, return-value]
    nvrtc.CudaKernel.launch = _nothing  # type: ignore[method-assign]
    leave_uncompiled(also_traced=True)
    with contextlib.suppress(AttributeError):
        torch.cuda._compile_kernel = nvrtc.compile_kernel  # type: ignore[attr-defined, unused-ignore]


def _nothing(*args: Any, **named: Any) -> None:
    """There is no kernel here."""
