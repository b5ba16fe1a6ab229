"""Launch plans: a candidate that is data. Trusted code reads it here; `plan_module` loads its kernels, allocates its
buffers and launches its steps.

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
from collections.abc import Mapping
from typing import Any

import msgspec

from kbrl_async.kernels.backends.launch import expressions

NAME = "PLAN"
PARAMETER = "param:"
MAX_STEPS = 256
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool")
Term = str | int | float


class PlanError(ValueError):
    """A plan that can't be run; says which part of it."""


class PlannedKernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


class PlanStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kernel: str
    args: list[Term]
    """Names of inputs and buffers, `param:NAME` for a weight of the reference, else expressions."""
    grid: list[Term] = msgspec.field(default_factory=lambda: [1])
    block: list[Term] = msgspec.field(default_factory=lambda: [256])
    """Both for CUDA only."""
    shared: Term = 0


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    inputs: list[str]
    kernels: dict[str, PlannedKernel]
    steps: list[PlanStep]
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
            term_of(term, plan)
    for term in (*plan.sizes.values(), *(size for buffer in plan.buffers.values() for size in buffer.shape)):
        term_of(term, plan)


def term_of(term: Term, plan: Plan) -> expressions.Evaluate:
    """What a term that stands for a number evaluates to; a tensor's name passes unread."""
    if isinstance(term, (int, float)):
        return lambda names: term
    if term.startswith(PARAMETER) or term in plan.buffers or term in plan.inputs:
        return lambda names: names[term]
    try:
        return expressions.parse(term)
    except expressions.ExpressionError as error:
        raise PlanError(str(error)) from error
