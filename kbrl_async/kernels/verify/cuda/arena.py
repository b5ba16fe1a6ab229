"""Device memory that two processes hold at once: allocated by the driver, handed over as a descriptor, seen as tensors.

::

    trusted process ── DeviceArena.new ── fd (SCM_RIGHTS) ──▶ child: DeviceArena.received      the same bytes for both

Legacy CUDA IPC handles need a shared pid namespace; these descriptors need nothing but the socket.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from kbrl_async.kernels.cuda_driver import CudaError, driver
from kbrl_async.kernels.verify import values, wire

ALIGNMENT = 512
"""As torch's own allocator aligns: a kernel must not find worse pointers here than anywhere else."""
BASE = 0x300000000000
"""Address of the arena in recorders and replayers, so that what was recorded holds addresses that hold."""
WINDOW = 1 << 38
"""Addresses from `BASE` on that a process which maps one arena after the other keeps for them: once they are free, the
driver gives them to others."""


class _Raw:
    """What torch asks for to see foreign device memory."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class DeviceArena:
    """One mapping of one allocation; `raw` are its bytes. `close` may be called again."""

    def __init__(self, handle: int, size: int, device: torch.device, at: int = 0, is_reserved: bool = False) -> None:
        """`handle` is its own from here on, also where there is no memory to map it."""
        self._handle, self.size, self._is_reserved = handle, size, is_reserved
        try:
            if is_reserved:
                self._address = at
                driver().fill_in(at, handle, size, device.index or 0)
            else:
                self._address = driver().map(handle, size, device.index or 0, at)
        except (CudaError, MemoryError):
            driver().call("cuMemRelease", handle)
            raise
        self.raw: Any = torch.as_tensor(_Raw(self._address, size), device=device)

    @classmethod
    def new(cls, size: int, device: torch.device) -> DeviceArena:
        """Raises `CudaError` where the memory is not there."""
        step = driver().granularity(device.index or 0)
        size = max(1, -(-size // step)) * step
        return cls(driver().create(size, device.index or 0), size, device)

    @classmethod
    def at_base(cls, size: int, device: torch.device) -> DeviceArena:
        """New memory at `BASE`, which was reserved: what this process works in until it gets another."""
        step = driver().granularity(device.index or 0)
        size = -(-size // step) * step
        return cls(driver().create(size, device.index or 0), size, device, BASE, is_reserved=True)

    @classmethod
    def received(cls, fd: int, size: int, device: torch.device, at: int = 0, is_reserved: bool = False) -> DeviceArena:
        """From the other process; closes the descriptor. `size` is the rounded one, `at` the address it has to have,
        which was reserved before, and stays so, where `is_reserved`.
        """
        try:
            handle = driver().import_fd(fd)
        finally:
            os.close(fd)
        return cls(handle, size, device, at, is_reserved)

    def export(self) -> int:
        """A descriptor for another process."""
        return driver().export_fd(self._handle)

    def view(self, meta: wire.TensorMeta) -> torch.Tensor:
        """Raises `ValueError` where `meta` reaches outside of this arena."""
        return values.view(self.raw, meta)

    def close(self) -> None:
        if self.raw is None:
            return
        torch.cuda.synchronize()
        self.raw = None
        if self._is_reserved:
            driver().take_out(self._address, self._handle, self.size)
        else:
            driver().unmap(self._address, self.size, self._handle)
