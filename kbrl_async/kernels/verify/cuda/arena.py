"""Device memory that two processes hold at once: allocated by the driver, handed over as a descriptor, seen as tensors.

::

    trusted process ── DeviceArena.new ── fd (SCM_RIGHTS) ──▶ child: DeviceArena.received      the same bytes for both

Legacy CUDA IPC handles need a shared pid namespace; these descriptors need nothing but the socket.

Where the device has no room for it, an arena lies in pinned memory of the host, which the device reads and writes by
its bus. It can be moved: the addresses stay, so that tensors and graphs over it hold, and only what is behind them is
other memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kbrl_async.errors import InfraError
from kbrl_async.kernels.cuda_driver import CudaError, driver
from kbrl_async.kernels.verify import values, wire
from kbrl_async.kernels.verify.hoarding import NoMemory
from kbrl_async.kernels.verify.options import Tick, no_tick

ALIGNMENT = 512
"""As torch's own allocator aligns: a kernel must not find worse pointers here than anywhere else."""
BASE = 0x300000000000
"""Address of the arena in recorders and replayers, so that what was recorded holds addresses that hold."""
WINDOW = 1 << 38
"""Addresses from `BASE` on that a process which maps one arena after the other keeps for them: once they are free, the
driver gives them to others."""
_PIECE = 256 << 20
"""Bytes that are copied at once: 5 ms over the bus."""
_LESS = "Give the bench more of the GPU (timing_bench.memory_share), or the host more memory"


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
        """Zeros: it may be memory in which something secret lay. Raises `CudaError` where there is none."""
        step = driver().granularity(device.index or 0)
        size = max(1, -(-size // step)) * step
        made = cls(driver().create(size, device.index or 0, is_on_host), size, device, is_on_host=is_on_host)
        try:
            made.raw.zero_()
            torch.cuda.synchronize()
        except BaseException:
            made.close()
            raise
        return made

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

    @property
    def host_bytes(self) -> int:
        return self.size if self.is_on_host or self._kept is not None else 0

    def move(
        self, to_host: bool, hand_over: Callable[[int], None] | None = None, after_a_piece: Tick = no_tick
    ) -> None:
        """Its bytes, to the host or back. `hand_over` gives whoever maps this, too, the descriptor of the new memory,
        in which none of these bytes is yet, and returns when it has let go of the old. Without it nobody else is told.
        `after_a_piece` is called when some more of them are there.

        :raises CudaError: the device has no memory for it. `NoMemory`: the host has none. Nothing has changed then.
        :raises InfraError: it went wrong when the other had taken the new memory, in which nothing is.
        """
        if self.is_on_host is to_host:
            return
        handle = self._kept if self._kept is not None and to_host else self._created(to_host)
        old = self._handle
        followed = list[int]()

        def handed_over(fd: int) -> None:
            assert hand_over is not None
            hand_over(fd)
            followed.append(fd)

        try:
            self._copied_to(handle, None if hand_over is None else handed_over, after_a_piece)
            self._put_behind(handle)
        except BaseException as error:
            if handle != self._kept:
                driver().call("cuMemRelease", handle)
            if followed and isinstance(error, (CudaError, RuntimeError)):  # it works in memory that is not this
                raise InfraError(f"memory of the GPU was lost when it was moved ({error})"[:300], _LESS) from error
            raise
        self._kept, self.is_on_host = None if to_host else old, to_host
        if to_host:
            self._wipe(old)

    def _wipe(self, handle: int) -> None:
        """What lies there is nobody's who gets the memory next."""
        try:
            with self._seen(handle) as raw:
                raw.zero_()
        finally:
            driver().call("cuMemRelease", handle)

    def _created(self, on_host: bool) -> int:
        index = self._device.index or 0
        try:
            return driver().create(self.size, index, on_host)
        except CudaError as error:
            if on_host:
                raise NoMemory(f"the host has no {self.size:,} bytes to pin ({error})", _LESS) from error
        torch.cuda.empty_cache()  # torch may have what the driver lacks
        return driver().create(self.size, index)

    def _copied_to(self, handle: int, hand_over: Callable[[int], None] | None, after_a_piece: Tick) -> None:
        with self._seen(handle) as raw:
            if hand_over is None:
                raw.copy_(self.raw)
                return
            raw.zero_()
            torch.cuda.synchronize()
            fd = driver().export_fd(handle)
            try:
                hand_over(fd)
            finally:
                os.close(fd)
            for begin in range(0, self.size, _PIECE):
                raw[begin : begin + _PIECE].copy_(self.raw[begin : begin + _PIECE])
                torch.cuda.synchronize()
                after_a_piece()

    @contextlib.contextmanager
    def _seen(self, handle: int) -> Iterator[Any]:
        """The bytes of other memory of this size; what was asked for is done when it ends."""
        there = driver().map(handle, self.size, self._device.index or 0)
        try:
            yield torch.as_tensor(_Raw(there, self.size), device=self._device)
            torch.cuda.synchronize()
        finally:
            driver().clear(there, self.size)

    def _put_behind(self, handle: int) -> None:
        """Where that fails, what was there is there again."""
        index = self._device.index or 0
        driver().call("cuMemUnmap", self._address, self.size)
        try:
            driver().fill_in(self._address, handle, self.size, index)
        except CudaError:
            driver().fill_in(self._address, self._handle, self.size, index)
            raise
        self._handle = handle

    def replace(self, fd: int | None) -> None:
        """By the memory that the other process moves it to; closes the descriptor. None: by none, for now."""
        torch.cuda.synchronize()
        if self._handle:
            driver().take_out(self._address, self._handle, self.size)
            self._handle = 0
        if fd is None:
            return
        try:
            handle = driver().import_fd(fd)
        finally:
            os.close(fd)
        driver().fill_in(self._address, handle, self.size, self._device.index or 0)
        self._handle = handle

    def let_go(self) -> None:
        """Of memory of the host that is kept for the next move."""
        if self._kept is not None:
            driver().call("cuMemRelease", self._kept)
            self._kept = None

    def view(self, meta: wire.TensorMeta) -> torch.Tensor:
        """Raises `ValueError` where `meta` reaches outside of this arena."""
        return values.view(self.raw, meta)

    def close(self) -> None:
        if self.raw is None:
            return
        torch.cuda.synchronize()
        self.raw = None
        self.let_go()
        if self._handle:
            driver().take_out(self._address, self._handle, self.size)
        if not self._is_reserved:
            driver().call("cuMemAddressFree", self._address, self.size)
