"""The runner of a child on a GPU: the same orders as on a CPU, its inputs and outputs in device memory.

::

    confine ─▶ CUDA context (trusted code only) ─▶ seccomp on all threads ─▶ candidate ─▶ orders
    forward ─▶ wait for the whole device ─▶ copy outputs into the arena ─▶ wait ─▶ answer

Outputs are copied by the child, because nobody can read another process's device memory; the trusted side holds the
arena too, poisons it before each call and reads it while this process is frozen. Nothing said here is believed but
places inside that arena, and times that the trusted side's own clock bears out.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import re
import socket
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import torch

from kbrl_async.kernels.backends.launch import plan_module as plan
from kbrl_async.kernels.backends.launch.recorder import RECORDER
from kbrl_async.kernels.backends.launch.stand_ins import StandIns
from kbrl_async.kernels.backends.launch.uncompiled import leave_uncompiled
from kbrl_async.kernels.cuda_driver import driver
from kbrl_async.kernels.problems import model_contract as contract
from kbrl_async.kernels.sandbox import Isolation, gpu
from kbrl_async.kernels.verify import configs, replies, values, wire
from kbrl_async.kernels.verify.cpu import runner, trace
from kbrl_async.kernels.verify.cuda import drawing, own_graphs
from kbrl_async.kernels.verify.cuda.arena import ALIGNMENT, DeviceArena
from kbrl_async.kernels.verify.cuda.capture import CapturedForwards, Flush, tensors_kept_by
from kbrl_async.kernels.verify.cuda.telling import begin_gradients, device_failure, telling
from kbrl_async.kernels.verify.known import size_of
from kbrl_async.kernels.verify.memory import whole

_MAX_FDS = 128
LARGE_BYTES = 256 << 20
"""Inputs of fewer are planned with once they are drawn."""
_NEEDS_MEMORY = re.compile(r"\b(triton|load_inline|cpp_extension|cupy|ctypes|data_ptr|custom_op|library|set_\w+)\b")
_AHEAD = 8
"""Flushes before an ordinary forward: some 0.3 ms in which its Python gets ahead of the GPU."""
_LARGE_PROBLEM = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1 << 20, 2)

    def forward(self, x):
        return torch.relu(self.linear(x))

def get_inputs():
    return [torch.randn(256, 1 << 20)]

def get_init_inputs():
    return []
"""


def main(channel: socket.socket, payload: bytes, fds: list[int], isolation: Isolation) -> None:
    """Entry of the child. `payload` is a device, and orders come later (see `prewarmed`), or it is the orders; `fds`:
    the arena of weights, where there are any.
    """
    runner.mute()
    setup = None if payload.startswith(b"cuda") else wire.decode_setup(payload)
    device = torch.device(payload.decode() if setup is None else setup.device)
    with telling(channel):
        own_graphs.install(own_graphs.CountedGraphs())
        leave_uncompiled()
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        begin_gradients()
        torch.cuda.synchronize()
        if setup is None:
            _warm_up(device)
        isolation = gpu.finish(isolation)
    while True:
        channel.send(wire.encode(wire.Confined(isolation.level, isolation.missing)))
        if setup is None:
            setup, fds = await_orders(channel)
        try:
            made = CudaRunner(channel, setup, fds, device)
        except BaseException as error:
            channel.send(wire.encode(device_failure(error)))
            return
        made.serve()
        if not made.is_over:
            return
        made.drop()
        setup = None
        del made
        _forget()


def _warm_up(device: torch.device) -> None:
    """Before anybody waits: libraries and the driver load their code at its first use."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        one = torch.randn(64, 64, device=device).to(dtype)
        (torch.addmm(one[0], one, one).relu() * 2).softmax(-1).sum().item()
    _forget()


def _forget() -> None:
    """Of a reference, before the next one comes."""
    sys.modules.pop("candidate", None)
    gc.collect()
    gc.freeze()  # what libraries have made lasts: looked through each time, it costs 25 ms
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined, unused-ignore]
    torch.cuda.empty_cache()


def await_orders(channel: socket.socket) -> tuple[wire.Setup, list[int]]:
    """Setup, and the descriptor of the weights; artifacts become paths of files in memory."""
    data, fds, _, _ = socket.recv_fds(channel, wire.MAX_REPLY, _MAX_FDS)
    if not data:
        os._exit(0)
    data, fds = whole(data, fds)
    setup = wire.decode_setup(data)
    weights = len(fds) - len(setup.artifacts)
    paths = {key: f"/proc/self/fd/{fd}" for key, fd in zip(setup.artifacts, fds[weights:], strict=True)}
    return msgspec.structs.replace(setup, artifacts=paths), fds[:weights]


class CudaRunner(runner.Runner):
    device = "cuda"
    _poisons = _is_lean = False
    _stand_ins: StandIns | None = None
    """For own functions that are left out: of the last call that was recorded with them."""

    def __init__(self, channel: socket.socket, setup: wire.Setup, fds: list[int], where: torch.device) -> None:
        self._where, self._driver = where, driver()
        self._weights_bytes = setup.weights_bytes
        scratch = os.environ.get("TMPDIR", "")  # what is loaded last is what counts, so this comes first
        self._outline = outlined(setup.source, scratch) if setup.init is None else (0, 0)
        self._given: DeviceArena | None = None
        self._pending: list[torch.Tensor] = []
        self._shared: DeviceArena | None = None
        self._outs: list[list[wire.TensorMeta]] = []
        self._batch: CapturedForwards | None = None
        self._flush: Flush | None = None
        self._before = self._memory()
        self._events = self._driver.event(), self._driver.event()
        self._own_end = self._driver.event()
        super().__init__(channel, setup, fds)
        if self._given is not None:
            self._given.close()
            self._given = None

    def drop(self) -> None:
        """The arena, and whatever else holds memory of the device."""
        self._end_batch()
        self._flush, self._pending, self.slots, self.last, self.held = None, [], [], None, [None, None]
        self.double, self.model, self.module = None, torch.nn.Module(), None
        for event in (*self._events, self._own_end):
            self._driver.call("cuEventDestroy_v2", event)
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _end_batch(self) -> None:
        if self._batch is not None:
            self._batch.close()
            self._batch = None

    def _construct(self, model: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.nn.Module:
        """Straight on the GPU, because initialising large weights on a CPU takes seconds; on the CPU and moved, as
        KernelBench does it, where the code does not work that way.
        """
        state = torch.get_rng_state()
        try:
            with self._where:
                made = model(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, AssertionError):
            torch.set_rng_state(state)
            made = model(*args, **kwargs)
        return made.to(self._where) if isinstance(made, torch.nn.Module) else made

    def _init(self, setup: wire.Setup) -> Any:
        tensors: list[torch.Tensor] = []
        tree = values.flatten(configs.packed(super()._init(setup)), tensors)
        return configs.unpacked(values.restore(tree, [tensor.to(self._where, copy=True) for tensor in tensors]))

    def _read(self, metas: list[wire.TensorMeta]) -> list[torch.Tensor]:
        if not metas:
            return []
        if self._given is None:
            self._given = DeviceArena.received(self.fds.pop(0), self._weights_bytes, self._where)
        return [self._given.view(meta) for meta in metas]

    def _take_weights(self, setup: wire.Setup) -> None:
        super()._take_weights(setup)
        self._driver.call("cuCtxSynchronize")

    def _ready(self, setup: wire.Setup, init: Any) -> wire.Ready:
        if setup.init is not None:
            return wire.Ready()
        tensors: list[torch.Tensor] = []
        tree = values.flatten(configs.packed(init), tensors)
        state = self.model.state_dict()
        metas = self._describe([*tensors, *state.values()])
        weights = list(zip(state, metas[len(tensors) :], strict=True))
        return wire.Ready(tree, metas[: len(tensors)], weights, self._outline)

    def _describe(self, tensors: list[torch.Tensor]) -> list[wire.TensorMeta]:
        """What the next `Export` will copy."""
        self._pending = [values.dense(tensor.to(self._where)) for tensor in tensors]
        return values.layout(self._pending, 0, ALIGNMENT)[0]

    def failure(self, error: BaseException) -> wire.Failed:
        """A library that was refused memory may fail in words that say nothing of it."""
        failed, is_short = device_failure(error), False
        if failed.kind == "runtime_error":
            with contextlib.suppress(RuntimeError):  # the context may be lost
                is_short = self._memory().refusals > self._before.refusals
        return msgspec.structs.replace(failed, kind="out_of_memory") if is_short else failed

    def _memory(self, begins: bool = False) -> MemoryUse:
        return MemoryUse.now(begins)

    def _of_memory(self) -> tuple[int, bool]:
        now = self._memory()
        return max(0, now.most - self._before.allocated), now.refusals > self._before.refusals

    def _order(self, order: wire.Order, fds: list[int]) -> None:
        self._before = self._memory()
        if isinstance(order, wire.Draw):
            tensors: list[torch.Tensor] = []
            made = []
            places = self._lent_places() if order.is_lent else []
            if places:
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if places else 0
            for seed in (order.seed, *order.more):
                contract.seed(seed)
                with drawing.DrawnInPlace(places) if places else contextlib.nullcontext():
                    made.append(list(self._inputs()))
            tree = values.flatten(made if order.more else made[0], tensors)
            metas = self._describe(tensors)
            self._settle(places)
            beside = torch.cuda.max_memory_allocated() - before if places else 0
            self.channel.send(wire.encode(wire.Drawn(tree, metas, beside)))
        elif isinstance(order, wire.Export):
            given = DeviceArena.received(fds[0], order.size, self._where) if fds else None
            self._export(given, order.keeps_freed)
        elif isinstance(order, wire.Move):
            assert self._shared is not None, "what is moved was attached before"
            self._shared.replace(fds[0] if fds else None)
            self.channel.send(wire.encode(wire.Ready()))
        elif isinstance(order, wire.Mute):
            self._mute(order)
        elif isinstance(order, wire.Rest):
            self.is_over = True
        else:
            self._attach(order, fds[0] if fds else None)

    def _lent_places(self) -> list[torch.Tensor]:
        """The inputs of slot 0."""
        tensors: list[torch.Tensor] = []
        if self.slots:
            values.flatten(self.slots[0], tensors)
        return tensors

    def _settle(self, places: list[torch.Tensor]) -> None:
        """What lies in the arena at a place that is another's is copied before anything is written there."""
        if self._shared is not None and len(places) == len(self._pending):
            begin = self._shared.raw.data_ptr()
            self._pending = drawing.settled(self._pending, places, (begin, begin + self._shared.size))

    def _inputs(self) -> Any:
        try:
            with self._where:
                return self.module.get_inputs()
        except (RuntimeError, TypeError, ValueError):
            return self.module.get_inputs()

    def _export(self, given: DeviceArena | None, keeps_freed: bool = False) -> None:
        """None: into the arena that is there."""
        arena = given or self._shared
        assert arena is not None, "what is lent was attached before"
        metas, _ = values.layout(self._pending, 0, ALIGNMENT)
        for tensor, meta in zip(self._pending, metas, strict=True):
            place = arena.view(meta)
            if not drawing.is_there(tensor, place):
                place.copy_(tensor)
            del tensor, place  # the last of them would be in memory still when it is given back
        self._driver.call("cuCtxSynchronize")
        if given is not None:
            given.close()
        self._pending = []
        if not keeps_freed:
            torch.cuda.empty_cache()
        self.channel.send(wire.encode(wire.Ready()))

    def _attach(self, order: wire.Attach, fd: int | None) -> None:
        self._end_batch()
        self.slots, self.last, self.held = [], None, [None, None]
        if fd is not None:
            if self._shared is not None:
                self._shared.close()
            self._shared = DeviceArena.received(fd, order.size, self._where)
        assert self._shared is not None, "the first arena comes with its descriptor"
        self.copy_to, self._outs = order.copy_to, order.outs
        for metas in order.slots:
            self.slots.append(values.restore(order.tree, [self._shared.view(meta) for meta in metas]))
        self.channel.send(wire.encode(wire.Ready()))

    def _go(self, op: int, slot: int, nonce: int) -> None:
        if op in (wire.OP_POISON_ON, wire.OP_POISON_OFF):
            self._poisons, self._is_lean = op == wire.OP_POISON_ON, bool(slot)
        elif self._is_lean and op in (wire.OP_RUN, wire.OP_TRACE):
            assert self._shared is not None
            _poison_free(map(self._shared.view, self._outs[slot]))
        self._before = self._memory(begins=True)
        if op == wire.OP_CAPTURE:
            self.channel.send(wire.encode(self._captured(slot, nonce)))
        elif op == wire.OP_REPLAY:
            self.channel.send(wire.encode(self._replayed(slot, nonce)))
        elif op == wire.OP_EVENT:
            self.channel.send(wire.encode(self._event(slot, nonce)))
        elif op == wire.OP_EVENTS:
            elapsed = sum(self._ordinary(0)[0] for _ in range(slot))
            self.channel.send(wire.encode(wire.Timed(nonce, elapsed)))
        elif op == wire.OP_FREE:
            self._end_batch()
            self.double = None
            if not slot:
                self.last, self.held = None, [None, None]
            torch.cuda.empty_cache()
            self.channel.send(wire.encode(wire.Done(nonce, ["V", None], [])))
        else:
            super()._go(op, slot, nonce)

    def _places(self, tensors: list[torch.Tensor]) -> list[wire.TensorMeta]:
        """Copies of the outputs in the arena; only described where there is no room for them."""
        self._driver.call("cuCtxSynchronize")
        metas, end = values.layout([_contiguous(tensor) for tensor in tensors], max(0, self.copy_to), ALIGNMENT)
        if self.copy_to >= 0 and self._shared is not None and end <= self._shared.size:
            self._copy(tensors, metas)
        if self._poisons and not self._is_lean:
            _poison_free(tensor for tensor in tensors for _ in range(2) if tensor.is_cuda)
        return metas

    def _copy(self, tensors: list[torch.Tensor], metas: list[wire.TensorMeta]) -> None:
        assert self._shared is not None
        for tensor, meta in zip(tensors, metas, strict=True):
            self._shared.view(meta).copy_(tensor)
        self._driver.call("cuCtxSynchronize")

    def _traced(self, slot: int, muted: bool) -> tuple[Any, wire.Trace]:
        """The answer lies already where the outputs will be copied to, where it was asked for. What fails without own
        kernels has told all the same of what the library had made by then.
        """
        assert self._shared is not None
        inputs: list[torch.Tensor] = []
        values.flatten(self.slots[slot], inputs)
        answer = [self._shared.view(meta) for meta in self._outs[slot]]
        watch = trace.AnswerWatch(answer, inputs, only_inside=not muted)
        RECORDER.stand_ins = self._stand_ins_of(muted)
        try:
            result, found = trace.recorded(lambda: self.model(*self.slots[slot]), watch, muted)
        except Exception:
            if not (muted and watch.answered):
                raise
            result, found = None, wire.Trace(ops=watch.ops)
        finally:
            RECORDER.stand_ins = None
        return result, watch.found(found)

    def _stand_ins_of(self, muted: bool) -> StandIns:
        if not muted or self._stand_ins is None:
            self._stand_ins = StandIns(self._stand_ins)
        self._stand_ins.begin()
        return self._stand_ins

    def _forward(self, slot: int) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        values.flatten(self.model(*self.slots[slot]), tensors)
        return tensors

    def _captured(self, count: int, nonce: int) -> wire.Captured:
        self._end_batch()
        self.last, self.held = None, [None, None]
        try:
            kept = functools.partial(tensors_kept_by, self.model)
            self._batch = CapturedForwards(self._driver, self._the_flush, self._forward, count, kept)
        except Exception as error:  # Refused, or whatever forward raises when it is captured
            self._driver.call("cuCtxSynchronize")
            return wire.Captured(nonce, refused=f"{type(error).__name__}: {error}".splitlines()[0][:200])
        torch.cuda.empty_cache()  # the memory of earlier graphs, only now: these were to lie elsewhere
        if replies.too_many_names(self._batch.kernels):
            self._end_batch()
            return wire.Captured(nonce, refused="forward launches too many kernels")
        kernels = {name: len(nodes) for name, nodes in self._batch.kernels.items()}
        return wire.Captured(nonce, kernels, is_short=self._of_memory()[1])

    @property
    def _the_flush(self) -> Flush:
        if self._flush is None:
            self._flush = Flush(self._driver, self._where)
        return self._flush

    def _replayed(self, times: int, nonce: int) -> wire.Timed:
        assert self._batch is not None
        if times == 0:
            return wire.Timed(nonce, 0.0, self._batch.empty())
        elapsed = self._batch.replay(times)
        for outputs, metas in zip(self._batch.outputs, self._outs, strict=False):
            for tensor, meta in zip(outputs, metas, strict=True):
                assert self._shared is not None
                self._shared.view(meta).copy_(tensor)
        self._driver.call("cuCtxSynchronize")
        return wire.Timed(nonce, elapsed)

    def _event(self, slot: int, nonce: int) -> wire.Timed:
        """One ordinary forward over a slot, its Python and all."""
        (begin, end), call = self._events, self._driver.call
        stream = torch.cuda.current_stream().cuda_stream
        call("cuCtxResetPersistingL2Cache")
        self._the_flush.now(stream)
        call("cuEventRecord", begin, stream)
        self._driver.record_everywhere(end, stream)
        call("cuCtxSynchronize")
        empty = self._driver.elapsed_ns(begin, end)
        elapsed, outputs = self._ordinary(slot)
        self._copy(outputs, self._outs[slot])
        return wire.Timed(nonce, elapsed, empty, self._driver.elapsed_ns(self._events[0], self._own_end))

    def _ordinary(self, slot: int) -> tuple[float, list[torch.Tensor]]:
        (begin, end), call = self._events, self._driver.call
        stream = torch.cuda.current_stream().cuda_stream
        for _ in range(_AHEAD):
            self._the_flush.now(stream)
        call("cuEventRecord", begin, stream)
        outputs = self._forward(slot)
        call("cuEventRecord", self._own_end, stream)
        self._driver.record_everywhere(end, stream)
        call("cuCtxSynchronize")
        return self._driver.elapsed_ns(begin, end), outputs

    def _mute(self, order: wire.Mute) -> None:
        assert self._batch is not None
        whole, left = self._batch.without(order.kernels, lambda outputs: self._copy(outputs, self._outs[0]))
        self.channel.send(wire.encode(wire.Timed(order.nonce, whole, left)))


def _poison_free(outputs: Iterable[torch.Tensor]) -> None:
    """What torch hands out next, for outputs of these sizes, holds neither zeros nor an earlier answer."""
    fresh: list[torch.Tensor] = []
    with contextlib.suppress(torch.OutOfMemoryError):  # then there is no memory that could hold an earlier one
        fresh += (torch.empty_like(tensor) for tensor in outputs)
    for tensor in fresh:
        values.fill_bytes(tensor, 0x7F)


def outlined(source: str, folder: str = "") -> tuple[int, int]:
    """Bytes of a problem's inputs and outputs, by tensors without memory: of a module of its own, written to `folder`,
    because what that keeps, it keeps without memory. What needs values fails, and 0 is said then; so it is of the
    outputs of small inputs, and of problems that set defaults of torch, register operators or launch kernels.
    """
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    if _NEEDS_MEMORY.search(source):
        return 0, 0
    with contextlib.suppress(Exception), torch.device("meta"):
        module: Any = plan.load(source) or contract.load("outlined", source, folder=folder)
        given = list(module.get_inputs())
        values.flatten(given, inputs)
        if size_of(inputs) >= LARGE_BYTES and all(tensor.is_meta for tensor in inputs):
            args, kwargs = contract.arguments(module.get_init_inputs())
            values.flatten(module.Model(*args, **kwargs)(*given), outputs)
    sys.modules.pop("outlined", None)
    found = size_of(inputs), size_of(outputs)
    if not all(tensor.is_meta for tensor in (*inputs, *outputs)):
        inputs, outputs, given = [], [], []
        torch.cuda.empty_cache()
    return found


def preload() -> None:
    """Before any fork: what would cost every child .15 s, and every reference's process one to three seconds the first
    time that it computes without memory, for which torch imports much (sympy, its compiler). Asking whether there is a
    GPU would initialise CUDA, and no fork of a process that has done that can use it.
    """
    asked = torch.cuda.is_available
    code = asked.__code__
    asked.__code__ = (lambda: True).__code__  # the same object: what is imported may keep it
    try:
        importlib.import_module("torch.utils.cpp_extension")
        outlined(_LARGE_PROBLEM)
    finally:
        asked.__code__ = code


preload()


class MemoryUse(NamedTuple):
    """Of torch's allocator in this process, in bytes: now, and at most since that was last reset."""

    allocated: int
    most: int
    refusals: int
    """How often it found no memory so far, be it that somebody caught that."""

    @classmethod
    def now(cls, begins: bool = False) -> MemoryUse:
        """`begins`: the most is counted from here on."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call, unused-ignore]
            return cls(0, 0, 0)
        if begins:
            torch.cuda.reset_peak_memory_stats()
        stats = torch.cuda.memory_stats_as_nested_dict()
        bytes_used = stats["allocated_bytes"]["all"]
        return cls(bytes_used["current"], bytes_used["peak"], stats["num_ooms"])


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Only its shape and dtype are looked at."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
