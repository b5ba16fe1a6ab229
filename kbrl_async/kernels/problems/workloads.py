"""A problem's workloads: named cases of shapes, dtypes, constructor arguments and input makers.

::

    WORKLOADS rows ┐                              ┌─ source of one workload: a problem like any other
    get_input_groups() ├─ of(source) ─▶ Workload ─┤
    FREE_SHAPES ─ tails(secret) ┘                 └─ or module + `inputs`: what one child draws for several

A workload is bound to a problem as text at its end, so whatever handles problems handles it. Nothing here runs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from kbrl_async.kernels.problems.precision import CAST_INPUTS, CAST_MODEL, DTYPES
from protocols.records import Problem

Role = Literal["both", "checked", "timed"]
ROLES: tuple[str, ...] = get_args(Role)
MOST = 64
"""Workloads of one problem."""
GROUPS = "get_input_groups"
INPUTS = "get_inputs"
NO_GROUP = "there is no input group"
ROW_KEYS = ("name", "shape", "inputs", "init", "dtype", "weight", "role")
Scalar = int | float | bool | str
_SINGLE = 'WORKLOADS = []\nFREE_SHAPES = {}\nDTYPE = ""\n'
_TAIL, _TAILS = "tail ", ("one", "odd", "prime", "empty")


class Workload(msgspec.Struct, frozen=True):
    """One row of the table."""

    name: str = ""
    shape: dict[str, Scalar] = {}
    """Keyword arguments of what makes its inputs."""
    inputs: str = INPUTS
    """The function of the file that makes them."""
    init: Any = None
    """What `get_init_inputs()` gives; None: as the file says."""
    dtype: str = ""
    """Module and floating-point inputs are cast to it; empty: as they are."""
    weight: float = 1.0
    """How often a user meets it, as a share of all weights."""
    role: Role = "both"
    group: int = -1
    """Of `get_input_groups()`; −1: `inputs` makes them."""
    is_tail: bool = False
    """Drawn by the bench, and dropped where the reference does not take it."""

    @property
    def is_timed(self) -> bool:
        return self.role != "checked"

    @property
    def arguments(self) -> tuple[str, str]:
        """Workloads that are equal in this have one module, with one set of weights."""
        return repr(self.init), self.dtype


class Bound(msgspec.Struct, frozen=True):
    """A workload of a problem."""

    workload: Workload
    problem: Problem
    """Whose only inputs these are."""
    module: Problem
    """The same without its inputs: equal for all that share a module."""
    inputs: str
    """What is missing there: text that makes `get_inputs` of the file's functions."""


def bind(problem: Problem, workload: Workload) -> Bound:
    inputs = _inputs_text(workload)
    module = problem.source.rstrip() + "\n"
    if workload.init is not None:
        module += f"\n\ndef get_init_inputs():\n    return {workload.init!r}\n"
    if workload.dtype:
        module += CAST_MODEL.format(dtype=workload.dtype)
        inputs += CAST_INPUTS.format(dtype=workload.dtype)
    named = msgspec.structs.replace
    return Bound(
        workload,
        named(problem, source=f"{module}{inputs}\n{_SINGLE}"),
        named(problem, source=f"{module}\n{_SINGLE}"),
        inputs,
    )


def _inputs_text(workload: Workload) -> str:
    if workload.group >= 0:
        number = workload.group
        return (
            f"\n\ndef get_inputs():\n    groups = {GROUPS}()\n    if len(groups) <= {number}:\n"
            f'        raise LookupError("{NO_GROUP} {number}")\n    return list(groups[{number}])\n'
        )
    if not workload.shape and workload.inputs == INPUTS:
        return ""
    call = f"**{workload.shape!r}" if workload.shape else ""
    return (
        f"\n\n_workload_inputs = {workload.inputs}\n\n\ndef get_inputs():\n    return list(_workload_inputs({call}))\n"
    )


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_rows(rows: Any, makers: Mapping[str, Sequence[str]]) -> tuple[Workload, ...]:
    """`makers`: the file's functions and the names of their arguments (`"**"` among them: any).

    :raises ValueError: and `TypeError`: what is wrong, by name.
    """
    if not isinstance(rows, list | tuple) or len(rows) > MOST:
        raise ValueError(f"a list of at most {MOST} rows is wanted")
    found = tuple(_row(row, number, makers) for number, row in enumerate(rows))
    names = [workload.name for workload in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two workloads are called {min(twice)!r}")
    if found and not any(workload.is_timed for workload in found):
        raise ValueError("no workload is timed")
    return found


def _row(row: Any, number: int, makers: Mapping[str, Sequence[str]]) -> Workload:
    if not isinstance(row, dict):
        raise ValueError(f"row {number} is no mapping")
    for key in row:
        if key not in ROW_KEYS:
            raise ValueError(f"row {number} has the unknown key {key!r}; known are {', '.join(ROW_KEYS)}")
    shape, inputs = row.get("shape", {}), row.get("inputs", INPUTS)
    name = row.get("name", _named(shape) or f"workload {number}")
    if not isinstance(name, str) or not 0 < len(name) <= 60 or not name.isprintable() or is_tail(name):
        raise ValueError(f"row {number} has the name {name!r}; up to 60 printable letters, and no tail, are wanted")
    if inputs not in makers:
        raise ValueError(f"{name!r} wants inputs of {inputs!r}, and the file has no such function")
    _check_shape(name, shape, inputs, makers[inputs])
    weight, role, dtype, init = row.get("weight", 1.0), row.get("role", "both"), row.get("dtype", ""), row.get("init")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1e6:
        raise ValueError(f"{name!r} has the weight {weight!r}; a number above 0 is wanted")
    if role not in ROLES:
        raise ValueError(f"{name!r} has the role {role!r}; choose {', '.join(ROLES)}")
    if dtype not in ("", *DTYPES.values()):
        raise ValueError(f"{name!r} has the dtype {dtype!r}; choose {', '.join(DTYPES.values())}")
    if init is not None and not (isinstance(init, list | tuple) and _is_finite(init)):
        raise ValueError(f"{name!r} has init {init!r}; a list of constructor arguments is wanted")
    return Workload(name, shape, inputs, None if init is None else list(init), dtype, float(weight), role)


def _check_shape(name: str, shape: Any, maker: str, arguments: Sequence[str]) -> None:
    if not isinstance(shape, dict):
        raise ValueError(f"{name!r} has no mapping as its shape")
    for key, value in shape.items():
        if not isinstance(value, Scalar) or not _is_finite(value) or (isinstance(value, int) and abs(value) >= 1 << 40):
            raise ValueError(f"{name!r}: {key} is {value!r}; a number, truth value or text is wanted")
        if "**" not in arguments and key not in arguments:
            known = ", ".join(arguments) or "none"
            raise ValueError(f"{name!r} sets {key!r}, and {maker} has no such argument, but {known}")


def _is_finite(value: Any) -> bool:
    """Whether it can be written down and read again as it is."""
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_finite(item) for key, item in value.items())
    return value is None or (isinstance(value, Scalar) and not (isinstance(value, float) and not math.isfinite(value)))


def _named(shape: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in shape.items())[:60] if isinstance(shape, dict) else ""


# ── secret shapes ───────────────────────────────────────────────────────────────────────────────────────────────────


def tails(free: Mapping[str, tuple[int, int]], inputs: str, rng: random.Random) -> tuple[Workload, ...]:
    """Shapes at the edges of what a problem declares free: all ones, odd ones, primes, and empty where 0 is allowed."""
    found: dict[str, Workload] = {}
    for kind in _TAILS if free else ():
        if kind == "empty" and all(least > 0 for least, _ in free.values()):
            continue
        shape = {name: _edge(kind, least, most, rng) for name, (least, most) in free.items()}
        if kind == "empty":
            full = rng.choice([name for name, (least, _) in free.items() if least == 0])
            shape = {name: 0 if name == full else max(1, value) for name, value in shape.items()}
        name = _TAIL + _named(shape)
        found.setdefault(name, Workload(name, dict(shape), inputs, weight=1.0, role="checked", is_tail=True))
    return tuple(found.values())


def is_tail(name: str) -> bool:
    """Whether a verdict's workload was a secret one."""
    return name.startswith(_TAIL)


def _edge(kind: str, least: int, most: int, rng: random.Random) -> int:
    least = max(1, least)
    if kind == "one":
        return least
    drawn = round(math.exp(rng.uniform(math.log(least), math.log(most))))
    drawn = min(most, max(least, drawn))
    steps = range(drawn, most + 1), range(drawn, least - 1, -1)
    fits = _is_prime if kind == "prime" else _is_odd
    return next((n for step in steps for n in step if fits(n)), drawn)


def _is_odd(number: int) -> bool:
    return number % 2 == 1


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
