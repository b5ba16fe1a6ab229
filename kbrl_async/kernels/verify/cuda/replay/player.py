"""The process that replays: confined like a candidate's, because it loads machine code that candidates wrote, and
trusted, because none of their host code ever runs in it.

::

    confine ─▶ allocator, CUDA context, a known kernel timed ─▶ seccomp on all threads ─▶ orders, for many candidates
    Map ─▶ Load ─▶ WarmUp ─▶ Run | Time … ─▶ Unload (the known kernel again)

A fault of the device ends it: its context is lost with that.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import torch

from kbrl_async.kernels.cuda_driver import CudaError, driver
from kbrl_async.kernels.sandbox import Isolation, gpu
from kbrl_async.kernels.verify import wire
from kbrl_async.kernels.verify.cpu import runner
from kbrl_async.kernels.verify.cuda.arena import BASE, WINDOW, DeviceArena
from kbrl_async.kernels.verify.cuda.capture import Flush
from kbrl_async.kernels.verify.cuda.replay import orders
from kbrl_async.kernels.verify.cuda.replay.images import Image
from kbrl_async.kernels.verify.cuda.replay.places import Places, install
from kbrl_async.kernels.verify.cuda.replay.program import Program
from kbrl_async.kernels.verify.cuda.replay.steps import Refused
from kbrl_async.kernels.verify.cuda.telling import device_failure, telling
from kbrl_async.kernels.verify.recording import Forward, Memcpy, Memset, Node, Recording, decode

_NUMBERS = 1 << 20
_WARM_BYTES = 2 << 20


def main(channel: socket.socket, payload: bytes, fds: list[int], isolation: Isolation) -> None:
    """Entry of the child; `payload` is its device."""
    runner.mute()
    torch.set_grad_enabled(False)
    device = torch.device(payload.decode())
    with telling(channel):
        places = Places(_allocate)
        install(places)
        torch.cuda.set_device(device)
        torch.cuda.synchronize()
        driver().reserve(WINDOW, BASE)  # before anybody else takes addresses there
        player = Player(channel, device, places)
        isolation = gpu.finish(isolation)
    channel.send(orders.encode(wire.Confined(isolation.level, isolation.missing)))
    player.serve()


def _allocate(size: int) -> int:
    try:
        return driver().allocate(size)
    except CudaError:
        return 0


class Player:
    """One at a time: an arena, and a program in it."""

    def __init__(self, channel: socket.socket, device: torch.device, places: Places) -> None:
        self._channel, self._device, self._places = channel, device, places
        self._driver = driver()
        self._flush = Flush(self._driver, device)
        self._arena: DeviceArena | None = None
        self._program: Program | None = None
        self._canary = Canary(device)
        with contextlib.suppress(CudaError, RuntimeError, Refused):
            self._warm_up()
        self._canary.sing()

    def _warm_up(self) -> None:
        """Before anybody waits: libraries and the driver load their code at its first use."""
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            one = torch.ones(64, 64, device=self._device, dtype=dtype)
            torch.addmm(one[0], one, one).relu_().mul_(2).softmax(-1).sum()
        self._arena = warm = DeviceArena.at_base(_WARM_BYTES, self._device)
        fills: list[Node] = [Memset(0, 1, 1, 256, 1, 256, []), Memcpy(512, 0, 256, [0])]
        plan = Recording([Forward(fills, ["T", 0], [])], [], _WARM_BYTES)
        program = Program(self._driver, self._flush, warm, self._places, [], plan)
        for is_muted in (False, True):
            program.run(0, is_muted)
            program.time((0,), is_muted)
        program.close()
        self._arena = None
        warm.close()

    def serve(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._channel, orders.MAX_MESSAGE, 1)
            if not data:
                return
            self._channel.send(orders.encode(self._answer(orders.decode_order(data), fds)))

    def _answer(self, order: orders.Order, fds: list[int]) -> orders.Answer:
        try:
            return self._do(order, fds)
        except Refused as refusal:
            return orders.CannotReplay(str(refusal)[:300])
        except Exception as error:
            if self._places.has_failed:
                return wire.Failed("out_of_memory", "an operator asks for more memory than the GPU has")
            return device_failure(error)

    def _do(self, order: orders.Order, fds: list[int]) -> orders.Answer:
        if isinstance(order, orders.MapArena):
            self._map(fds[0], order.size)
            return orders.RunDone()
        if isinstance(order, orders.LoadProgram):
            return self._load(order, fds[0])
        if isinstance(order, orders.Unload):
            return self._unload()
        program = self._program
        assert program is not None, "nothing is loaded"
        if isinstance(order, orders.WarmUp):
            program.warm_up(order.slot)
        elif isinstance(order, orders.RunForward):
            program.run(order.slot, order.is_muted, order.left_out)
        elif not order.times:
            program.prepare(order.slots, order.is_muted, order.left_out)
            return orders.Times(0.0, self._places.has_failed)
        else:
            times = (program.time(order.slots, order.is_muted, order.left_out) for _ in range(order.times))
            return orders.Times(sum(times) if order.slots else min(times), self._places.has_failed)
        return orders.RunDone(self._places.has_failed)

    def _map(self, fd: int, size: int) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        self._arena = DeviceArena.received(fd, size, self._device, BASE, is_reserved=True)

    def _load(self, order: orders.LoadProgram, fd: int) -> orders.Loaded:
        with open(fd, "rb") as file:
            images = [Image(digest, [file.read(size) for size in sizes]) for digest, sizes in order.images]
            plan: Recording = decode(file.read(order.plan))
        assert self._arena is not None, "there is no arena"
        self._places.has_failed = False
        try:
            self._program = Program(self._driver, self._flush, self._arena, self._places, images, plan)
        except Refused as refusal:
            return orders.Loaded(refused=str(refusal)[:300])
        return orders.Loaded(self._program.has_operators)

    def _unload(self) -> orders.Sung:
        if self._program is not None:
            self._program.close()
            self._program = None
        is_right, elapsed = self._canary.sing()
        return orders.Sung(is_right, elapsed, self._places.held)


class Canary:
    """A known kernel with a known answer, which takes a known time."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.arange(_NUMBERS, device=device, dtype=torch.int64)
        self._events: Any = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call, unused-ignore]

    def sing(self) -> tuple[bool, float]:
        """Whether its answer is right, and its nanoseconds."""
        begin, end = self._events
        begin.record()
        found = (self._numbers * 3 + 1).sum()
        end.record()
        torch.cuda.synchronize()
        is_right = int(found) == 3 * _NUMBERS * (_NUMBERS - 1) // 2 + _NUMBERS
        return is_right, float(begin.elapsed_time(end)) * 1e6
