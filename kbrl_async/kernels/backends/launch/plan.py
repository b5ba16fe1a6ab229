"""Launch plans: a candidate that is data. Trusted code loads its kernels, allocates its buffers and launches its steps.

::

    PLAN = {
        "inputs": ["x"],                                             # forward's arguments, in order
        "sizes": {"rows": "x.shape[0]", "cols": "x.shape[1]"},
        "kernels": {"softmax": {"source": SOURCE}},                  # C, or CUDA with __global__
        "buffers": {"out": {"shape": ["rows", "cols"]}},
        "steps": [{"kernel": "softmax", "args": ["x", "out", "rows", "cols"], "grid": ["rows"], "block": [256]}],
        "outputs": ["out"],
    }

Invariants
* Nothing of a plan is executed by Python: literals are read from the syntax tree, expressions evaluated by us.
* No host code of the candidate runs. A CUDA plan's child so stays clean as long as its kernels do not fault.
* What depends on shapes is worked out once per combination of shapes; a call then allocates and launches.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from kbrl_async.kernels.backends.c.launch import c_kernel
from kbrl_async.kernels.backends.launch import expressions
from kbrl_async.kernels.backends.nvrtc.launch import cuda_kernel

NAME = "PLAN"
PARAMETER = "param:"
MAX_STEPS = 256
MAX_BYTES = 1 << 36
_MAX_SHAPES = 64
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool")
}
Term = str | int | float


class PlanError(ValueError):
    """A plan that can't be run; says which part of it."""


class Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    name: str = ""
    """In the source; empty: the name that the plan gives it."""
    options: tuple[str, ...] = ()
    """Of NVRTC, as `--use_fast_math`."""


class Buffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    shape: list[Term]
    dtype: str = "float32"
    zero: bool = False
    """Cleared before the steps; else its content is undefined."""


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kernel: str
    args: list[Term]
    """Names of inputs and buffers, `param:NAME` for a weight of the reference, else expressions."""
    grid: list[Term] = msgspec.field(default_factory=lambda: [1])
    block: list[Term] = msgspec.field(default_factory=lambda: [256])
    """Both for CUDA only."""
    shared: Term = 0


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    inputs: list[str]
    kernels: dict[str, Kernel]
    steps: list[Step]
    outputs: list[str]
    buffers: dict[str, Buffer] = {}
    init: list[str] = []
    """Names for the constructor's arguments, in order; numbers among them can be used in expressions."""
    sizes: dict[str, Term] = {}
    """Each may use the ones before it."""

    @property
    def is_cuda(self) -> bool:
        return any("__global__" in kernel.source for kernel in self.kernels.values())


def is_plan(source: str) -> bool:
    """Whether a candidate is a launch plan: it binds `PLAN` and defines no class. Executes nothing."""
    if NAME not in source:
        return False
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(_target(node) == NAME for node in body) and not any(isinstance(node, ast.ClassDef) for node in body)


def read(source: str) -> Plan:
    """Raises `PlanError` for whatever is not a plan that could run."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PlanError(f"Python syntax error: {error}") from error
    values: dict[str, Any] = {}
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        name = _target(node)
        if not name:
            raise PlanError(f"line {node.lineno}: a launch plan holds nothing but NAME = literal")
        assert isinstance(node, ast.Assign)
        values[name] = _literal(node.value, values)
    if NAME not in values:
        raise PlanError("the file binds no PLAN")
    try:
        plan = msgspec.convert(values[NAME], Plan, strict=True)
    except msgspec.ValidationError as error:
        raise PlanError(f"PLAN: {error}") from error
    _check(plan)
    return plan


def _target(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return ""


def _literal(node: ast.expr, values: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in values:
        return values[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(item, values) for item in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        pairs = zip(node.keys, node.values, strict=True)
        return {_literal(key, values): _literal(value, values) for key, value in pairs if key is not None}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand, values)
        if type(value) in (int, float):
            return -value
    raise PlanError(f"line {node.lineno}: `{ast.unparse(node)[:60]}` is no literal")


def _check(plan: Plan) -> None:
    if len(plan.steps) > MAX_STEPS or len(plan.buffers) > MAX_STEPS:
        raise PlanError(f"at most {MAX_STEPS} steps and as many buffers")
    names = [*plan.inputs, *plan.init, *plan.sizes, *plan.buffers]
    for name in names:
        if not name.isidentifier() or names.count(name) > 1:
            raise PlanError(f"{name!r} is no name, or is given twice")
    if {"__global__" in kernel.source for kernel in plan.kernels.values()} == {True, False}:
        raise PlanError("kernels of C and of CUDA in one plan")
    for step in plan.steps:
        if step.kernel not in plan.kernels:
            raise PlanError(f"a step launches {step.kernel!r}, which is no kernel of the plan")
    for name in plan.outputs:
        if name not in plan.buffers and name not in plan.inputs:
            raise PlanError(f"output {name!r} is no buffer")
    for buffer in plan.buffers.values():
        if buffer.dtype not in _DTYPES:
            raise PlanError(f"buffers can't be {buffer.dtype!r}; there are {', '.join(_DTYPES)}")
    for step in plan.steps:
        for term in (*step.args, *step.grid, *step.block, step.shared):
            _term(term, plan)
    for term in (*plan.sizes.values(), *(size for buffer in plan.buffers.values() for size in buffer.shape)):
        _term(term, plan)


def _term(term: Term, plan: Plan) -> expressions.Evaluate:
    """What a term that stands for a number evaluates to; a tensor's name passes unread."""
    if isinstance(term, (int, float)):
        return lambda names: term
    if term.startswith(PARAMETER) or term in plan.buffers or term in plan.inputs:
        return lambda names: names[term]
    try:
        return expressions.parse(term)
    except expressions.ExpressionError as error:
        raise PlanError(str(error)) from error


class _Ready(msgspec.Struct):
    """A plan for one combination of shapes."""

    buffers: list[tuple[str, tuple[int, ...], torch.dtype, bool]]
    steps: list[tuple[Callable[..., None], list[str | None], list[Any]]]
    """What to call, and its arguments: by name where it is a tensor, else by value."""


class PlanModule(torch.nn.Module):
    """A plan as a module: `forward` does what its steps say."""

    def __init__(self, plan: Plan, *args: Any) -> None:
        super().__init__()
        if len(args) < len(plan.init):
            raise PlanError(f"the plan names {len(plan.init)} constructor arguments, there are {len(args)}")
        self._plan = plan
        self._init = dict(zip(plan.init, args, strict=False))
        self._weights: dict[str, torch.Tensor] = {}
        self._ready: dict[tuple[Any, ...], _Ready] = {}
        self._kernels: dict[str, Any] = {
            name: cuda_kernel(kernel.source, kernel.name or name, kernel.options)
            if plan.is_cuda
            else c_kernel(kernel.source, kernel.name or name)
            for name, kernel in plan.kernels.items()
        }

    def take_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """The reference's parameters and buffers by their names in its state dict."""
        self._weights = {PARAMETER + name: tensor for name, tensor in weights.items()}

    def forward(self, *given: Any) -> Any:
        plan = self._plan
        if len(given) != len(plan.inputs):
            raise PlanError(f"the plan names {len(plan.inputs)} inputs, forward got {len(given)}")
        names: dict[str, Any] = {
            name: item.contiguous() if isinstance(item, torch.Tensor) else item
            for name, item in zip(plan.inputs, given, strict=True)
        }
        names.update(self._weights)
        key = tuple(tuple(item.shape) if isinstance(item, torch.Tensor) else item for item in given)
        ready = self._ready.get(key) or self._prepare(key, names)
        device = next((item.device for item in names.values() if isinstance(item, torch.Tensor)), None)
        for name, shape, dtype, zero in ready.buffers:
            make = torch.zeros if zero else torch.empty
            names[name] = make(shape, dtype=dtype, device=device)
        for call, tensors, values in ready.steps:
            call(*(values[i] if name is None else names[name] for i, name in enumerate(tensors)))
        outputs = [names[name] for name in plan.outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _prepare(self, key: tuple[Any, ...], names: Mapping[str, Any]) -> _Ready:
        if len(self._ready) >= _MAX_SHAPES:
            self._ready.clear()
        plan, known = self._plan, {**self._init, **names}
        try:
            for name, term in plan.sizes.items():
                known[name] = _term(term, plan)(known)
            buffers = [(name, *self._buffer(buffer, known)) for name, buffer in plan.buffers.items()]
            steps = [self._step(step, known) for step in plan.steps]
        except expressions.ExpressionError as error:
            raise PlanError(str(error)) from error
        self._ready[key] = _Ready(buffers, steps)
        return self._ready[key]

    def _buffer(self, buffer: Buffer, known: Mapping[str, Any]) -> tuple[tuple[int, ...], torch.dtype, bool]:
        shape = self._sizes(buffer.shape, known, "a buffer's shape")
        dtype = _DTYPES[buffer.dtype]
        bytes_ = dtype.itemsize
        for size in shape:
            bytes_ *= size
        if bytes_ > MAX_BYTES:
            raise PlanError(f"a buffer of {bytes_} bytes")
        return shape, dtype, buffer.zero

    def _step(self, step: Step, known: Mapping[str, Any]) -> tuple[Callable[..., None], list[str | None], list[Any]]:
        plan, kernel = self._plan, self._kernels[step.kernel]
        tensors: list[str | None] = []
        values: list[Any] = []
        for term in step.args:
            is_weight = isinstance(term, str) and term.startswith(PARAMETER)
            if is_weight and term not in self._weights:
                raise PlanError(f"the reference has no parameter {str(term).removeprefix(PARAMETER)!r}")
            is_tensor = is_weight or term in plan.buffers or isinstance(known.get(str(term)), torch.Tensor)
            tensors.append(str(term) if is_tensor else None)
            values.append(None if is_tensor else _term(term, plan)(known))
        if not plan.is_cuda:
            return kernel, tensors, values
        shared = self._sizes([step.shared], known, "shared memory")[0]
        grid, block = self._sizes(step.grid, known, "a grid"), self._sizes(step.block, known, "a block")
        return kernel[grid, block, shared], tensors, values

    def _sizes(self, terms: list[Term], known: Mapping[str, Any], what: str) -> tuple[int, ...]:
        sizes = [_term(term, self._plan)(known) for term in terms]
        if not all(isinstance(size, (int, float)) and size >= 0 and size == int(size) for size in sizes):
            raise PlanError(f"{what} must be whole numbers, not {sizes}")
        return tuple(int(size) for size in sizes)


class Loaded:
    """What a runner takes for a candidate's module."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def ModelNew(self, *args: Any) -> PlanModule:  # noqa: N802 - the contract's name
        return PlanModule(self._plan, *args)


def load(source: str) -> Loaded | None:
    """The candidate as a module without executing it; None where it is no launch plan."""
    return Loaded(read(source)) if is_plan(source) else None
