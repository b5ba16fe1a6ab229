"""torch's memory of the GPU, taken from a `Heap`: what a candidate allocates lies in the arena.

Installed once in a process, before anything of CUDA is initialised: torch can't change its allocator later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from kbrl_async.kernels.verify.cuda.record.heap import Heap

_Pointer = ctypes.c_void_p
_TAKE = ctypes.CFUNCTYPE(_Pointer, ctypes.c_ssize_t, ctypes.c_int, _Pointer)
_GIVE = ctypes.CFUNCTYPE(None, _Pointer, ctypes.c_ssize_t, ctypes.c_int, _Pointer)
_HOLD = ctypes.CFUNCTYPE(None, _Pointer, _Pointer)
_kept: list[Any] = []


def install(heap: Heap, is_idle: Callable[[], bool]) -> None:
    """From now on, in this process. `is_idle` is asked where memory runs out: it may wait for the device, and says
    whether that was possible. Who gets no memory all the same gets a null pointer, as torch asks for none better.
    """

    def take(size: int, device: int, stream: int | None) -> int:
        address = heap.take(size, stream or 0)
        if not address and size > 0 and is_idle():
            heap.settle()
            address = heap.take(size, stream or 0)
        if not address:
            heap.lacked = max(heap.lacked, size)
        return address

    def give(address: int | None, size: int, device: int, stream: int | None) -> None:
        heap.give(address or 0)

    def hold(address: int | None, stream: int | None) -> None:
        heap.hold(address or 0)

    calls = _TAKE(take), _GIVE(give), _HOLD(hold)
    addresses = [ctypes.cast(call, _Pointer).value for call in calls]
    binding: Any = torch._C
    made = binding._cuda_customAllocator(*addresses[:2])
    made.set_record_stream_fn(addresses[2])
    _kept.extend((*calls, made))
    binding._cuda_changeCurrentAllocator(made)
