"""A launch plan as a module: buffers allocated, kernels loaded, steps launched, in the child that runs it.

What depends on shapes is worked out once per combination of shapes; a call then allocates and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from kbrl_async.kernels.backends.c.launch import c_kernel
from kbrl_async.kernels.backends.launch import expressions
from kbrl_async.kernels.backends.launch.plan import (
    PARAMETER,
    Buffer,
    Plan,
    PlanError,
    PlanStep,
    Term,
    is_plan,
    read,
    term_of,
)
from kbrl_async.kernels.backends.nvrtc.launch import cuda_kernel

MAX_BYTES = 1 << 36
_MAX_SHAPES = 64


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
                known[name] = term_of(term, plan)(known)
            buffers = [(name, *self._buffer(buffer, known)) for name, buffer in plan.buffers.items()]
            steps = [self._step(step, known) for step in plan.steps]
        except expressions.ExpressionError as error:
            raise PlanError(str(error)) from error
        self._ready[key] = _Ready(buffers, steps)
        return self._ready[key]

    def _buffer(self, buffer: Buffer, known: Mapping[str, Any]) -> tuple[tuple[int, ...], torch.dtype, bool]:
        shape = self._sizes(buffer.shape, known, "a buffer's shape")
        dtype = getattr(torch, buffer.dtype)
        bytes_ = dtype.itemsize
        for size in shape:
            bytes_ *= size
        if bytes_ > MAX_BYTES:
            raise PlanError(f"a buffer of {bytes_} bytes")
        return shape, dtype, buffer.zero

    def _step(
        self, step: PlanStep, known: Mapping[str, Any]
    ) -> tuple[Callable[..., None], list[str | None], list[Any]]:
        plan, kernel = self._plan, self._kernels[step.kernel]
        tensors: list[str | None] = []
        values: list[Any] = []
        for term in step.args:
            is_weight = isinstance(term, str) and term.startswith(PARAMETER)
            if is_weight and term not in self._weights:
                raise PlanError(f"the reference has no parameter {str(term).removeprefix(PARAMETER)!r}")
            is_tensor = is_weight or term in plan.buffers or isinstance(known.get(str(term)), torch.Tensor)
            tensors.append(str(term) if is_tensor else None)
            values.append(None if is_tensor else term_of(term, plan)(known))
        if not plan.is_cuda:
            return kernel, tensors, values
        shared = self._sizes([step.shared], known, "shared memory")[0]
        grid, block = self._sizes(step.grid, known, "a grid"), self._sizes(step.block, known, "a block")
        return kernel[grid, block, shared], tensors, values

    def _sizes(self, terms: list[Term], known: Mapping[str, Any], what: str) -> tuple[int, ...]:
        sizes = [term_of(term, self._plan)(known) for term in terms]
        if not all(isinstance(size, (int, float)) and size >= 0 and size == int(size) for size in sizes):
            raise PlanError(f"{what} must be whole numbers, not {sizes}")
        return tuple(int(size) for size in sizes)


class LoadedPlan:
    """What a runner takes for a candidate's module."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def ModelNew(self, *args: Any) -> PlanModule:  # noqa: N802 - the contract's name
        return PlanModule(self._plan, *args)


def load(source: str) -> LoadedPlan | None:
    """The candidate as a module without executing it; None where it is no launch plan."""
    return LoadedPlan(read(source)) if is_plan(source) else None
