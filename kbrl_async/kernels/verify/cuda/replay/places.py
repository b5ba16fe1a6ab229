"""The allocator of torch in a process that replays: an operator that is done again gets the memory that it got when it
was recorded. What was not foreseen gets memory of this process's own, whose blocks go from one operator to the next,
because operators run one after the other, and stay where they are, because graphs hold their addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from kbrl_async.kernels.verify import values
from kbrl_async.kernels.verify.cuda.arena import ALIGNMENT, BASE

_Pointer = ctypes.c_void_p
_TAKE = ctypes.CFUNCTYPE(_Pointer, ctypes.c_ssize_t, ctypes.c_int, _Pointer)
_GIVE = ctypes.CFUNCTYPE(None, _Pointer, ctypes.c_ssize_t, ctypes.c_int, _Pointer)
Allocate = Callable[[int], int]
"""Address of so many bytes of the device; 0 where they are not there."""


class Places:
    """Which addresses are given out. Pure but for `allocate`.

    >>> places = Places(lambda size: 4096)
    >>> places.follow([(512, 100)])
    >>> places.take(100) == BASE + 512, places.take(100), places.held
    (True, 4096, 512)
    """

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._script: list[tuple[int, int]] = []
        self._own: dict[int, int] = {}
        self._free: dict[int, list[int]] = {}
        self.has_failed = False
        """Memory was asked for that was not there."""

    @property
    def held(self) -> int:
        """Bytes that this process keeps beside the arena."""
        return sum(self._own.values())

    def follow(self, allocations: list[tuple[int, int]]) -> None:
        """(place, bytes) of what is asked for next, in this order; nothing: no more is foreseen."""
        self._script = allocations[::-1]

    def take(self, size: int) -> int:
        if self._script and self._script[-1][1] == size:
            return BASE + self._script.pop()[0]
        rounded = values.padded(max(size, 1), ALIGNMENT)
        free = self._free.get(rounded)
        if free:
            return free.pop()
        address = self._allocate(rounded)
        if address:
            self._own[address] = rounded
        self.has_failed = self.has_failed or not address
        return address

    def give(self, address: int) -> None:
        """Back again; what lies in the arena is nobody's to give."""
        if address in self._own:
            self._free.setdefault(self._own[address], []).append(address)


_kept: list[Any] = []


def install(places: Places) -> None:
    """From now on, in this process; before anything is allocated on the device."""

    def take(size: int, device: int, stream: int | None) -> int:
        return places.take(size)

    def give(address: int | None, size: int, device: int, stream: int | None) -> None:
        places.give(address or 0)

    calls = _TAKE(take), _GIVE(give)
    binding: Any = torch._C
    made = binding._cuda_customAllocator(*(ctypes.cast(call, _Pointer).value for call in calls))
    _kept.extend((*calls, made))
    binding._cuda_changeCurrentAllocator(made)
