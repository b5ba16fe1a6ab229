"""Runs a candidate's model once on its problem's inputs, in a confined child, for sanitizers.

::

    record   (zygote child): every C kernel call → calls.json and one file per buffer, written before the call runs
    __main__ (tool process): the model as it stands, under a sanitizer that watches the whole process

What is written before a call is there even where the call crashes; a C program then makes the same call with buffers
that end where the tensors end.
"""

from __future__ import annotations

import ctypes
import functools
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from kbrl_async.kernels.backends.backend import prepare
from kbrl_async.kernels.backends.c import launch as launch_c
from kbrl_async.kernels.backends.sanitize.parts import (
    CALLS_FILE,
    Argument,
    RecordedLaunch,
    RecordedLaunches,
    SanitizeTask,
    buffer_file,
)
from kbrl_async.kernels.problems import cases
from kbrl_async.kernels.problems import model_contract as contract
from kbrl_async.kernels.sandbox import Isolation


def record(channel: socket.socket, payload: bytes, fds: list[int], isolation: Isolation) -> None:
    """Entry of the recording child; its first message is its isolation."""
    channel.send(msgspec.msgpack.encode(isolation))
    task = msgspec.msgpack.decode(payload, type=SanitizeTask)
    recorder = _Recorder(task)
    launch_c.CKernel.__call__ = recorder.replacement()  # type: ignore[method-assign]
    try:
        run_once(task)
    except BaseException as error:  # the candidate's own, SystemExit among them: what was recorded counts
        recorder.error = f"{type(error).__name__}: {error}"[:400]
    recorder.write()


def run_once(task: SanitizeTask) -> None:
    """Build the reference and the candidate with the same weights; one forward of the candidate on each workload."""
    loaded(task)()


def loaded(task: SanitizeTask) -> Callable[[], None]:
    """`run_once` for several times: a second load would forget our own modules, which lie in the candidate's folder."""
    torch.set_grad_enabled(False)
    prepare(task.backend, task.artifacts, task.device.partition(":")[0])
    candidate = contract.load("candidate", task.candidate, folder=task.folder)
    return functools.partial(cases.each, task.problem, candidate, functools.partial(_run, task, candidate))


def _run(task: SanitizeTask, candidate: types.ModuleType, problem: types.ModuleType) -> None:
    contract.seed(task.seed)
    args, kwargs = contract.arguments(problem.get_init_inputs())
    contract.seed(task.seed)
    reference = problem.Model(*args, **kwargs)
    contract.seed(task.seed)
    model = candidate.ModelNew(*args, **kwargs)
    _copy_weights(reference, model)
    if isinstance(model, torch.nn.Module):
        model = model.to(task.device)
    contract.seed(task.seed + 1)
    given = [item.to(task.device) if isinstance(item, torch.Tensor) else item for item in problem.get_inputs()]
    model(*given)
    if task.device != "cpu":
        torch.cuda.synchronize()


class _Recorder:
    def __init__(self, task: SanitizeTask) -> None:
        self.folder, self.room, self.max_calls = Path(task.folder), task.max_bytes, task.max_calls
        self.calls: list[RecordedLaunch] = []
        self.left_out = 0
        self.error = ""

    def replacement(self) -> Any:
        """For `CKernel.__call__`: record, then do what it did."""
        original = launch_c.CKernel.__call__

        def call(kernel: launch_c.CKernel, *args: Any) -> None:
            self.record(kernel, args)
            original(kernel, *args)

        return call

    def record(self, kernel: launch_c.CKernel, args: tuple[Any, ...]) -> None:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        storages = list({t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values())
        size = sum(storage.nbytes() for storage in storages)
        if size > self.room or len(self.calls) >= self.max_calls:
            self.left_out += 1
            return
        self.room -= size
        index = len(self.calls)
        for number, storage in enumerate(storages):
            (self.folder / buffer_file(index, number)).write_bytes(_bytes_of(storage))
        places = {storage.data_ptr(): number for number, storage in enumerate(storages)}
        declared = kernel._declared or [""] * len(args)
        listed = [_argument(arg, text, places) for arg, text in zip(args, declared, strict=False)]
        sizes = [storage.nbytes() for storage in storages]
        self.calls.append(RecordedLaunch(index, kernel.key, kernel.name, listed, sizes))
        self.write()

    def write(self) -> None:
        data = msgspec.json.encode(RecordedLaunches(self.calls, self.left_out, self.error))
        (self.folder / CALLS_FILE).write_bytes(data)


def _argument(arg: Any, declared: str, places: dict[int, int]) -> Argument:
    if not isinstance(arg, torch.Tensor):
        return Argument(declared, value=arg)
    storage = arg.untyped_storage()
    return Argument(declared, places[storage.data_ptr()], arg.data_ptr() - storage.data_ptr())


def _bytes_of(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def _copy_weights(reference: torch.nn.Module, model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        return
    given = reference.state_dict()
    for name, tensor in model.state_dict().items():
        if name in given and given[name].shape == tensor.shape:
            tensor.copy_(given[name])


if __name__ == "__main__":
    run_once(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=SanitizeTask))
