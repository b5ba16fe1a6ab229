"""A program as one Python function of ours: a line a step, each value let go after its last use, as forward would.

::

    Operator ─▶ v5 = f2(v0, c1, dim=k3)      Call ─▶ f3(v5.data_ptr(), 64, k4)      … v5 = None … return v7

The text holds numbers of ours and nothing else: whatever a program names is bound beforehand.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kbrl_async.kernels.verify import wire
from kbrl_async.kernels.verify.cpu.library import operator
from kbrl_async.kernels.verify.cpu.program import Call, CpuProgram, Step, numbers, used

_C_TYPES: dict[str, Any] = {"long": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double}
Note = Callable[[Step, int, Any], None]
"""Hears of a step, when it began, and its result."""


class Compiler:
    """Makes functions of one program, each `(*inputs) -> outputs`. `libraries` are shared objects by artifact."""

    def __init__(
        self, program: CpuProgram, constants: Sequence[torch.Tensor], libraries: Mapping[str, ctypes.CDLL]
    ) -> None:
        self._program = program
        self._names: dict[str, Any] = {f"v{program.inputs + n}": tensor for n, tensor in enumerate(constants)}
        self._parts = [self._part(place, step, libraries) for place, step in enumerate(program.steps)]
        self._dead = _last_uses(program)

    def forward(self) -> Callable[..., Any]:
        """All steps."""
        return self._function(lambda place, target, expression: [f"{target} = {expression}"], {})

    def watched(self, note: Note, now: Callable[[], int], *, muted: bool) -> Callable[..., Any]:
        """The same; each step is told to `note`, and with `muted` calls of own functions are left out."""

        def lines(place: int, target: str, expression: str) -> list[str]:
            if muted and isinstance(self._program.steps[place], Call):
                return []
            return ["begun = now()", f"made = {expression}", f"note(steps[{place}], begun, made)", f"{target} = made"]

        return self._function(lines, {"note": note, "now": now, "steps": self._program.steps})

    def _function(self, lines: Callable[[int, str, str], list[str]], names: dict[str, Any]) -> Callable[..., Any]:
        text = []
        for place, (target, expression) in enumerate(self._parts):
            text += lines(place, target, expression)
            text += [f"v{number} = None" for number in self._dead.get(place, ())]
        text.append(f"return {self._expression(self._program.tree)}")
        head = f"def forward({', '.join(f'v{number}' for number in range(self._program.inputs))}):\n"
        names = {**self._names, **names}
        exec(compile(head + "\n".join(f"    {line}" for line in text), "program", "exec"), names)  # noqa: S102 - text of ours
        made: Callable[..., Any] = names["forward"]
        return made

    def _part(self, place: int, step: Step, libraries: Mapping[str, ctypes.CDLL]) -> tuple[str, str]:
        """Where the step's results go, and what it does."""
        if isinstance(step, Call):
            function = libraries[step.artifact][step.name]
            function.restype = None
            function.argtypes = [_C_TYPES.get(kind, ctypes.c_void_p) for kind, _ in step.arguments]
            given = [f"v{n}.data_ptr()" if kind == "tensor" else self._bound(n) for kind, n in step.arguments]
            self._names[f"f{place}"] = function
            return "_", f"f{place}({', '.join(given)})"
        found = operator(step.name)
        assert found is not None, "a program that was read names known operators only"
        self._names[f"f{place}"] = found._op
        positional, named = step.arguments[1]
        parts = [self._expression(item) for item in positional[1]]
        parts += [f"{key}={self._expression(item)}" for key, item in named[1].items()]
        return self._target(step.results), f"f{place}({', '.join(parts)})"

    def _target(self, results: wire.Tree) -> str:
        kind, body = results
        if kind in ("L", "U"):
            return f"({''.join(f'{self._target(item)}, ' for item in body)})" if body else "_"
        # What was there before the first step is changed in place, never bound anew.
        return f"v{body}" if kind == "T" and body >= self._program.given else "_"

    def _expression(self, tree: wire.Tree) -> str:
        kind, body = tree
        if kind == "T":
            return f"v{body}"
        if kind == "L":
            return f"[{', '.join(map(self._expression, body))}]"
        if kind == "U":
            return f"({''.join(f'{self._expression(item)}, ' for item in body)})"
        if kind == "D":
            return f"{{{', '.join(f'{self._bound(key)}: {self._expression(item)}' for key, item in body.items())}}}"
        return self._bound(getattr(torch, body) if kind == "Y" else body)

    def _bound(self, value: Any) -> str:
        name = f"k{len(self._names)}"
        self._names[name] = value
        return name


def _last_uses(program: CpuProgram) -> dict[int, list[int]]:
    """By step: values that nobody needs after it."""
    kept, seen = set(numbers(program.tree)), set(range(program.given))
    dead: dict[int, list[int]] = {}
    for place in range(len(program.steps) - 1, -1, -1):
        step = program.steps[place]
        made = [] if isinstance(step, Call) else list(numbers(step.results))
        for number in dict.fromkeys((*used(step), *made)):
            if number not in seen and number not in kept:
                seen.add(number)
                dead.setdefault(place, []).append(number)
    return dead
