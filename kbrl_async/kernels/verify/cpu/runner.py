"""The code that a confined child runs: build the model, then answer orders. Reference and candidate run the same.

Nothing here is trusted once the source has run: the bench reads outputs itself and believes only what it reads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import tempfile
import traceback
from typing import Any

import msgspec
import torch

from kbrl_async.kernels.backends import prepare
from kbrl_async.kernels.backends.c import launch
from kbrl_async.kernels.backends.launch import plan_module as plan
from kbrl_async.kernels.problems import model_contract as contract
from kbrl_async.kernels.sandbox import Isolation
from kbrl_async.kernels.verify import configs, lowering, values, wire
from kbrl_async.kernels.verify.cpu import program, tape, trace
from kbrl_async.kernels.verify.cpu.shadow import ShadowWatch
from kbrl_async.kernels.verify.layouts import Holding
from kbrl_async.kernels.verify.memory import content_of
from kbrl_async.kernels.verify.replies import Malformed

_FILE = "candidate.py"
_M_PERTURB = -6
_POISON = 0x80  # fresh memory is filled with 0x7F bytes: 3.4e38 as float32, never a plausible value
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_libc = ctypes.CDLL(None)
# An allocator that adapts to its history made the same code 20 % slower in a fresh process than in an old
# one: up to 32 MB come from a heap that is never trimmed, in every child alike.
_libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
_libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
torch.set_num_threads(1)
_ = torch.ones(8, 8) @ torch.ones(8, 8)  # loads what the first product loads, before any fork


def main(channel: socket.socket, payload: bytes, fds: list[int], isolation: Isolation) -> None:
    """Entry of the child. `fds`: the weights file, and for a reference a file for drawn inputs."""
    mute()
    channel.send(wire.encode(wire.Confined(isolation.level, isolation.missing)))
    setup = wire.decode_setup(payload)
    try:
        runner = Runner(channel, setup, fds)
    except BaseException as error:
        channel.send(wire.encode(failure(error)))
        return
    runner.serve()


def mute() -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


class Runner:
    """`cuda_runner` has the one for a GPU."""

    device = "cpu"
    sizes: frozenset[int] = frozenset()
    """Of its answers' tensors, by elements: without its own kernels a call may give none."""
    is_over = False
    """It was told to serve no more; its process may go on."""

    def __init__(self, channel: socket.socket, setup: wire.Setup, fds: list[int]) -> None:
        torch.set_grad_enabled(False)
        self.channel, self.fds, self.seed = channel, fds, setup.seed
        self.slots: list[list[Any]] = []
        self.held: list[Any] = [None, None]
        self.last: Any = None
        self.copy_to = -1
        self.arena: mmap.mmap | None = None
        self.double: torch.nn.Module | None = None
        if setup.artifacts:
            prepare(setup.backend, setup.artifacts, self.device)
            trace.bind()
        self.module: Any = plan.load(setup.source) or contract.load(
            "candidate", setup.source, folder=os.environ.get("TMPDIR", "")
        )
        contract.seed(setup.seed)
        init = self._init(setup)
        args, kwargs = contract.arguments(init)
        contract.seed(setup.seed)
        self.model = self._construct(getattr(self.module, setup.entry), args, kwargs)
        self._take_weights(setup)
        self._tell_ready(setup, init)

    def _tell_ready(self, setup: wire.Setup, init: Any) -> None:
        self.channel.send(wire.encode(self._ready(setup, init)))

    def _construct(self, model: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.nn.Module:
        made: torch.nn.Module = model(*args, **kwargs)
        return made

    def _init(self, setup: wire.Setup) -> Any:
        if setup.init is None:
            return self.module.get_init_inputs()
        return configs.unpacked(values.restore(setup.init, self._read(setup.init_tensors)))

    def _read(self, metas: list[wire.TensorMeta]) -> list[torch.Tensor]:
        if not metas:
            return []
        data = content_of(self.fds[0])
        return [values.view(data, meta) for meta in metas]

    def _take_weights(self, setup: wire.Setup) -> None:
        given = dict(zip((name for name, _ in setup.weights), self._read([m for _, m in setup.weights]), strict=True))
        if isinstance(self.model, torch.nn.Module):
            _take_formats(self.model, given)
        own = self.model.state_dict() if isinstance(self.model, torch.nn.Module) else {}
        if isinstance(self.model, plan.PlanModule):
            self.model.take_weights({name: tensor.clone() for name, tensor in given.items()})
        for name, tensor in own.items():
            if name in given and given[name].shape == tensor.shape:
                tensor.copy_(given[name])

    def _ready(self, setup: wire.Setup, init: Any) -> wire.Ready:
        if setup.init is not None:
            return wire.Ready()
        tensors: list[torch.Tensor] = []
        tree = values.flatten(configs.packed(init), tensors)
        state = self.model.state_dict()
        metas = values.save(self.fds[0], [*tensors, *state.values()])
        weights = list(zip(state, metas[len(tensors) :], strict=True))
        return wire.Ready(tree, metas[: len(tensors)], weights)

    def serve(self) -> None:
        while not self.is_over:
            data, fds, _, _ = socket.recv_fds(self.channel, wire.MAX_REPLY, 1)
            if not data:
                return
            try:
                if len(data) == wire.GO.size:
                    self._go(*wire.GO.unpack(data))
                else:
                    self._order(wire.decode_order(data), fds)
            except BaseException as error:
                self.channel.send(wire.encode(self.failure(error)))

    def failure(self, error: BaseException) -> wire.Failed:
        return failure(error)

    def _go(self, op: int, slot: int, nonce: int) -> None:
        if op in (wire.OP_POISON_ON, wire.OP_POISON_OFF):
            _libc.mallopt(_M_PERTURB, _POISON if op == wire.OP_POISON_ON else 0)
            self.channel.send(wire.encode(wire.Done(nonce, ["V", None], [])))
            return
        found: wire.Trace | None = None
        if op == wire.OP_RUN:
            self.held[0], self.held[1] = self.held[1], self.last
            self.last = None
            self.last = self.model(*self.slots[slot])
        elif op == wire.OP_BURST:
            self.last = None
            self.last = [self.model(*inputs) for inputs in self.slots]
        elif op == wire.OP_DOUBLE:
            self.last = self._double(slot)
        elif op >= wire.OP_LOWERED:
            self.last = None
            self.last = lowering.lowered(lambda: self.model(*self.slots[slot]), op - wire.OP_LOWERED)
        elif op in (wire.OP_TRACE, wire.OP_MUTED):
            self.held[0], self.held[1] = self.held[1], self.last
            self.last = None
            self.last, found = self._traced(slot, op == wire.OP_MUTED)
        elif op == wire.OP_SHADOWED:
            self.last, found = None, self._shadowed(slot)
        elif op == wire.OP_RECORD:
            self.channel.send(wire.encode(self._recorded(slot, nonce)))
            return
        told = self._of_memory()
        tensors: list[torch.Tensor] = []
        tree = values.flatten(self.held[1] if op == wire.OP_HELD else self.last, tensors)
        self.channel.send(wire.encode(wire.Done(nonce, tree, self._places(tensors), found, *told)))

    def _of_memory(self) -> tuple[int, bool]:
        """Of the call that just ended: see `wire.Done`."""
        return 0, False

    def _traced(self, slot: int, muted: bool) -> tuple[Any, wire.Trace]:
        """One recorded run; after a muted one an ordinary run on the same inputs, to know what the answer was. What
        fails without own kernels has told all the same of what the library had made by then.
        """
        given = self.slots[slot]
        if not muted:
            return trace.recorded(lambda: self.model(*given))
        inputs = _tensors(given)
        saved = [tensor.clone() for tensor in inputs]
        self.sizes = self.sizes.union(tensor.numel() for tensor in _tensors(self.held[1]))
        watch = trace.OperatorWatch(self.sizes, saved, inputs)
        failed: Exception | None = None
        try:
            result, found = trace.recorded(lambda: self.model(*given), watch, muted=True)
        except Exception as error:
            result, found, failed = None, wire.Trace(ops=watch.ops), error
        outputs: list[torch.Tensor] = []
        tree = values.flatten(result, outputs)
        result = values.restore(tree, [tensor.clone() for tensor in outputs])  # an output may be an input
        _put_back(inputs, saved)
        found = trace.answered(found, watch, Holding(_tensors(self.model(*given)), saved))
        if failed is not None and not found.answered:
            raise failed
        return result, found

    def _shadowed(self, slot: int) -> wire.Trace:
        """Whether an operator makes the answer of what the library made alone. The call before it says what the answer
        is, one over other inputs what does not change.
        """
        constants = self._constants(slot - 1) if len(self.slots) > 1 else {}
        given = self.slots[slot]
        inputs = _tensors(given)
        saved = [tensor.clone() for tensor in inputs]
        answer = [tensor.clone() for tensor in _tensors(self.model(*given))]  # an output may be an input
        _put_back(inputs, saved)
        watch = ShadowWatch(answer, inputs, constants)
        found = trace.recorded(lambda: self.model(*given), watch)[1]
        return msgspec.structs.replace(found, answered=watch.answered)

    def _constants(self, slot: int) -> dict[int, torch.Tensor]:
        inputs = _tensors(self.slots[slot])
        saved = [tensor.clone() for tensor in inputs]
        watch = ShadowWatch([], inputs)
        trace.recorded(lambda: self.model(*self.slots[slot]), watch)
        _put_back(inputs, saved)
        return watch.constant()

    def _recorded(self, slot: int, nonce: int) -> wire.Taped:
        self.last, found = tape.record(lambda: self.model(*self.slots[slot]), _tensors(self.slots[slot]))
        if isinstance(found, str):
            return wire.Taped(nonce, refused=found[:400])
        data = program.encode(found)
        try:
            program.read(data, launch.registered())
        except Malformed as error:
            return wire.Taped(nonce, refused=f"{error}"[:400])
        if len(data) > wire.MAX_REPLY // 2:
            return wire.Taped(nonce, refused="forward has too many steps")
        return wire.Taped(nonce, data)

    def _places(self, tensors: list[torch.Tensor]) -> list[wire.TensorMeta]:
        if self.copy_to < 0:
            return [values.describe(tensor, tensor.data_ptr()) for tensor in tensors]
        metas, _ = values.layout([tensor.contiguous() for tensor in tensors], self.copy_to)
        for tensor, meta in zip(tensors, metas, strict=True):
            values.view(self.arena, meta).copy_(tensor)
        return metas

    def _double(self, slot: int) -> Any:
        if self.double is None:
            contract.seed(self.seed)
            init = self._init(wire.Setup("", "", 0))
            args, kwargs = contract.arguments(init)
            self.double = self._construct(type(self.model), args, kwargs)
            self.double.load_state_dict(self.model.state_dict())
            self.double.double()
        wide = [_widen(item) for item in self.slots[slot]]
        return self.double(*wide)

    def _order(self, order: wire.Order, fds: list[int]) -> None:
        if isinstance(order, wire.Draw):
            made = contract.inputs(self.module, order.inputs, order.seed)
            tensors: list[torch.Tensor] = []
            tree = values.flatten(made, tensors)
            self.channel.send(wire.encode(wire.Drawn(tree, values.save(self.fds[1], tensors))))
            return
        assert isinstance(order, wire.Attach), "the other orders are for a GPU"
        self.arena = mmap.mmap(fds[0], order.size)
        os.close(fds[0])
        self.copy_to = order.copy_to
        self.slots = []
        for metas in order.slots:
            self.slots.append(values.restore(order.tree, [values.view(self.arena, meta) for meta in metas]))
        self.channel.send(wire.encode(wire.Ready()))


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    values.flatten(value, found)
    return found


def _put_back(tensors: list[torch.Tensor], saved: list[torch.Tensor]) -> None:
    for tensor, before in zip(tensors, saved, strict=True):
        tensor.copy_(before)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value.clone()
    if isinstance(value, (list, tuple)):
        return type(value)(_widen(item) for item in value)
    return value


def _take_formats(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> None:
    """Where the reference keeps a weight in half precision, so does a module that was built in fp32, as if cast."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype is torch.float32 and name in given and given[name].dtype in (torch.float16, torch.bfloat16):
            tensor.data = tensor.data.to(given[name].dtype)


def failure(error: BaseException) -> wire.Failed:
    text = str(error)
    out_of_memory = isinstance(error, MemoryError) or "can't allocate memory" in text or "not enough memory" in text
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == _FILE]
    where = "".join(f"line {frame.lineno}, in {frame.name}: {frame.line}\n" for frame in own[-3:]) + _beside(frames)
    kind: wire.FailureKind = "out_of_memory" if out_of_memory else "runtime_error"
    return wire.Failed(kind, f"{where}{type(error).__name__}: {text}"[:4000])


def _beside(frames: traceback.StackSummary) -> str:
    """The innermost line in a file that the candidate brings or has written: its own line only calls into that."""
    folder = os.path.join(str(tempfile.tempdir), "")  # its own, where it has one
    found = [frame for frame in frames if frame.filename.startswith(folder)]
    return "".join(
        f"{frame.filename.removeprefix(folder)}:{frame.lineno}, in {frame.name}: {frame.line}\n" for frame in found[-1:]
    )
