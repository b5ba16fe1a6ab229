"""What a problem says of itself beside its code: literals at the top of its file, or keys of a file beside it; each
may be left out. docs/problem-contract.md has every key.

::

    INPUT_DOMAINS = {"decay": (None, 0.0), 2: {"sorted": True}}   # by forward's name or by position
    TOLERANCES = {"bfloat16": 2e-2, "float32": (1e-5, 1e-6)}      # by an output's dtype: relative and absolute
    WORKLOADS = [{"shape": {"rows": 64}, "weight": 3}, {"shape": {"rows": 4096}}]
    FREE_SHAPES = {"rows": (1, 8192)}

Read from the syntax tree: nothing runs.
"""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.problems.precision import DTYPES
from kbrl_async.kernels.problems.workloads import BOUND, GROUPS, INPUTS, Workload, read_rows

_CURE = "docs/problem-contract.md has every key with an example"
_ALIKE = 0.8
Domain = tuple[float, float]
_DOMAIN_KEYS = ("least", "most", "sorted", "one_hot", "distribution", "below")
_DISTRIBUTIONS = ("normal", "uniform", "simplex", "drawn")
_FLOORS = {"float32": 0.0, "tf32": 2e-3, "float16": 1e-2, "bfloat16": 1.6e-2}
"""Arithmetic that a candidate may use for fp32 outputs, and what that allows of each element in any case."""
PRECISIONS = (*_FLOORS, "float8_e4m3fn", "float8_e5m2", "int8", "int4", "nvfp4", "mxfp4")
"""The narrowest numbers that a candidate may multiply matrices in. What that costs is found out for each problem."""


class Declared(msgspec.Struct, frozen=True):
    domains: Mapping[int, Domain] = {}
    """By the position of forward's argument; the ends may be infinite."""
    fixed: frozenset[int] = frozenset()
    """Only ever as they are drawn."""
    tolerances: Mapping[str, tuple[float, float]] = {}
    """Relative and absolute, by dtype as `"bfloat16"`; the absolute one is for outputs of the nominal inputs' scale."""
    workloads: tuple[Workload, ...] = ()
    free: Mapping[str, tuple[int, int]] = {}
    """Least and most of the arguments of `get_inputs` whose values the problem leaves open."""
    has_groups: bool = False
    """Its inputs are those of `get_input_groups()`, and nothing here says how many there are."""
    precision: str = ""
    """One of `PRECISIONS`; empty: as the problem's dtypes say."""
    dtype: str = ""
    forbidden: tuple[str, ...] = ()
    """Operators of torch that a candidate must not call, such as `mm`."""
    inputs_may_change: bool = False
    deterministic: bool = False
    """The same inputs give the same bits."""
    backward: str = ""
    """Gradients that it asks for: `inputs`, `parameters` or `all`."""
    is_bound: bool = False
    """It is one workload of a problem that has more."""
    license: str = ""
    origin: str = ""

    @property
    def is_single(self) -> bool:
        """It has one workload, which is the problem as it stands."""
        several = self.workloads or self.free or self.has_groups or self.dtype or self.backward
        return self.is_bound or not several


def declared(source: str, origin: str = "the problem") -> Declared:
    """:raises ProblemError: what it declares can't be read; `origin` is named with the line."""
    if not any(name in source for name in (*_READERS, GROUPS)):
        return Declared()
    tree = ast.parse(source)
    about = _About(tree)
    found: dict[str, Any] = {}
    # Of several assignments the last one holds, as in Python.
    for name, node in {name: node for name, node in _constants(tree) if name in _READERS}.items():
        field, read = _READERS[name]
        try:
            found[field] = read(ast.literal_eval(about.spelt_out(node.value)), about)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError, MemoryError) as error:
            raise ProblemError(f"{origin}:{node.lineno}: {name} can't be read: {error}", _CURE) from None
    return _joined(found, about)


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.Assign]]:
    for node in tree.body:
        for target in node.targets if isinstance(node, ast.Assign) else []:
            if isinstance(target, ast.Name) and isinstance(node, ast.Assign):
                yield target.id, node


def _joined(found: dict[str, Any], about: _About) -> Declared:
    domains, structured = found.pop("domains", ({}, frozenset()))
    found["fixed"] = found.get("fixed", frozenset()) | structured
    if found.get("precision") == PRECISIONS[0]:
        found["precision"] = ""
    if relative := _FLOORS.get(found.get("precision", ""), 0.0):
        found["tolerances"] = {"float32": (relative, relative), **found.get("tolerances", {})}
    has_groups = GROUPS in about.functions and "workloads" not in found
    return Declared(domains=domains, has_groups=has_groups, **found)


def refuse_misspelt(tree: ast.Module, origin: str) -> None:
    """A constant whose name is nearly one of ours, and which nothing in the file uses, is a slip.

    :raises ProblemError: there is one.
    """
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for name, node in _constants(tree):
        near = difflib.get_close_matches(name, _READERS, 1, _ALIKE) if name.isupper() else []
        if near and name not in _READERS and name not in used:
            cause = f"{origin}:{node.lineno}: {name} is unknown and used by nothing; {near[0]} is meant?"
            raise ProblemError(cause, _CURE)


def rendered(keys: Mapping[str, Any], origin: str) -> str:
    """Keys of a file beside a problem as the literals that stand for them.

    :raises ProblemError: one is unknown; it is named.
    """
    lines = []
    for key, value in keys.items():
        name = str(key).upper()
        if name not in KEYS or str(key) != name.lower():
            known = [one.lower() for one in KEYS]
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"; {near[0]} is meant?" if near else f"; known are {', '.join(known)}"
            raise ProblemError(f"{origin} has the unknown key {key!r}{hint}", _CURE)
        lines.append(f"{name} = {value!r}\n")
    return "\n\n" + "".join(lines) if lines else ""


class _About:
    """Names that declarations refer to."""

    def __init__(self, tree: ast.Module) -> None:
        self.functions = {node.name: _names(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
        known = [(name, node.value) for name, node in _constants(tree) if isinstance(node.value, ast.Constant)]
        self._constants = dict(known)
        self.arguments: list[str] = []
        """Of forward, without self."""
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == "Model":
                forwards = (i for i in node.body if isinstance(i, ast.FunctionDef) and i.name == "forward")
                self.arguments = next(([a.arg for a in one.args.args[1:]] for one in forwards), [])

    def spelt_out(self, value: ast.expr) -> ast.expr:
        """With the file's numbers and texts in place of their names."""
        found: ast.expr = _Named(self._constants).visit(value)
        return found

    def place(self, key: str | int) -> int:
        if isinstance(key, int):
            return key
        if key not in self.arguments:
            raise ValueError(f"forward has no argument {key!r}, but {', '.join(self.arguments) or 'none'}")
        return self.arguments.index(key)


class _Named(ast.NodeTransformer):
    def __init__(self, constants: Mapping[str, ast.expr]) -> None:
        self._constants = constants

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._constants.get(node.id, node)


def _names(node: ast.FunctionDef) -> list[str]:
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return [*names, *(["**"] if node.args.kwarg else [])]


def _domains(value: Any, about: _About) -> tuple[dict[int, Domain], frozenset[int]]:
    made, structured = {}, set()
    for key, given in value.items():
        place = about.place(key)
        rule = given if isinstance(given, dict) else dict(zip(("least", "most"), given, strict=True))
        _refuse_unknown(f"{key!r}", rule, _DOMAIN_KEYS)
        least, most = rule.get("least"), rule.get("most")
        if "below" in rule:
            least, most = 0, int(rule["below"]) - 1
        if rule.get("distribution", "drawn") not in _DISTRIBUTIONS:
            raise ValueError(f"{key!r} has the distribution {rule['distribution']!r}; choose {_DISTRIBUTIONS}")
        if rule.get("sorted") or rule.get("one_hot") or "distribution" in rule or "below" in rule:
            structured.add(place)
        domain = (-math.inf if least is None else float(least), math.inf if most is None else float(most))
        if not domain[0] <= domain[1] or (domain[0] == domain[1] and "below" not in rule):
            raise ValueError(f"{key!r} has no values between {least} and {most}")
        made[place] = domain
    return made, frozenset(structured)


def _refuse_unknown(what: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise ValueError(f"{what} has the unknown key {key!r}; known are {', '.join(known)}")


def _fixed(value: Any, about: _About) -> frozenset[int]:
    return frozenset(about.place(key) for key in value)


def _tolerances(value: Any, about: _About) -> dict[str, tuple[float, float]]:
    made = {}
    for dtype, given in value.items():
        relative, absolute = (given, given) if isinstance(given, (int, float)) else given
        if not (0 <= float(relative) < 1 and float(absolute) >= 0 and str(dtype).isidentifier()):
            raise ValueError(f"{dtype!r} has no tolerance {given!r}")
        made[str(dtype)] = (float(relative), float(absolute))
    return made


def _workloads(value: Any, about: _About) -> tuple[Workload, ...]:
    return read_rows(value, about.functions)


def _free(value: Any, about: _About) -> dict[str, tuple[int, int]]:
    made = {}
    known = about.functions.get(INPUTS, [])
    for name, ends in value.items():
        least, most = ends
        if name not in known and "**" not in known:
            raise ValueError(f"{INPUTS} has no argument {name!r}, but {', '.join(known) or 'none'}")
        if isinstance(least, bool) or not (isinstance(least, int) and isinstance(most, int) and 0 <= least <= most):
            raise ValueError(f"{name!r} is no range of sizes: {ends!r}")
        made[name] = (least, min(max(1, most), 1 << 31))
    return made


def _one_of(*known: str) -> Callable[[Any, _About], str]:
    def read(value: Any, about: _About) -> str:
        if value not in known:
            raise ValueError(f"{value!r} is none of {', '.join(known)}")
        return str(value)

    return read


def _names_of(value: Any, about: _About) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if not all(isinstance(name, str) and name for name in given):
        raise ValueError("names of operators are wanted, such as 'mm'")
    return tuple(name.removeprefix("aten::").removeprefix("torch.") for name in given)


def _truth(value: Any, about: _About) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither True nor False")
    return value


def _text(value: Any, about: _About) -> str:
    if not isinstance(value, str) or len(value) > 200:
        raise ValueError("a short text is wanted")
    return value


_READERS: dict[str, tuple[str, Callable[[Any, _About], Any]]] = {
    "INPUT_DOMAINS": ("domains", _domains),
    "FIXED_INPUTS": ("fixed", _fixed),
    "TOLERANCES": ("tolerances", _tolerances),
    "WORKLOADS": ("workloads", _workloads),
    "FREE_SHAPES": ("free", _free),
    "DTYPE": ("dtype", _one_of(*DTYPES.values())),
    "PRECISION": ("precision", _one_of(*PRECISIONS)),
    "FORBIDDEN": ("forbidden", _names_of),
    "INPUTS_MAY_CHANGE": ("inputs_may_change", _truth),
    "DETERMINISTIC": ("deterministic", _truth),
    "BACKWARD": ("backward", _one_of("", "inputs", "parameters", "all")),
    BOUND: ("is_bound", _truth),
    "LICENSE": ("license", _text),
    "ORIGIN": ("origin", _text),
}
KEYS = tuple(name for name in _READERS if name != BOUND)
"""What a person may write."""
