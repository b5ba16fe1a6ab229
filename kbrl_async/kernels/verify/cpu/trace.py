"""Inside the confined child: what one run of `forward` consists of.

::

    recorded run   own launches (Recorder) │ ATen operators (dispatch mode), each with its CPU time
    muted run      own kernels off; does an ATen operator produce the answer all by itself?

Invariants
* Everything used here is bound before any candidate code exists, and looked at again afterwards (`tampered`).
* What a child tells is evidence, never proof: the trusted side compares the outputs of the muted run itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kbrl_async.kernels.backends.c import launch as c
from kbrl_async.kernels.backends.launch.recorder import RECORDER, LaunchCounter
from kbrl_async.kernels.verify.layouts import Holding, is_answer, is_moved
from kbrl_async.kernels.verify.operators import computes, copies
from kbrl_async.kernels.verify.proof import IN_PLACE
from kbrl_async.kernels.verify.wire import Trace

_now = time.thread_time_ns
_is_tensor, _as_tensor = torch.is_tensor, torch.as_tensor
_is_captured = torch.cuda.is_current_stream_capturing
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_binding: Any = torch._C
_in_python = torch.library._impls
"""Operator and dispatch key of each function that Python has registered."""
_DEVICES = ("CPU", "CUDA")
_KEPT, _MOVED = 8, 2
BEFORE = "what was there before an own kernel ran"
UNMADE = "what the library is given"
_LIBRARY = ("aten::", "prim::", "prims::")
"""Namespaces of the library's operators; any other was registered by the candidate, in its extension or in Python."""
_GUARDED: list[tuple[object, str]] = [
    *((time, name) for name in ("time", "perf_counter", "perf_counter_ns", "monotonic", "thread_time_ns")),
    *((torch, name) for name in ("empty", "empty_like", "zeros", "equal", "allclose", "rand", "randn")),
    (torch.cuda, "synchronize"),
    (torch.cuda, "Event"),
    (LaunchCounter, "call"),
    (LaunchCounter, "proven"),
    (c.CKernel, "__call__"),
    (c, "RECORDER"),
    (ctypes, "CDLL"),
]


def _identities() -> list[object]:
    return [getattr(owner, name, None) for owner, name in _GUARDED]


_ORIGINAL = _identities()


def bind() -> None:
    """Whatever a backend has prepared in this process by now is how it ought to be; no candidate was here yet."""
    _ORIGINAL[:] = _identities()


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own hook is not typed
    """Counts operators, and keeps some results of the given numbers of elements: one may be the answer already."""

    def __init__(
        self, sizes: Collection[int], inputs: Sequence[torch.Tensor] = (), given: Sequence[torch.Tensor] = ()
    ) -> None:
        """`given`: where forward finds its inputs and may change them, if `inputs` are copies."""
        super().__init__()  # type: ignore[no-untyped-call] # torch's is not typed
        self._inputs = inputs
        self._places = {tensor.data_ptr() for tensor in inputs}
        self._changing = {tensor.data_ptr() for tensor in given}
        self.ops: dict[str, tuple[int, int]] = {}
        self.inside: dict[str, tuple[int, int]] = {}
        self.kept: list[tuple[str, torch.Tensor]] = []
        self.moved: list[tuple[str, torch.Tensor]] = []
        """The last copies that the library made."""
        self._sizes = sizes
        self._is_looking = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the method below, and its first call imports the whole compiler

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_looking:
            return function(*args, **(kwargs or {}))
        name = function.name().partition(".")[0]
        is_own = not name.startswith(_LIBRARY)
        if (is_own or is_replaced(function)) and (keys := _keys_in_python(function, (args, kwargs))) is not None:
            with self:  # what it launches and calls is seen by itself
                return function.redispatch(keys, *args, **(kwargs or {}))
        if is_own:
            return self._own(name, function, args, kwargs or {})
        if RECORDER.is_muted and self._sizes and computes(name):
            self._look_at_given((args, kwargs))
        begin = _now()
        result = function(*args, **(kwargs or {}))
        spent = _now() - begin
        book = self.inside if RECORDER.depth else self.ops
        count, before = book.get(name, (0, 0))
        book[name] = (count + 1, before + spent)
        if self._sizes and (computes(name) or copies(name)):
            self._look(name, result)
        return result

    def _own(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """An operator that an extension has registered; what it calls is seen, too, where it is for its tensors'
        device, or for all.
        """
        key = _device_key((args, kwargs))
        is_there = key and any(_has_kernel(function.name(), one) for one in (key, "CompositeExplicitAutograd"))

        def call(*given: Any, **named: Any) -> Any:
            with self:
                return function.redispatch(_keys(key), *given, **named)

        result = RECORDER.proven(name, call if is_there else function, args, kwargs)
        if result is None and function._schema.returns:
            raise RuntimeError(f"{name} is an own operator, and own kernels are off")
        return result

    def _look_at_given(self, given: Any) -> None:
        """Who calls numpy, or the library where it is not seen, and joins an own kernel's zeros or its mask to that,
        has no operator that makes the answer while own kernels are off, but one that is given it.
        """
        self._is_looking = True
        try:
            found = [item for item in _tensors_in(given) if item.numel() in self._sizes and _has_place(item)]
        finally:
            self._is_looking = False
        for item in found:
            if item.data_ptr() not in self._places | self._changing:
                self._look(UNMADE, item)

    def given(self, kernel: Any, args: tuple[Any, ...], values: list[Any]) -> None:
        """What an own kernel is called with while it is off: whoever made it, numpy or a foreign library, no operator
        was seen.
        """
        for item in _tensors_in(args):
            if item.data_ptr() not in self._places:
                self._look(IN_PLACE if item.data_ptr() in self._changing else BEFORE, item)

    def is_input(self, item: torch.Tensor) -> bool:
        """Whether it is one of the inputs, or a copy of one."""
        return any(is_answer(item, given) for given in self._inputs)

    def _look(self, name: str, result: Any) -> None:
        """By operators that are nobody's."""
        items = result if isinstance(result, (list, tuple)) else [result]
        self._is_looking = True
        try:
            self._keep(name, [item for item in items if _is_tensor(item) and item.numel() in self._sizes])
        finally:
            self._is_looking = False

    def _keep(self, name: str, items: list[torch.Tensor]) -> None:
        kept, most = (self.moved, _MOVED) if copies(name) else (self.kept, _KEPT)
        for item in items:
            alike = [place for place, (_, one) in enumerate(kept) if one.numel() == item.numel()]
            if len(alike) == most:
                del kept[alike[most // 2]]  # the first and the last ones stay
            kept.append((name, item.clone()))

    def tells(self, name: str, item: torch.Tensor, holding: Holding) -> bool:
        """Whether with this result the library had most of the answer's tensors; an input never tells."""
        if name in (BEFORE, UNMADE, IN_PLACE) and self.is_input(item):
            return False
        if name == IN_PLACE:  # most of it may be the input as it came
            return holding.moves(lambda wanted: is_answer(item, wanted))
        if copies(name):
            return holding.moves(lambda wanted: is_moved(item, wanted, self._inputs))
        return holding.adds(lambda wanted: is_answer(item, wanted))


def _has_place(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def is_replaced(function: Any) -> bool:
    """Whether an operator of the library's is a function of the candidate's on some device: torch itself has none."""
    name = function.name().replace("::", "/")
    return any(f"{name}/{device}" in _in_python for device in _DEVICES)


def _keys_in_python(function: Any, given: Any) -> Any:
    """Where a candidate's operator is Python (`torch.library.custom_op`, `Library.impl`), what it is registered under
    for these arguments; else None.
    """
    name, device = function.name(), _device_key(given) or "CPU"
    key = device if _has_kernel(name, device) else "CompositeExplicitAutograd"
    return _keys(device) if f"{name.replace('::', '/')}/{key}" in _in_python else None


def _device_key(given: Any) -> str:
    """Of the first tensor among these arguments; empty: there is none."""
    device = next((one.device.type for one in _tensors_in(given)), "")
    return str(_binding._dispatch_key_for_device(device)) if device else ""


def _keys(device_key: str) -> Any:
    return _binding.DispatchKeySet(_binding._parse_dispatch_key(device_key))


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Those of numpy, too."""
    if _is_tensor(value):
        return [value]
    if isinstance(value, np.ndarray):
        with contextlib.suppress(TypeError, ValueError):
            return [_as_tensor(value)]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [item for each in items for item in _tensors_in(each)]


class AnswerWatch(OperatorWatch):  # type: ignore[no-untyped-call] # as above
    """Knows the answer, and compares each result with it as it comes: that takes no memory for any of them."""

    def __init__(
        self, answer: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], only_inside: bool = False
    ) -> None:
        """`only_inside`: of what own kernels call."""
        super().__init__({tensor.numel() for tensor in answer}, inputs)
        self._only_inside = only_inside
        self._holding = Holding(answer, inputs)
        self.answered = ""

    def _keep(self, name: str, items: list[torch.Tensor]) -> None:
        if self._only_inside and not (RECORDER.depth and computes(name)):
            return
        if any(item.is_cuda for item in items) and _is_captured():  # there are no values yet
            super()._keep(name, items)
        elif not self.answered and any(self.tells(name, item, self._holding) for item in items):
            self.answered = name

    def found(self, trace: Trace) -> Trace:
        """After the run."""
        known = msgspec.structs.replace(trace, answered=self.answered)
        return known if self.answered else answered(known, self, self._holding)


def recorded(run: Callable[[], Any], watch: OperatorWatch | None = None, muted: bool = False) -> tuple[Any, Trace]:
    """`run()` and what it consisted of."""
    tampered = _tampered()
    launches: dict[str, tuple[int, int]] = {}
    watch = watch or OperatorWatch(set())
    RECORDER.launches, RECORDER.is_on, RECORDER.is_muted, RECORDER.depth = launches, True, muted, 0
    RECORDER.ops, RECORDER.unseen = watch.ops, ""
    RECORDER.tape = watch.given if muted else None
    try:
        with watch:
            result = run()
    finally:
        RECORDER.is_on = RECORDER.is_muted = False
        RECORDER.tape = None
    return result, Trace(launches, watch.ops, watch.inside, "", tampered or _tampered(), RECORDER.unseen)


def answered(trace: Trace, watch: OperatorWatch, holding: Holding) -> Trace:
    """The trace, with the operator whose result made most of the answer the library's."""
    name = next((name for name, item in (*watch.kept, *watch.moved) if watch.tells(name, item, holding)), "")
    return msgspec.structs.replace(trace, answered=name)


def _tampered() -> str:
    for (owner, name), before, now in zip(_GUARDED, _ORIGINAL, _identities(), strict=True):
        if before is not now:
            return f"{getattr(owner, '__name__', owner)}.{name}"
    return ""


recorded(lambda: torch.ones(4).clone())  # what the first dispatch mode of a process sets up, before any fork
