"""Device memory that two processes hold at once: allocated by the driver, handed over as a descriptor, seen as tensors.

::

    trusted process ── DeviceArena.new ── fd (SCM_RIGHTS) ──▶ child: DeviceArena.received      the same bytes for both

Legacy CUDA IPC handles need a shared pid namespace; these descriptors need nothing but the socket.

Where the device has no room for it, an arena lies in pinned memory of the host, which the device reads and writes by
its bus. It can be moved: the addresses stay, so that tensors and graphs over it hold, and only what is behind them is
other memory.
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

    def __init__(
        self,
        handle: int,
        size: int,
        device: torch.device,
        at: int = 0,
        is_reserved: bool = False,
        is_on_host: bool = False,
    ) -> None:
        """`handle` is its own from here on, also where there is no memory to map it."""
        self._handle, self.size, self._is_reserved = handle, size, is_reserved
        self._device, self.is_on_host = device, is_on_host
        self._kept: int | None = None
        """The handle of its memory of the host while it is on the device: pinning some takes seconds."""
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
    def new(cls, size: int, device: torch.device, is_on_host: bool = False) -> DeviceArena:
        """Raises `CudaError` where the memory is not there."""
        step = driver().granularity(device.index or 0)
        size = max(1, -(-size // step)) * step
        return cls(driver().create(size, device.index or 0, is_on_host), size, device, is_on_host=is_on_host)

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

    @property
    def device_bytes(self) -> int:
        return 0 if self.is_on_host else self.size

    def move(self, to_host: bool) -> bool:
        """Its bytes, to the host or back; whether they lay elsewhere. Whoever else maps it has its old memory until it
        does `replace`.

        :raises CudaError: the memory is not there; then nothing has changed.
        """
        if self.is_on_host is to_host:
            return False
        index = self._device.index or 0
        handle = self._kept if to_host and self._kept is not None else driver().create(self.size, index, to_host)
        self._copy_to(handle)
        old, self._kept = self._handle, None
        self._put_behind(handle)
        if to_host:
            driver().call("cuMemRelease", old)
        else:
            self._kept = old
        self.is_on_host = to_host
        return True

    def _copy_to(self, handle: int) -> None:
        try:
            there = driver().map(handle, self.size, self._device.index or 0)
        except CudaError:
            if handle != self._kept:
                driver().call("cuMemRelease", handle)
            raise
        torch.as_tensor(_Raw(there, self.size), device=self._device).copy_(self.raw)
        torch.cuda.synchronize()
        driver().clear(there, self.size)

    def _put_behind(self, handle: int) -> None:
        driver().call("cuMemUnmap", self._address, self.size)
        self._handle = handle
        driver().fill_in(self._address, handle, self.size, self._device.index or 0)

    def replace(self, fd: int) -> None:
        """By the memory that the other process has moved it to; closes the descriptor."""
        torch.cuda.synchronize()
        try:
            handle = driver().import_fd(fd)
        finally:
            os.close(fd)
        old = self._handle
        self._put_behind(handle)
        driver().call("cuMemRelease", old)

    def view(self, meta: wire.TensorMeta) -> torch.Tensor:
        """Raises `ValueError` where `meta` reaches outside of this arena."""
        return values.view(self.raw, meta)

    def close(self) -> None:
        if self.raw is None:
            return
        torch.cuda.synchronize()
        self.raw = None
        if self._kept is not None:
            driver().call("cuMemRelease", self._kept)
            self._kept = None
        if self._is_reserved:
            driver().take_out(self._address, self._handle, self.size)
        else:
            driver().unmap(self._address, self.size, self._handle)
