"""What every child of ours on a GPU does: it says why it could not start, and what ended a call."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import torch

from kbrl_async.kernels.cuda_driver import CudaError
from kbrl_async.kernels.verify import wire
from kbrl_async.kernels.verify.cpu import runner
from kbrl_async.kernels.verify.hoarding import tells_of_memory

_ILLEGAL = (
    "illegal memory access",
    "misaligned address",
    "illegal instruction",
    "invalid program counter",
    "unspecified launch failure",
    "hardware stack error",
    "invalid address space",
    "CUDA_ERROR_ILLEGAL",
    "CUDA_ERROR_MISALIGNED",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_HARDWARE_STACK",
    "CUDA_ERROR_INVALID_PC",
)
_ASSERTED = ("device-side assert", "CUDA_ERROR_ASSERT")


@contextlib.contextmanager
def telling(channel: socket.socket) -> Iterator[None]:
    """Around the start of a child of ours: nobody sees its traceback, and nothing that it was asked to run has run."""
    try:
        yield
    except BaseException as error:
        channel.send(wire.encode(device_failure(error)))
        raise


def begin_gradients() -> None:
    """The first backward of a process makes torch's threads for the GPUs, and later none can be made. Where that fails,
    only problems that ask for gradients do.
    """
    with contextlib.suppress(RuntimeError), torch.enable_grad():
        torch.ones(1, requires_grad=True).exp().backward()  # type: ignore[no-untyped-call]


def device_failure(error: BaseException) -> wire.Failed:
    """What ended a call on a GPU."""
    failed = runner.failure(error)
    text = failed.text
    if isinstance(error, torch.OutOfMemoryError) or tells_of_memory(text):
        return wire.Failed("out_of_memory", _short(text))
    if any(words in text for words in _ILLEGAL):
        return wire.Failed("illegal_access", _short(text))
    if any(words in text for words in _ASSERTED) or isinstance(error, CudaError):
        return wire.Failed("runtime_error", _short(text))
    return failed


def _short(text: str) -> str:
    """Without the advice on environment variables that nobody can set here."""
    kept = [
        line for line in text.splitlines() if not line.startswith(("CUDA kernel errors", "For debugging", "Compile"))
    ]
    return "\n".join(kept)
