"""The recorder: a confined child that writes down one candidate's forward after the other.

::

    confine ─▶ allocator ─▶ CUDA context ─▶ seccomp ─▶ Map: the arena ─▶ Record: candidate ─▶ Recorded ─▶ Record …
    Record: constructor, weights ─▶ forward twice (tuning, lazy parts; a long one once, where the order is brief) ─▶
            image: what is alive ─▶ forward captured over each slot ─▶ read into a `Recording` ─▶ one graph launched
            here: is it what forward does? (not of a long one) ─▶ all dropped

Nothing that it writes is believed. What a candidate leaves behind in here can spoil the recording of a later one;
then it is recorded again by itself (see `session`). Here no fault is anybody's: what can't be recorded is judged
another way.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import os
import socket
import sys
import time
from typing import Any

import msgspec
import torch

from kbrl_async.kernels.backends.launch.uncompiled import leave_uncompiled
from kbrl_async.kernels.backends.nvrtc import launch as nvrtc
from kbrl_async.kernels.cuda_driver import CudaError, driver
from kbrl_async.kernels.sandbox import Isolation, gpu
from kbrl_async.kernels.verify import compare, recording, values, wire
from kbrl_async.kernels.verify.cpu import runner
from kbrl_async.kernels.verify.cuda import own_graphs
from kbrl_async.kernels.verify.cuda.arena import ALIGNMENT, BASE, WINDOW, DeviceArena
from kbrl_async.kernels.verify.cuda.capture import thread_stream
from kbrl_async.kernels.verify.cuda.record import allocator
from kbrl_async.kernels.verify.cuda.record.forward import Scribe, TorchForward, are_apart
from kbrl_async.kernels.verify.cuda.record.graph import Graphs, NotRecordable
from kbrl_async.kernels.verify.cuda.record.heap import Heap
from kbrl_async.kernels.verify.cuda.record.machine_code import MachineCode
from kbrl_async.kernels.verify.cuda.record.own_graphs import OwnGraphs
from kbrl_async.kernels.verify.cuda.runner import CudaRunner, MemoryUse
from kbrl_async.kernels.verify.cuda.telling import begin_gradients, telling
from kbrl_async.kernels.verify.memory import whole

MAX_BYTES = 12 << 20
"""Of a recording: a child's files end at 16 MiB."""
_MAX_FDS = 128
_FIRST_FD = 256
_POISON, _OTHER = 0x7F, 0x3C
_MAX_REASON = 400
_WARM_BYTES = 256 << 20
_LONG_S = 5e-3
"""A forward that takes so long is called no more often than it has to be, where the order is to be brief."""
_WARM = """
import torch

class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x):
        y = torch.relu(self.linear(x)) * 2 + x
        return torch.softmax(torch.matmul(y, x), -1) - y.sum(-1, keepdim=True)

def get_init_inputs():
    return []
"""


def main(channel: socket.socket, payload: bytes, fds: list[int], isolation: Isolation) -> None:
    """Entry of the child. `payload` is a device."""
    runner.mute()
    with telling(channel):
        leave_uncompiled()
        recorder = Recorder(channel, torch.device(payload.decode()))
        isolation = gpu.finish(isolation)
    channel.send(wire.encode(wire.Confined(isolation.level, isolation.missing)))
    recorder.serve()


class Recorder:
    def __init__(self, channel: socket.socket, device: torch.device) -> None:
        self._channel, self._device, self._heap = channel, device, Heap()
        self._arena: DeviceArena | None = None
        self._is_capturing = False
        self._own: OwnGraphs | None = None
        self._next_fd = _FIRST_FD
        allocator.install(self._heap, self._waits_for_device)
        torch.cuda.set_device(device)
        begin_gradients()
        self._driver = driver()
        self._driver.call("cuCtxSynchronize")
        self._driver.reserve(WINDOW, BASE)  # between two arenas, the driver would give the addresses to others
        self._stream = thread_stream()
        self._flags = _flags()
        with contextlib.suppress(CudaError, RuntimeError):
            self._warm_up()
        gc.freeze()

    def _warm_up(self) -> None:
        """A candidate of ours is recorded before anybody waits: the first one costs a second, because libraries and the
        driver load their code at its first use.
        """
        self._arena = warm = DeviceArena.at_base(_WARM_BYTES, self._device)
        setup = wire.Setup(_WARM, "ModelNew", 0, device=str(self._device))
        meta = wire.TensorMeta("float32", (64, 64), (64, 1), 0)
        metas = [msgspec.structs.replace(meta, place=slot * ALIGNMENT * 32) for slot in range(2)]
        self._recording(wire.RecordForward(setup, ["L", [["T", 0]]], [[one] for one in metas], 1 << 20), [])
        self._clean()
        self._heap.forget()
        self._arena = None
        warm.close()

    def _map(self, fd: int, size: int) -> None:
        if self._arena is not None:
            self._arena.close()
        self._arena = DeviceArena.received(fd, size, self._device, BASE, is_reserved=True)
        self._channel.send(wire.encode(wire.Ready()))

    def _waits_for_device(self) -> bool:
        return not self._is_capturing and not self._heap.is_pooled and self._driver.succeeds("cuCtxSynchronize")

    def serve(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._channel, wire.MAX_REPLY, _MAX_FDS)
            if not data:
                return
            data, fds = whole(data, fds)
            order = wire.decode_recorder_order(data)
            if isinstance(order, wire.Map):
                with telling(self._channel):
                    self._map(fds[0], order.size)
            elif not self._record(order, fds):
                return

    def _record(self, order: wire.RecordForward, fds: list[int]) -> bool:
        """Whether there can be a next one."""
        file, *rest = fds
        found = self._recording(order, rest)
        is_well = self._clean()
        content = wire.encode(found)
        if len(content) > MAX_BYTES:
            content = wire.encode(recording.Recording(refused=f"its recording takes {len(content)} bytes"))
        size = os.pwrite(file, content, 0)
        for fd in {file, *rest}:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._channel.send(wire.encode(wire.Recorded(size, self._heap.left_bytes, not is_well)))
        return is_well

    def _recording(self, order: wire.RecordForward, fds: list[int]) -> recording.Recording:
        try:
            with torch.cuda.stream(self._stream):
                return self._of(order, fds)
        except NotRecordable as refusal:
            return recording.Recording(refused=str(refusal)[:_MAX_REASON])
        except BaseException as error:
            return recording.Recording(refused=f"{room_lacked(self._heap)}{reason_of(error)}"[:_MAX_REASON])

    def _of(self, order: wire.RecordForward, fds: list[int]) -> recording.Recording:
        assert self._arena is not None, "the arena comes first"
        end = order.weights or self._arena.size
        self._heap.begin(BASE + order.start, BASE + end)
        self._fill(self._heap.empty, _POISON)  # what was there before is no part of what lasts: padding does
        weights = len(fds) - len(order.setup.artifacts)
        paths = dict(zip(order.setup.artifacts, map(self._path, fds[weights:]), strict=True))
        setup = msgspec.structs.replace(order.setup, artifacts=paths)
        arena = self._arena
        given = arena.raw[end:] if order.weights else None
        code = MachineCode(self._driver, list(paths.values()))
        scribe = Scribe(Graphs(self._driver), self._heap, BASE, arena.size, code)
        self._own = scribe.own
        own_graphs.install(scribe.own)
        candidate = _Candidate(self._channel, setup, fds[:weights], self._device, given)
        self._fill([(BASE + end, BASE + arena.size)], _POISON)
        candidate.slots = [values.restore(order.tree, [arena.view(meta) for meta in slot]) for slot in order.slots]
        return self._written(candidate, scribe, order)

    def _path(self, fd: int) -> str:
        """A name that no earlier artifact had: loaders know shared objects by their names."""
        self._next_fd += 1
        return f"/proc/self/fd/{fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, self._next_fd)}"

    def _written(self, candidate: _Candidate, scribe: Scribe, order: wire.RecordForward) -> recording.Recording:
        inputs: list[torch.Tensor] = []
        values.flatten(candidate.slots[0], inputs)
        given = [tensor.clone() for tensor in inputs]

        def called() -> list[torch.Tensor]:
            outputs = candidate.forward(0)
            self._driver.call("cuCtxSynchronize")
            return outputs

        def settle() -> None:
            _copy(given, inputs)
            self._settle()

        begun = time.perf_counter()
        expected = [tensor.clone() for tensor in called()]
        is_brief = order.is_brief and not scribe.own.count and time.perf_counter() - begun > _LONG_S
        settle()
        if scribe.own.count:
            for slot in range(1, len(candidate.slots)):
                candidate.forward(slot)  # some keep a graph for each address of an input
            settle()
        if not is_brief:  # into the same memory, so that what is captured lies in the same places either way
            self._fill(self._heap.free, _POISON)  # what forward does not write is the same where it is done again
            _copy(called(), expected)
            settle()
        ours = frozenset(tensor.data_ptr() for tensor in (*given, *expected))
        image = [(begin - BASE, end - BASE) for begin, end in self._heap.live(but=ours)]
        captured = self._captured(candidate, scribe)
        forwards = [scribe.write(one) for one in captured]
        used = self._heap.used - BASE
        lasting = [(0, order.start), *image]
        own = [
            tensor
            for tensor, meta in zip(captured[0].outputs, forwards[0].outputs, strict=True)
            if not any(begin <= meta.place < end for begin, end in lasting)
        ]
        is_same = is_brief or _does_the_same(captured[0], own, expected)
        if not is_same and not self._reads_what_nobody_wrote(candidate, expected):
            raise NotRecordable("a replay gives another result: it launches on a stream of its own, or acts by phase")
        return recording.Recording(forwards, image, used)

    def _reads_what_nobody_wrote(self, candidate: _Candidate, expected: list[torch.Tensor]) -> bool:
        """Whether plain calls differ, too, with other bytes in free memory, and others beside. Then a replay says what
        it is worth.
        """
        self._heap.part()
        self._fill(self._heap.empty, _OTHER)
        again = candidate.forward(0)
        self._driver.call("cuCtxSynchronize")
        return not all(map(compare.is_roughly, again, expected))

    def _fill(self, stretches: list[tuple[int, int]], value: int) -> None:
        assert self._arena is not None
        for begin, end in stretches:
            self._arena.raw[begin - BASE : end - BASE].fill_(value)

    def _captured(self, candidate: _Candidate, scribe: Scribe) -> list[TorchForward]:
        """Waiting for the device is left out: all that follows in a graph waits by itself."""
        binding: Any = torch._C
        waits, binding._cuda_synchronize = binding._cuda_synchronize, lambda: None
        self._is_capturing = True
        try:
            calls = [functools.partial(candidate.model, *slot) for slot in candidate.slots]
            scribe.learn(scribe.capture(calls[0]))
            captured = [scribe.capture(call) for call in calls]
            if are_apart(captured):
                return captured
            scribe.learn(None)
            del captured
            return [scribe.capture(call) for call in calls]
        finally:
            self._is_capturing = False
            binding._cuda_synchronize = waits

    def _settle(self) -> None:
        gc.collect()
        self._driver.call("cuCtxSynchronize")
        self._heap.settle()

    def _clean(self) -> bool:
        """Whatever a candidate has left where the next one would find it; False where that can't be."""
        sys.modules.pop("candidate", None)
        nvrtc.forget()
        if "triton" in sys.modules:
            sys.modules["triton"].set_allocator(_refuse_scratch)
        _reset(self._flags)
        try:
            if self._own is not None:
                self._own.close()
            gc.collect()
            gc.freeze()  # what libraries have made lately lasts: looked through each time, it costs 25 ms
            self._driver.call("cuCtxSynchronize")
            torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined, unused-ignore]
            self._driver.unload_modules()
        except (CudaError, RuntimeError):
            return False
        return True


class _Candidate(CudaRunner):
    """Built as the runner of a single candidate builds it; the recorder takes no orders for it."""

    def __init__(
        self, channel: socket.socket, setup: wire.Setup, fds: list[int], where: torch.device, weights: Any
    ) -> None:
        """`weights`: the bytes that they lie in; None: they come by descriptor."""
        self._weights = weights
        super().__init__(channel, setup, fds, where)
        self._weights = None

    def _memory(self, begins: bool = False) -> MemoryUse:
        """A recorder's allocator keeps no statistics: asked for them, torch raises."""
        return MemoryUse(0, 0, 0)

    def _read(self, metas: list[wire.TensorMeta]) -> list[torch.Tensor]:
        return super()._read(metas) if self._weights is None else [values.view(self._weights, meta) for meta in metas]

    def _tell_ready(self, setup: wire.Setup, init: Any) -> None:
        """Nobody waits for that."""

    def forward(self, slot: int) -> list[torch.Tensor]:
        return self._forward(slot)


def _refuse_scratch(size: int, alignment: int, stream: int | None) -> Any:
    """Until a candidate says where Triton's kernels find memory for their descriptors."""
    raise RuntimeError("this kernel needs memory while it runs: call triton.set_allocator")


def room_lacked(heap: Heap) -> str:
    """That there was no room for a block, before what came of it: torch, cuDNN and kernels go on with a null pointer,
    and fail in many ways. Empty where there was.
    """
    return f"{recording.NO_ROOM} (a block of {heap.lacked / 2**30:.2f} GiB): " if heap.lacked else ""


def reason_of(error: BaseException) -> str:
    """In one line; the driver's advice left out."""
    first = next(iter(str(error).strip().splitlines()), "")
    if "prepare for replay" in str(error):
        return "it replays a CUDA graph of its own by other ways than torch.cuda.CUDAGraph"
    if "captur" in str(error).lower():
        first = f"it waits for the device, reads from it, or launches where no graph sees it ({first})"
    return f"{type(error).__name__}: {first}"[:_MAX_REASON]


def _copy(tensors: list[torch.Tensor], to: list[torch.Tensor]) -> None:
    """In a function of its own: a name that still stands for one of them would keep its memory."""
    for tensor, place in zip(tensors, to, strict=True):
        place.copy_(tensor)


def _does_the_same(captured: TorchForward, own: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """The graph, launched here, must do what forward does: what was launched beside the capture is no part of it.
    `own`: those of its outputs that are neither inputs nor last from call to call.
    """
    for tensor in own:
        values.fill_bytes(tensor, _POISON)
    captured.graph.replay()
    driver().call("cuCtxSynchronize")
    return all(map(compare.is_roughly, captured.outputs, expected))


def _flags() -> tuple[Any, ...]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        matmul.allow_tf32,
        cudnn.allow_tf32,
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.get_default_dtype(),
        dict(os.environ),
    )


def _reset(flags: tuple[Any, ...]) -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.enabled, cudnn.benchmark, cudnn.deterministic = flags[:5]
    torch.set_default_dtype(flags[5])
    torch.set_grad_enabled(False)
    os.environ.clear()
    os.environ.update(flags[6])
