"""What a problem says of itself beside its code, in literals at the top of its file; each may be left out.

::

    INPUT_DOMAINS = {"decay": (None, 0.0), 2: (0.0, 1.0)}   # by forward's name or by position: least, most
    FIXED_INPUTS = ["block_table"]                          # only ever as get_inputs draws them
    TOLERANCES = {"bfloat16": 2e-2, "float32": (1e-5, 1e-6)}  # by an output's dtype: relative and absolute

Read from the syntax tree: nothing runs.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from kbrl_async.errors import ProblemError

_NAMES = ("INPUT_DOMAINS", "FIXED_INPUTS", "TOLERANCES")
_CURE = 'Write INPUT_DOMAINS = {"x": (0.0, None)}, FIXED_INPUTS = ["x"], TOLERANCES = {"bfloat16": 2e-2}'
Domain = tuple[float, float]


class Declared(msgspec.Struct, frozen=True):
    domains: Mapping[int, Domain] = {}
    """By the position of forward's argument; the ends may be infinite."""
    fixed: frozenset[int] = frozenset()
    tolerances: Mapping[str, tuple[float, float]] = {}
    """Relative and absolute, by dtype as `"bfloat16"`; the absolute one is for outputs of the nominal inputs' scale."""


def declared(source: str, origin: str = "the problem") -> Declared:
    """:raises ProblemError: what it declares can't be read; `origin` is named with the line."""
    if not any(name in source for name in _NAMES):
        return Declared()
    tree = ast.parse(source)
    arguments = _arguments(tree)
    found: dict[str, Any] = {}
    for node in tree.body:
        for target in node.targets if isinstance(node, ast.Assign) else []:
            name = target.id if isinstance(target, ast.Name) else ""
            if name in _NAMES and isinstance(node, ast.Assign):
                try:
                    found[name] = _READERS[name](ast.literal_eval(node.value), arguments)
                except (ValueError, TypeError, AttributeError, KeyError) as error:
                    raise ProblemError(f"{origin}:{node.lineno}: {name} can't be read: {error}", _CURE) from None
    return Declared(found.get("INPUT_DOMAINS", {}), found.get("FIXED_INPUTS", frozenset()), found.get("TOLERANCES", {}))


def _arguments(tree: ast.Module) -> list[str]:
    """The names of forward's arguments, without self."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Model":
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "forward":
                    return [argument.arg for argument in item.args.args[1:]]
    return []


def _place(key: str | int, arguments: list[str]) -> int:
    if isinstance(key, int):
        return key
    if key not in arguments:
        raise ValueError(f"forward has no argument {key!r}, but {', '.join(arguments) or 'none'}")
    return arguments.index(key)


def _domains(value: Any, arguments: list[str]) -> dict[int, Domain]:
    made = {}
    for key, (least, most) in value.items():
        domain = (-math.inf if least is None else float(least), math.inf if most is None else float(most))
        if not domain[0] < domain[1]:
            raise ValueError(f"{key!r} has no values between {least} and {most}")
        made[_place(key, arguments)] = domain
    return made


def _fixed(value: Any, arguments: list[str]) -> frozenset[int]:
    return frozenset(_place(key, arguments) for key in value)


def _tolerances(value: Any, arguments: list[str]) -> dict[str, tuple[float, float]]:
    made = {}
    for dtype, given in value.items():
        relative, absolute = (given, given) if isinstance(given, (int, float)) else given
        if not (0 <= float(relative) < 1 and float(absolute) >= 0 and str(dtype).isidentifier()):
            raise ValueError(f"{dtype!r} has no tolerance {given!r}")
        made[str(dtype)] = (float(relative), float(absolute))
    return made


_READERS = {"INPUT_DOMAINS": _domains, "FIXED_INPUTS": _fixed, "TOLERANCES": _tolerances}
